"""All-reduces of a model's gradients on this rank, started during backward.

A hook on each parameter shows when its gradient is complete. The order is learned in the first
pass: all ranks adopt rank 0's order, and the plan follows from it (`dure.parallel.data.buckets`).
From then on a bucket is sent when its last gradient is complete and all buckets before it have been
sent, so that all ranks issue the same all-reduces in the same order. After backward, missing
gradients count as zeros, and the last message is sent.

The last message carries a trailer (`dure.collectives.trailer`): the fields of the owner, and for
each gradient how many ranks used it. A gradient that no rank used stays None; a gradient that only
other ranks used becomes their sum.

Source: Li et al. 2020, "PyTorch Distributed: Experiences on Accelerating Data Parallel Training".
"""

from __future__ import annotations

import hashlib
import time
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from dure.collectives.group import Group
from dure.collectives.handle import Handle
from dure.collectives.trailer import Number, Numbers, Trailer, TrailerField, summed_field
from dure.errors import DureError
from dure.machine.devices import is_cpu, marked
from dure.parallel.data.buckets import AllReduceTransfer, BucketPlan, GradientSpec
from dure.parallel.data.messages import BucketMessages
from dure.parallel.data.reduction_settings import (
    OVERLAP_MODES,
    OverlapMode,
    ReductionSettings,
    bits_depend_on_buckets,
    needs_no_thread,
    overlap_mode_of,
    plan_of,
    shares_memory,
)
from dure.parallel.gradients_into_buckets import GradientsIntoBuckets
from dure.record.meter import Counters


class ReducerOwner(Protocol):
    """Object that has a reducer; the reducer does not keep it alive."""

    announces: bool
    """Whether the owner calls `Reducer.begin` before every backward pass."""

    def tail_fields(self, messages: int) -> Sequence[TrailerField]:
        """Return the owner's fields of the trailer, for a step of `messages` messages."""

    def tail_numbers(self, entered: Sequence[float]) -> Numbers:
        """Return this rank's numbers for these fields, when the last message is sent.

        entered: when this rank's all-reduce of each message began, in seconds of
        `time.perf_counter`; 0 if it has not begun.
        """

    def backward_begins(self) -> None:
        """Begin a backward pass at its first gradient, if `Reducer.begin` was not called before."""


class Reducer:
    """Sums of the gradients of `parameters` over a group; all ranks create it together.

    trailer_sums: sums of the trailer's fields in the last pass. transfers: all-reduces of the last
        pass.
    computed: end of its backward, in seconds of `time.perf_counter`. reading, read_at: on an
    accelerator, an event before the trailer was read, and the time after. missing: by index, the
    zeros that this rank sent for missing gradients.
    """

    def __init__(
        self,
        parameters: Sequence[nn.Parameter],
        group: Group,
        how: ReductionSettings,
        owner: ReducerOwner,
    ) -> None:
        self.all_parameters = list(parameters)
        self.group = group
        self.how = how
        self._name = "compressed all-reduce" if how.compresses else f"{how.algorithm} all-reduce"
        self._owner = weakref.ref(owner)
        self.enabled = True
        self.active = False
        self.next = 0
        self.computed = 0.0
        self.reading: torch.Event | None = None
        self.read_at = 0.0
        self.trailer_sums: dict[str, list[float]] = {}
        self.missing: dict[int, Tensor] = {}
        self.transfers: list[AllReduceTransfer] = []
        # counters of this reducer alone: the meter counts all operations of its group
        self.hidden = Counters()
        self.order: list[int] | None = None  # as learned or restored
        self._restored: list[Mapping[str, Any]] = []
        self._hooks: list[Any] = []
        self._handles: list[Handle[None]] = []
        self._streams: dict[torch.device, torch.Stream] = {}
        # started and not ended: the number of each message, and the function that waits for its end
        self._under_way: deque[tuple[int, Callable[[], float]]] = deque()
        self._adopt()

    def _adopt(self) -> None:
        """Adopt the parameters that are trainable now. Their order is unknown."""
        self._trainable = [parameter.requires_grad for parameter in self.all_parameters]
        self.parameters = [
            parameter for parameter in self.all_parameters if parameter.requires_grad
        ]
        self.kinds = [GradientSpec.of(parameter) for parameter in self.parameters]
        # Until the plan is learned gradients only accumulate: the first pass sends at its end.
        self.way: OverlapMode = "after"
        self._at_once = False
        self._shares_memory = shares_memory(self.group, self.kinds)
        # without shared memory a long gradient is sent from autograd's memory
        self._direct = GradientsIntoBuckets(
            self.parameters if self._shares_memory else [], self._place_of
        )
        self.messages: BucketMessages | None = None
        self.trailer = Trailer([], self.group.rank, self.group.size)
        # how often a pass accumulates each gradient; more than once if a checkpoint nests backward
        self._times = [1] * len(self.parameters)
        self._used: list[bool] | None = None
        self._watch()

    def _watch(self) -> None:
        """Register a hook on each parameter."""
        self._unwatch()
        # A parameter keeps its hooks alive, and so would keep the reducer with all its buffers.
        me = weakref.ref(self)
        self._hooks = [
            parameter.register_post_accumulate_grad_hook(partial(_is_there, me, index))  # type: ignore[no-untyped-call]
            for index, parameter in enumerate(self.parameters)
        ]

    def _unwatch(self) -> None:
        for hook in self._hooks:
            hook.remove()
        self._hooks = []

    @property
    def owner(self) -> ReducerOwner:
        """The owner, which is alive while its backward pass runs."""
        owner = self._owner()
        assert owner is not None
        return owner

    def check_parameters(self) -> None:
        """Learn a new plan if parameters were frozen or unfrozen.

        All ranks have to freeze and unfreeze alike.
        """
        if self._trainable != [parameter.requires_grad for parameter in self.all_parameters]:
            self.order = None
            self._adopt()

    def look_at(self, outputs: Iterable[Tensor]) -> None:
        """Prepare the graph of a forward pass to compute large gradients in their buckets."""
        if self._direct.weights and self.messages is not None:
            self._direct.prepare(outputs)

    def _place_of(self, parameter: nn.Parameter) -> Tensor | None:
        if self.messages is None:
            return None
        index = next(index for index, other in enumerate(self.parameters) if other is parameter)
        return self.messages.place_of(index)

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Context manager in which gradients are accumulated and not summed."""
        before = self.enabled
        self.enabled = False
        try:
            yield
        finally:
            self.enabled = before

    # One backward pass.

    def begin(self) -> None:
        """Begin a backward pass whose gradients are summed."""
        # Operations of a failed pass end before anything else starts. That pass has raised its
        # error already.
        while self._under_way:  # of a pass that has failed
            with suppress(DureError):
                self._under_way.popleft()[1]()
        self.check_parameters()
        self.active = True
        self.next = 0
        self.transfers = []
        self.missing = {}
        self._handles = []
        self._finished: list[int] = []
        self._count = [0] * len(self.parameters)
        if self.messages is not None:
            self._entered = [0.0] * self.messages.count
            # gradients that each bucket still waits for
            self._waiting = self.messages.members[:]

    def is_there(self, index: int) -> None:
        """Record that a gradient was accumulated; called by the hook of its parameter."""
        # A pass that was not announced begins with its first gradient. Inside `paused` nothing is
        # summed.
        if not self.active:
            if not self.enabled:
                return
            self.owner.backward_begins()
        self._count[index] += 1
        if self.messages is None:
            self._finished.append(index)
        elif self.way != "after":
            self._may_leave(index, self.messages)

    def _may_leave(self, index: int, messages: BucketMessages) -> None:
        """Send the buckets that are complete now.

        A gradient is complete when it was accumulated as often as in the first pass: a checkpoint
        that runs backward inside backward accumulates several times.
        """
        count = self._count[index]
        times = self._times[index]
        if count > times:
            raise RuntimeError(
                f"the gradient of a parameter of shape {tuple(self.parameters[index].shape)} was "
                f"accumulated {count} times in a backward pass, but {times} in the first: it may "
                "have been sent already. Checkpoint with use_reentrant=False, or checkpoint the "
                "same parts in every step, or set overlap='after'"
            )
        # A complete bucket waits for the buckets before it: messages are matched only by their
        # order, so all ranks start them in the order of the plan.
        self._waiting[messages.bucket_of[index]] -= count == times
        while self.next < len(self._waiting) and self._waiting[self.next] == 0:
            self._leave(self.next, messages)

    def finish(self) -> None:
        """Send the remaining messages after backward, and wait for all sums.

        Raises PeerLostError if a rank is lost.
        """
        # Messages from here on are no longer inside backward (`_begin`).
        self.computed = time.perf_counter()
        self.active = False
        # Every rank learns at the end of its first pass, or none does: `_learn` is collective.
        messages = self.messages if self.messages is not None else self._learn()
        # Missing gradients are sent as zeros: the other ranks wait for equally many messages.
        while self.next < messages.count:
            self._leave(self.next, messages)
        for handle in self._handles:
            handle.wait()
        # `_transfer` has ended its messages; messages that started without it end here.
        if self._under_way:
            self._end(0)
        # On a GPU the handles only show that the sums are queued; the optimizer must run later.
        for device, stream in self._streams.items():
            torch.accelerator.current_stream(device).wait_stream(stream)
        self._arrived(messages)

    def take_part(self) -> None:
        """Take part in a step of the other ranks without gradients: this rank adds zeros."""
        for parameter in self.parameters:
            parameter.grad = None
        self.begin()
        self.finish()

    @property
    def any_gradient(self) -> bool:
        """Whether this pass has given any parameter a gradient; for owners that do not announce."""
        return any(self._count)

    # Sending.

    def _leave(self, number: int, messages: BucketMessages) -> None:
        """Send message `number` of the plan."""
        self.next = number + 1
        flat, views, missing = messages.fill(number)
        self.missing.update(missing)
        # The trailer is written last, when this rank's arrival and used gradients are known.
        if self.next == messages.count and self.trailer.length:
            messages.write_tail(self.trailer.encode(self._said()))
        if self._at_once:
            self._begin(messages, number, flat, views)
        elif self.way == "after" or self.group.size == 1:
            self._transfer(messages, number, flat, views)
        else:
            self._transfer_beside(messages, number, flat, views)

    def _said(self) -> dict[str, Sequence[Number]]:
        """Return this rank's trailer: its owner's numbers, and which gradients it has used."""
        said = dict(self.owner.tail_numbers(self._entered))
        if not self.how.static:
            used = [1.0] * len(self.parameters)
            for index in self.missing:
                used[index] = 0.0
            said["used"] = used
        return said

    def _transfer_beside(
        self, messages: BucketMessages, number: int, flat: Tensor, views: Sequence[Tensor]
    ) -> None:
        """Run `_transfer` on a thread, and for a GPU on a stream, during backward."""
        transfer = partial(self._transfer, messages, number, flat, views)
        name = f"all-reduce of bucket {number}"
        if flat.is_cpu:
            self._handles.append(self.group.perform(name, transfer, flat, True))  # type: ignore[arg-type]
            return
        stream = self._streams.get(flat.device)
        if stream is None:
            stream = self._streams[flat.device] = torch.Stream(flat.device)
        # The bucket was filled on the stream of backward.
        stream.wait_stream(torch.accelerator.current_stream(flat.device))
        with stream:
            self._handles.append(self.group.perform(name, transfer, flat, True))  # type: ignore[arg-type]

    def _transfer(
        self, messages: BucketMessages, number: int, flat: Tensor, views: Sequence[Tensor]
    ) -> None:
        """Start an all-reduce and end the previous; the last message also ends itself.

        Two all-reduces are therefore in flight at a time, and the link never waits for this rank.
        """
        self._begin(messages, number, flat, views)
        self._end(int(number < messages.count - 1))

    def _begin(
        self, messages: BucketMessages, number: int, flat: Tensor, views: Sequence[Tensor]
    ) -> None:
        entered = time.perf_counter()
        self._entered[number] = entered
        self._under_way.append((number, messages.begin(number, flat, views)))
        # Backward is still running: the meter has to subtract this interval from its time.
        if self.way == "split-phase" and self.active:
            self.group.meter.inside("native all-reduce", entered, time.perf_counter())

    def _end(self, left: int) -> None:
        """Wait until at most `left` all-reduces are in flight."""
        while len(self._under_way) > left:
            earlier, end = self._under_way.popleft()
            ended = end()
            # in split-phase the start was counted inside backward
            begun = self.computed if self.way == "split-phase" else self._entered[earlier]
            # If several are in flight, the link is counted for one at a time.
            start = max(begun, self.transfers[-1].end if self.transfers else 0.0)
            self.transfers.append(AllReduceTransfer(earlier, start, max(start, ended)))

    def _arrived(self, messages: BucketMessages) -> None:
        """Decode the trailer, and set gradients of parameters that only other ranks have used."""
        device = messages.trailer.device
        if not is_cpu(device):
            self.reading = marked(device)
        self.trailer_sums = self.trailer.decode(messages.trailer.tolist())
        if not is_cpu(device):
            self.read_at = time.perf_counter()
        # A gradient that no rank has used stays None, so that the optimizer skips the parameter. A
        # compressor may send residuals of earlier steps, though no rank has used the parameter in
        # this step.
        used = self.trailer_sums.get("used", self._used)
        for index, gradient in self.missing.items():
            if used is None or used[index] or (self.how.compresses and bool(gradient.any())):
                self.parameters[index].grad = gradient

    # Planning.

    def _learn(self) -> BucketMessages:
        """Create the plan after the first pass; all ranks call it together.

        Raises ValueError, on every rank, if their parameters differ.
        """
        # From here on sizes are assumed to be equal: a rank with other sizes would hang, or sum
        # unrelated elements.
        check_same_shapes(self.parameters, self.group)
        self._times = [max(1, count) for count in self._count]
        if self.order is None:
            self.order = self._order_of_rank_0()
        if self.how.static:
            used = [float(parameter.grad is not None) for parameter in self.parameters]
            rows = self.group.all_gather_values(used)
            self._used = [any(flags) for flags in zip(*rows, strict=True)]
        mine = float(OVERLAP_MODES.index(overlap_mode_of(self.how, self.group, self.kinds)))
        self.way = OVERLAP_MODES[max(int(row[0]) for row in self.group.all_gather_values([mine]))]
        self._at_once = needs_no_thread(self.how, self.group, self.way)
        if self.way == "after" and self.owner.announces:
            self._unwatch()  # all messages are sent at the end: no hook is needed
        plan = plan_of(
            self.how,
            self.kinds,
            self.order,
            self.way,
            shared=self._shares_memory,
            follows=bits_depend_on_buckets(self.how, self.group, self.kinds),
        )
        return self._follow(plan)

    def _order_of_rank_0(self) -> list[int]:
        """Return the order in which gradients finish on rank 0, with all parameters.

        A gradient that was accumulated several times counts at its last accumulation. Gradients
        that were not observed come in reverse order of the parameters, as in backward. With several
        devices the engines of autograd race, so that the observed order is not used.
        """
        seen = self._finished if len({kind.device for kind in self.kinds}) == 1 else []
        # reversed twice, so that the last of several accumulations counts
        order = list(dict.fromkeys(reversed(seen)))[::-1]
        known = set(order)
        order += [index for index in reversed(range(len(self.parameters))) if index not in known]
        rows = self.group.all_gather_values([float(index) for index in order])
        return [int(index) for index in rows[0]]

    def _follow(self, plan: BucketPlan) -> BucketMessages:
        """Create the messages of `plan` and use them from now on."""
        self.trailer = self._tail_for(plan.messages())
        self.messages = BucketMessages(
            plan,
            self.parameters,
            self.group,
            self.how,
            tail=self.trailer.length,
            remembered=self._restored,
            split_phase=self.way == "split-phase",
        )
        self._restored = []
        self._entered = [0.0] * self.messages.count
        return self.messages

    def _tail_for(self, messages: int) -> Trailer:
        """Return the trailer of a step of `messages` messages."""
        # A static graph needs no flags: `_learn` has found out which gradients are used.
        fields = list(self.owner.tail_fields(messages))
        if not self.how.static:
            fields.append(summed_field("used", len(self.parameters)))
        return Trailer(fields, self.group.rank, self.group.size)

    def computed_until(self, computed: float) -> None:
        """Set the end of backward on an accelerator, before `account`.

        computed: in seconds of `time.perf_counter`. The last sum ended when the trailer was read.
        Sums that could begin only after backward begin there.
        """
        self.computed = computed
        if self.transfers:
            last = self.transfers[-1]
            self.transfers[-1] = last._replace(end=max(last.start, self.read_at))
        if self.way != "beside":
            self.transfers = [
                one._replace(start=max(one.start, computed), end=max(one.end, computed))
                for one in self.transfers
            ]

    def account(self, step: int, arrivals: Sequence[float] | None = None) -> None:
        """Report the last pass to the meter.

        arrivals: when the last rank entered each message; None if unknown.
        """
        # The meter counts for the whole group; the contribution of this pass is the difference.
        counters = self.group.meter.counters
        hidden = counters.hidden_seconds
        shown = counters.communication_seconds
        computed = self.computed if self.way == "beside" else None
        for number, start, end in self.transfers:
            arrival = arrivals[number] if arrivals is not None else None
            self.group.meter.communication(
                self._name, start, end, step, arrival=arrival, computed=computed
            )
        self.hidden.hidden_seconds += counters.hidden_seconds - hidden
        self.hidden.communication_seconds += counters.communication_seconds - shown

    def lengths(self) -> list[int]:
        """Return the elements of each message of a step; empty before the end of the first pass."""
        return self.messages.lengths() if self.messages is not None else []

    # Checkpoints.

    def state(self) -> dict[str, Any]:
        """Return the order of the gradients and the states of the compressors, for `restore`."""
        compressors = self.messages.compressors if self.messages is not None else []
        return {
            "order": self.order,
            "compressors": [compressor.state() for compressor in compressors],
        }

    def restore(self, state: Mapping[str, Any]) -> None:
        """Restore a `state`, in a reducer that has not summed anything yet."""
        self.order = state["order"]
        self._restored = list(state["compressors"])


def _is_there(reducer: weakref.ref[Reducer], index: int, parameter: Tensor) -> None:
    """Forward a parameter's hook to the reducer, without keeping the reducer or its owner alive."""
    alive = reducer()
    if alive is not None and alive._owner() is not None:
        alive.is_there(index)


def check_same_shapes(parameters: Sequence[Tensor], group: Group) -> None:
    """Check that the parameters of all ranks have the same shapes and dtypes.

    Raises ValueError, on every rank, if they differ.
    """
    text = repr([(tuple(parameter.shape), parameter.dtype) for parameter in parameters])
    # 6 bytes, since float64 holds every integer below 2^53
    number = int.from_bytes(hashlib.blake2b(text.encode(), digest_size=6).digest(), "little")
    rows = group.all_gather_values([float(number)], "comparison of the models")
    others = [str(rank) for rank, row in enumerate(rows) if row != rows[0]]
    if others:
        raise ValueError(
            f"rank {', '.join(others)} has different parameters or buffers than rank 0: their "
            "shapes and dtypes have to be the same"
        )
