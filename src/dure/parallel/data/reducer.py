"""The all-reduces of one model's gradients on one rank, started while backward still computes.

A hook on each parameter tells when its gradient is there. The first time, the order is learned:
rank 0's becomes that of all ranks, and the plan follows (`dure.parallel.data.buckets`). From then
on a bucket leaves when its last gradient is there and all buckets before it have left, so that all
ranks issue the same all-reduces in the same order. When backward is done, what is still missing
counts as zeros, and the last message leaves.

The last message carries a tail (`dure.collectives.tail`): the fields of the owner, and for each
gradient how many ranks used it. A gradient that no rank used stays None; one that only others used
becomes their sum.

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
from dure.collectives.tail import Field, Numbers, Tail, summed
from dure.errors import DureError
from dure.parallel.data.buckets import Kind, Plan, Transfer
from dure.parallel.data.how import (
    WAYS,
    How,
    Way,
    bits_follow_the_plan,
    needs_no_thread,
    plan_of,
    shares_memory,
    way_of,
)
from dure.parallel.data.messages import Messages
from dure.parallel.direct import Direct
from dure.record.meter import Counters


class Owner(Protocol):
    """The object that has a reducer, and that the reducer does not keep alive."""

    announces: bool
    """Whether it calls `Reducer.begin` before every backward pass, so that none begins unseen."""

    def tail_fields(self, messages: int) -> Sequence[Field]:
        """What it sends along in the tail, where a step has so many messages."""

    def tail_numbers(self, entered: Sequence[float]) -> Numbers:
        """What this rank says in these fields; asked for when the last message leaves.

        entered: when this rank's all-reduce of each message began, in seconds of
        `time.perf_counter`; 0 if it has not.
        """

    def backward_begins(self) -> None:
        """The first gradient of a backward pass that was not announced by `Reducer.begin`."""


class Reducer:
    """The gradients of `parameters` over the ranks of `group`; all ranks make it together.

    heard: the sums of the tail's fields in the last pass. transfers: its all-reduces. computed:
    when its backward was done, in seconds of `time.perf_counter`. missing: by index, the zeros that
    this rank sent for gradients that it did not have.
    """

    def __init__(
        self, parameters: Sequence[nn.Parameter], group: Group, how: How, owner: Owner
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
        self.heard: dict[str, list[float]] = {}
        self.missing: dict[int, Tensor] = {}
        self.transfers: list[Transfer] = []
        # of this reducer alone: the meter counts for all that its group does
        self.hidden = Counters()
        self.order: list[int] | None = None  # as learned or restored
        self._restored: list[Mapping[str, Any]] = []
        self._hooks: list[Any] = []
        self._handles: list[Handle[None]] = []
        self._streams: dict[torch.device, torch.cuda.Stream] = {}
        # begun and not ended: the number of each message, and what waits for its end
        self._under_way: deque[tuple[int, Callable[[], float]]] = deque()
        self._adopt()

    def _adopt(self) -> None:
        """Takes the parameters that are trainable now. Nothing is known of their order."""
        self._trainable = [parameter.requires_grad for parameter in self.all_parameters]
        self.parameters = [
            parameter for parameter in self.all_parameters if parameter.requires_grad
        ]
        self.kinds = [Kind.of(parameter) for parameter in self.parameters]
        # Until the plan is learned gradients only accumulate: the first pass sends at its end.
        self.way: Way = "after"
        self._at_once = False
        self._shares_memory = shares_memory(self.group, self.kinds)
        # elsewhere a long gradient that is alone leaves from where autograd has put it
        self._direct = Direct(self.parameters if self._shares_memory else [], self._place_of)
        self.messages: Messages | None = None
        self.tail = Tail([], self.group.rank, self.group.size)
        # how often a pass accumulates each gradient; more than once where a checkpoint nests
        # backward
        self._times = [1] * len(self.parameters)
        self._used: list[bool] | None = None
        self._watch()

    def _watch(self) -> None:
        """Puts a hook on each parameter."""
        self._unwatch()
        # A parameter keeps its hooks, and would keep the reducer with all its buffers.
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
    def owner(self) -> Owner:
        """The owner, which is alive while its backward pass runs."""
        owner = self._owner()
        assert owner is not None
        return owner

    def check_parameters(self) -> None:
        """Learns the plan anew if parameters were frozen or unfrozen since.

        All ranks have to freeze and unfreeze alike.
        """
        if self._trainable != [parameter.requires_grad for parameter in self.all_parameters]:
            self.order = None
            self._adopt()

    def look_at(self, outputs: Iterable[Tensor]) -> None:
        """Prepares the graph of a forward pass.

        Long gradients are then computed where they leave from.
        """
        if self._direct.weights and self.messages is not None:
            self._direct.prepare(outputs)

    def _place_of(self, parameter: nn.Parameter) -> Tensor | None:
        if self.messages is None:
            return None
        index = next(index for index, other in enumerate(self.parameters) if other is parameter)
        return self.messages.place_of(index)

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Inside, gradients are accumulated and not summed."""
        before = self.enabled
        self.enabled = False
        try:
            yield
        finally:
            self.enabled = before

    # One backward pass.

    def begin(self) -> None:
        """A backward pass begins, whose gradients are to be summed."""
        # What a failed pass has begun is ended before anything else begins. That pass has raised
        # its error already.
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
        """A gradient was accumulated; called by the hook of its parameter."""
        # Nobody has announced this pass: its first gradient tells. Inside of `paused` none is
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

    def _may_leave(self, index: int, messages: Messages) -> None:
        """A gradient is ready when it was accumulated as often as in the first pass.

        A checkpoint that runs backward inside backward accumulates in several goes.
        """
        count = self._count[index]
        times = self._times[index]
        if count > times:
            raise RuntimeError(
                f"the gradient of a parameter of shape {tuple(self.parameters[index].shape)} was "
                f"accumulated {count} times in a backward pass, but {times} in the first: it may "
                f"have left already. Checkpoint with use_reentrant=False, or checkpoint the same "
                f"parts in every step, or let overlap be 'after'"
            )
        # A full bucket waits for those before it: messages are told apart by nothing but their
        # order, so all ranks begin them in the order of the plan.
        self._waiting[messages.bucket_of[index]] -= count == times
        while self.next < len(self._waiting) and self._waiting[self.next] == 0:
            self._leave(self.next, messages)

    def finish(self) -> None:
        """Backward is done: what has not left leaves now, and all sums are there at the return.

        Raises PeerLostError if a rank is lost.
        """
        # What leaves from here on is no longer inside of backward (`_begin`).
        self.computed = time.perf_counter()
        self.active = False
        # Every rank learns at the end of its first pass, or none does: `_learn` is collective.
        messages = self.messages if self.messages is not None else self._learn()
        # What this rank has not used leaves as zeros: the others wait for as many messages.
        while self.next < messages.count:
            self._leave(self.next, messages)
        for handle in self._handles:
            handle.wait()
        # `_transfer` has ended what it began; what was begun at once is still to be ended.
        if self._under_way:
            self._end(0)
        # On a GPU the handles tell that the sums are queued; the optimizer must come after them.
        for device, stream in self._streams.items():
            torch.cuda.current_stream(device).wait_stream(stream)
        self._arrived(messages)

    def take_part(self) -> None:
        """Sums with the others where this rank has no gradients: adds zeros."""
        for parameter in self.parameters:
            parameter.grad = None
        self.begin()
        self.finish()

    @property
    def any_gradient(self) -> bool:
        """Whether this pass has given any parameter a gradient; for owners that do not announce."""
        return any(self._count)

    # What leaves.

    def _leave(self, number: int, messages: Messages) -> None:
        """Message `number` of the plan leaves."""
        self.next = number + 1
        flat, views, missing = messages.fill(number)
        self.missing.update(missing)
        # The tail is written last, when all else is known: when this rank came, and what it has
        # used.
        if self.next == messages.count and self.tail.length:
            messages.write_tail(self.tail.encode(self._said()))
        if self._at_once:
            self._begin(messages, number, flat, views)
        elif self.way == "after" or self.group.size == 1:
            self._transfer(messages, number, flat, views)
        else:
            self._transfer_beside(messages, number, flat, views)

    def _said(self) -> dict[str, Sequence[float]]:
        """What this rank says in the tail: its owner's numbers, and which gradients it has used."""
        said = dict(self.owner.tail_numbers(self._entered))
        if not self.how.static:
            used = [1.0] * len(self.parameters)
            for index in self.missing:
                used[index] = 0.0
            said["used"] = used
        return said

    def _transfer_beside(
        self, messages: Messages, number: int, flat: Tensor, views: Sequence[Tensor]
    ) -> None:
        """`_transfer` on a thread, and for a GPU on a stream, while backward goes on."""
        transfer = partial(self._transfer, messages, number, flat, views)
        name = f"all-reduce of bucket {number}"
        if not flat.is_cuda:
            self._handles.append(self.group.perform(name, transfer, flat, True))  # type: ignore[arg-type]
            return
        stream = self._streams.setdefault(flat.device, torch.cuda.Stream(flat.device))  # type: ignore[no-untyped-call]
        # The bucket was filled on the stream of backward.
        stream.wait_stream(torch.cuda.current_stream(flat.device))
        with torch.cuda.stream(stream):
            self._handles.append(self.group.perform(name, transfer, flat, True))  # type: ignore[arg-type]

    def _transfer(
        self, messages: Messages, number: int, flat: Tensor, views: Sequence[Tensor]
    ) -> None:
        """Begins an all-reduce and ends the one before; the last message ends itself too.

        So two are under way at a time, and the link never waits for this rank.
        """
        self._begin(messages, number, flat, views)
        self._end(int(number < messages.count - 1))

    def _begin(
        self, messages: Messages, number: int, flat: Tensor, views: Sequence[Tensor]
    ) -> None:
        entered = time.perf_counter()
        self._entered[number] = entered
        self._under_way.append((number, messages.begin(number, flat, views)))
        # Backward still computes: the meter has to take this out of its time.
        if self.way == "split-phase" and self.active:
            self.group.meter.inside("native all-reduce", entered, time.perf_counter())

    def _end(self, left: int) -> None:
        """Waits until at most so many all-reduces are under way."""
        while len(self._under_way) > left:
            earlier, end = self._under_way.popleft()
            ended = end()
            # in split-phase the beginning was counted inside of backward
            begun = self.computed if self.way == "split-phase" else self._entered[earlier]
            # Where several are under way the link is counted for one at a time.
            start = max(begun, self.transfers[-1].end if self.transfers else 0.0)
            self.transfers.append(Transfer(earlier, start, max(start, ended)))

    def _arrived(self, messages: Messages) -> None:
        """Reads the tail, and gives the sums to parameters that only others have used."""
        self.heard = self.tail.decode(messages.tail.tolist())
        # What no rank has used stays None, so that the optimizer leaves it alone. A compressor may
        # send what it kept back in earlier steps, though no rank has used the parameter in this
        # one.
        used = self.heard.get("used", self._used)
        for index, gradient in self.missing.items():
            if used is None or used[index] or (self.how.compresses and bool(gradient.any())):
                self.parameters[index].grad = gradient

    # What is planned.

    def _learn(self) -> Messages:
        """Makes the plan after the first pass; all ranks call it together.

        Raises ValueError, on every rank, if their parameters differ.
        """
        # From here on sizes are taken for equal: a rank with others would hang, or sum what does
        # not belong together.
        check_alike(self.parameters, self.group)
        self._times = [max(1, count) for count in self._count]
        if self.order is None:
            self.order = self._order_of_rank_0()
        if self.how.static:
            used = [float(parameter.grad is not None) for parameter in self.parameters]
            rows = self.group.all_gather_values(used)
            self._used = [any(flags) for flags in zip(*rows, strict=True)]
        mine = float(WAYS.index(way_of(self.how, self.group, self.kinds)))
        self.way = WAYS[max(int(row[0]) for row in self.group.all_gather_values([mine]))]
        self._at_once = needs_no_thread(self.how, self.group, self.way)
        if self.way == "after" and self.owner.announces:
            self._unwatch()  # all messages leave at the end: no gradient has to tell
        plan = plan_of(
            self.how,
            self.kinds,
            self.order,
            self.way,
            shared=self._shares_memory,
            follows=bits_follow_the_plan(self.how, self.group, self.kinds),
        )
        return self._follow(plan)

    def _order_of_rank_0(self) -> list[int]:
        """The order in which gradients finish, of all parameters.

        A gradient that was accumulated several times counts by the last of them. What was not seen
        goes in reverse, as backward does. The engines of several devices race with each other, so
        that there nothing that was seen counts.
        """
        seen = self._finished if len({kind.device for kind in self.kinds}) == 1 else []
        # reversed twice, so that of several finishes the last one counts
        order = list(dict.fromkeys(reversed(seen)))[::-1]
        known = set(order)
        order += [index for index in reversed(range(len(self.parameters))) if index not in known]
        rows = self.group.all_gather_values([float(index) for index in order])
        return [int(index) for index in rows[0]]

    def _follow(self, plan: Plan) -> Messages:
        """Follows `plan` from now on."""
        self.tail = self._tail_for(plan.messages())
        self.messages = Messages(
            plan,
            self.parameters,
            self.group,
            self.how,
            tail=self.tail.length,
            remembered=self._restored,
            split_phase=self.way == "split-phase",
        )
        self._restored = []
        self._entered = [0.0] * self.messages.count
        return self.messages

    def _tail_for(self, messages: int) -> Tail:
        """The tail of a step of so many messages."""
        # A static graph needs no flags: `_learn` has found out which gradients are used.
        fields = list(self.owner.tail_fields(messages))
        if not self.how.static:
            fields.append(summed("used", len(self.parameters)))
        return Tail(fields, self.group.rank, self.group.size)

    def account(self, step: int, arrivals: Sequence[float] | None = None) -> None:
        """Tells the meter what the last pass took.

        arrivals: when the last rank entered each message, where that is known.
        """
        # The meter adds up for the whole group; what this pass has added is the difference.
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
        """Elements of each message of a step; empty until the first one is through."""
        return self.messages.lengths() if self.messages is not None else []

    # What goes on elsewhere.

    def state(self) -> dict[str, Any]:
        """What decides the sums of the next steps: the order, and what compressors remember."""
        compressors = self.messages.compressors if self.messages is not None else []
        return {
            "order": self.order,
            "compressors": [compressor.state() for compressor in compressors],
        }

    def restore(self, state: Mapping[str, Any]) -> None:
        """Goes on from a `state`, in a reducer that has not summed anything yet."""
        self.order = state["order"]
        self._restored = list(state["compressors"])


def _is_there(reducer: weakref.ref[Reducer], index: int, parameter: Tensor) -> None:
    """The hook of a parameter, which must not keep the reducer or its owner alive."""
    alive = reducer()
    if alive is not None and alive._owner() is not None:
        alive.is_there(index)


def check_alike(parameters: Sequence[Tensor], group: Group) -> None:
    """Raises ValueError, on every rank, if the ranks' parameters differ in shape or dtype."""
    text = repr([(tuple(parameter.shape), parameter.dtype) for parameter in parameters])
    # 6 bytes, since float64 holds every integer below 2^53
    number = int.from_bytes(hashlib.blake2b(text.encode(), digest_size=6).digest(), "little")
    rows = group.all_gather_values([float(number)], "comparison of the models")
    others = [str(rank) for rank, row in enumerate(rows) if row != rows[0]]
    if others:
        raise ValueError(
            f"rank {', '.join(others)} has other parameters or buffers than rank 0: their shapes "
            f"and dtypes have to be the same"
        )
