"""The all-reduces of one model's gradients on one rank, started while backward still computes.

A hook on each parameter tells when its gradient is there. The first time, the order is learned:
rank 0's becomes that of all ranks, and the plan follows (`dure.parallel.data.buckets`). From then
on a bucket leaves when its last gradient is there and all buckets before it have left, so that all
ranks issue the same all-reduces in the same order. When backward is done, what is still missing
counts as zeros, and the last message leaves.

The last message carries a tail: numbers of the owner, and a flag a gradient that says how many
ranks used it. A gradient that nobody used stays None, and one that others used becomes their sum.

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
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor, nn

from dure.collectives.algorithms import native
from dure.collectives.group import Group
from dure.collectives.handle import Handle
from dure.errors import DureError
from dure.parallel.data.buckets import ALL, LONG, Kind, Plan
from dure.parallel.data.how import (
    WAYS,
    How,
    Way,
    bits_follow_the_plan,
    first_plan,
    needs_no_thread,
    shares_memory,
    way_of,
)
from dure.parallel.data.messages import Messages
from dure.parallel.data.trials import Trials
from dure.parallel.direct import Direct
from dure.record.meter import Counters


class Transfer(NamedTuple):
    """An all-reduce that has ended: the message's number in the plan; seconds of
    `time.perf_counter`.

    Where several were under way at once, it starts when the one before has ended.
    """

    number: int
    start: float
    end: float


class Owner(Protocol):
    """Who has a reducer. It is not kept alive by it."""

    def tail_length(self, messages: int) -> int:
        """How many numbers it sends along, where a step has so many messages."""

    def tail_numbers(self, entered: Sequence[float]) -> Sequence[float]:
        """These numbers; asked for when the last message leaves.

        entered: when this rank's all-reduce of each message began, in seconds of
        `time.perf_counter`; 0 if it has not.
        """

    def backward_begins(self) -> None:
        """The first gradient of a backward pass that was not announced by `Reducer.begin`."""


class Reducer:
    """The gradients of `parameters` over the ranks of `group`; all ranks make it together."""

    def __init__(
        self,
        parameters: Sequence[nn.Parameter],
        group: Group,
        how: How,
        owner: Owner,
    ) -> None:
        self.all_parameters, self.group, self.how = list(parameters), group, how
        self._owner = weakref.ref(owner)
        self.enabled = True
        self.active = False
        self.next = 0
        self.hidden = Counters()
        self.order: list[int] | None = None  # as learned or restored
        self._restored: list[Mapping[str, Any]] = []
        self._hooks: list[Any] = []
        self._streams: dict[torch.device, torch.cuda.Stream] = {}
        self._under_way: deque[tuple[int, Callable[[], float]]] = deque()
        self._adopt()

    def _adopt(self) -> None:
        """Takes the parameters that are trainable now. Nothing is known of their order."""
        for hook in self._hooks:
            hook.remove()
        self._trainable = [parameter.requires_grad for parameter in self.all_parameters]
        self.parameters = [
            parameter for parameter in self.all_parameters if parameter.requires_grad
        ]
        self.kinds = [Kind.of(parameter) for parameter in self.parameters]
        me = weakref.ref(self)
        self._hooks = [
            parameter.register_post_accumulate_grad_hook(partial(_is_there, me, index))  # type: ignore[no-untyped-call]
            for index, parameter in enumerate(self.parameters)
        ]
        self.way: Way = "after"
        self._at_once = False
        self._shares_memory = shares_memory(self.group, self.kinds)
        self._direct = Direct(self.parameters if self._shares_memory else [], self._place_of)
        self.messages: Messages | None = None
        self._times = [1] * len(self.parameters)
        self._used: list[bool] | None = None
        self._trials: Trials | None = None

    @property
    def owner(self) -> Owner:
        owner = self._owner()
        assert owner is not None
        return owner

    def check_parameters(self) -> None:
        """Learns the plan anew if parameters were frozen or unfrozen since. All ranks have to do
        that alike."""
        if self._trainable != [parameter.requires_grad for parameter in self.all_parameters]:
            self.order = None
            self._adopt()

    def look_at(self, outputs: Iterable[Tensor]) -> None:
        """Prepares the graph of a forward pass, so that long gradients are computed where they
        leave from."""
        if self.messages is not None:
            self._direct.prepare(outputs)

    def _place_of(self, parameter: nn.Parameter) -> Tensor | None:
        index = next(index for index, other in enumerate(self.parameters) if other is parameter)
        return self.messages.place_of(index) if self.messages is not None else None

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Inside, gradients are accumulated and not summed."""
        before, self.enabled = self.enabled, False
        try:
            yield
        finally:
            self.enabled = before

    # One backward pass.

    def begin(self) -> None:
        """A backward pass begins, whose gradients are to be summed."""
        while self._under_way:  # of a pass that has failed
            with suppress(DureError):
                self._under_way.popleft()[1]()
        self.check_parameters()
        self.active = True
        self.next = 0
        self.started = time.perf_counter()
        self.transfers: list[Transfer] = []
        self._handles: list[Handle[None]] = []
        self._finished: list[int] = []
        self._ready_at = [0.0] * len(self.parameters)
        self._count = [0] * len(self.parameters)
        self.missing: dict[int, Tensor] = {}
        if self.messages is not None:
            self._entered = [0.0] * self.messages.count
            self._waiting = [len(bucket.members) for bucket in self.messages.plan.buckets]

    def is_there(self, index: int) -> None:
        """A gradient was accumulated; called by the hook of its parameter."""
        if not self.active:
            if not self.enabled:
                return
            self.owner.backward_begins()
        self._count[index] += 1
        self._ready_at[index] = time.perf_counter()
        if self.messages is None:
            self._finished.append(index)
        elif self.way != "after":
            self._may_leave(index, self.messages)

    def _may_leave(self, index: int, messages: Messages) -> None:
        """A gradient is ready when it was accumulated as often as in the first pass: a checkpoint
        that runs backward inside backward accumulates in several goes."""
        count, times = self._count[index], self._times[index]
        if count > times:
            raise RuntimeError(
                f"the gradient of a parameter of shape {tuple(self.parameters[index].shape)} was "
                f"accumulated {count} "
                f"times in a backward pass, but {times} in the first: it may have left already. "
                f"Checkpoint with "
                "use_reentrant=False, or checkpoint the same parts in every step, or let overlap "
                "be 'after'"
            )
        self._waiting[messages.bucket_of[index]] -= count == times
        while self.next < len(self._waiting) and self._waiting[self.next] == 0:
            self._leave(self.next)

    def finish(self) -> None:
        """Backward is done: what has not left leaves now, and all sums are there at the return.

        Raises PeerLostError if a rank is lost.
        """
        self.computed = time.perf_counter()
        self.active = False
        if self.messages is None:
            self._learn()
        messages = self.messages
        assert messages is not None
        while self.next < messages.count:
            self._leave(self.next)
        for handle in self._handles:
            handle.wait()
        self._end(0)
        for device, stream in self._streams.items():
            torch.cuda.current_stream(device).wait_stream(stream)
        self.numbers = self._arrived(messages)
        if self._trials is not None:
            self._try()

    def take_part(self) -> None:
        """Sums with the others where this rank has no gradients: adds zeros."""
        for parameter in self.parameters:
            parameter.grad = None
        self.begin()
        self.finish()

    @property
    def any_gradient(self) -> bool:
        """Whether this pass has given any parameter a gradient."""
        return any(self._count)

    # What leaves.

    def _leave(self, number: int) -> None:
        """Message `number` of the plan leaves."""
        messages = self.messages
        assert messages is not None
        self.next = number + 1
        flat, views, missing = messages.fill(number)
        self.missing.update(missing)
        if self.next == messages.count and len(messages.tail):
            used = [float(index not in self.missing) for index in range(self._flags)]
            messages.write_tail([*self.owner.tail_numbers(self._entered), *used])
        transfer = partial(self._transfer, messages, number, flat, views)
        if self._at_once:
            self._begin(messages, number, flat, views)
            return
        if self.way == "after" or self.group.size == 1:
            transfer()
            return
        name = f"all-reduce of bucket {number}"
        if not flat.is_cuda:
            self._handles.append(self.group.perform(name, transfer, flat, True))  # type: ignore[arg-type]
            return
        stream = self._streams.setdefault(flat.device, torch.cuda.Stream(flat.device))  # type: ignore[no-untyped-call]
        stream.wait_stream(torch.cuda.current_stream(flat.device))
        with torch.cuda.stream(stream):
            self._handles.append(self.group.perform(name, transfer, flat, True))  # type: ignore[arg-type]

    def _transfer(
        self, messages: Messages, number: int, flat: Tensor, views: Sequence[Tensor]
    ) -> None:
        """Begins an all-reduce, and ends the one before: two are under way, so that the link never
        waits for us."""
        self._begin(messages, number, flat, views)
        self._end(int(number < messages.count - 1))

    def _begin(
        self, messages: Messages, number: int, flat: Tensor, views: Sequence[Tensor]
    ) -> None:
        self._entered[number] = entered = time.perf_counter()
        self._under_way.append((number, messages.begin(number, flat, views)))
        if self.way == "split-phase" and self.active:
            self.group.meter.inside("native all-reduce", entered, time.perf_counter())

    def _end(self, left: int) -> None:
        """Waits until so many all-reduces are under way at most."""
        while len(self._under_way) > left:
            earlier, end = self._under_way.popleft()
            ended = end()
            begun = self.computed if self.way == "split-phase" else self._entered[earlier]
            start = max(begun, self.transfers[-1].end if self.transfers else 0.0)
            self.transfers.append(Transfer(earlier, start, max(start, ended)))

    def _arrived(self, messages: Messages) -> list[float]:
        """Gives the sums to parameters that only others have used; returns the owner's numbers."""
        numbers: list[float] = messages.tail.tolist()
        used = numbers[len(numbers) - self._flags :] if self._flags else self._used
        for index, gradient in self.missing.items():
            if used is None or used[index] or (self.how.compresses and bool(gradient.any())):
                self.parameters[index].grad = gradient
        return numbers[: len(numbers) - self._flags]

    # What is planned.

    def _learn(self) -> None:
        """Makes the plan after the first pass; all ranks together."""
        check_alike(self.parameters, self.group)
        self._times = [max(1, count) for count in self._count]
        if self.order is None:
            devices = {kind.device for kind in self.kinds}
            seen = (
                self._finished if len(devices) == 1 else []
            )  # engines of several devices race with each other
            last_first = list(dict.fromkeys(reversed(seen)))[::-1]
            unseen = [
                index
                for index in reversed(range(len(self.parameters)))
                if index not in set(last_first)
            ]
            order = self.group.all_gather_values(
                [float(index) for index in [*last_first, *unseen]]
            )[0]
            self.order = [int(index) for index in order]
        if self.how.static:
            used = [float(parameter.grad is not None) for parameter in self.parameters]
            self._used = [
                any(flags) for flags in zip(*self.group.all_gather_values(used), strict=True)
            ]
        mine = [float(WAYS.index(way_of(self.how, self.group, self.kinds)))]
        self.way = WAYS[max(int(row[0]) for row in self.group.all_gather_values(mine))]
        self._at_once = needs_no_thread(self.how, self.group, self.way)
        follows = bits_follow_the_plan(self.how, self.group, self.kinds)
        if (
            self.way == "beside"
            and not follows
            and self.how.bucket_bytes is None
            and self.group.size > 1
        ):
            long, ahead = ALL if self._shares_memory else LONG, native.sends_ahead(self.group)
            trials = Trials(self.kinds, self.order, long, self.how.algorithm == "native" and ahead)
            self._trials = trials if trials.worth_it else None
        if self._trials is not None:
            self._take(self._trials.plan())
        else:
            plan = first_plan(
                self.how, self.kinds, self.order, self.way, self._shares_memory, follows
            )
            self._take(plan)

    def _take(self, plan: Plan) -> None:
        """Follows `plan` from now on."""
        self._flags = 0 if self.how.static else len(self.parameters)
        carries = plan.carries and not self.how.compresses
        tail = self.owner.tail_length(len(plan.buckets) + (not carries)) + self._flags
        split = self.way == "split-phase"
        self.messages = Messages(
            plan, self.parameters, self.group, self.how, tail, self._restored, split
        )
        self._restored = []
        self._entered = [0.0] * self.messages.count
        self._waiting = [0] * len(plan.buckets)

    def _try(self) -> None:
        """One more trial; at the end the ranks take the best plan."""
        assert self._trials is not None
        ready = [max(0.0, at - self.started) for at in self._ready_at]
        self._trials.note(ready, self.transfers, self.started, self.computed)
        if self._trials.go_on(self.group):
            self._take(self._trials.plan())
            return
        self._take(self._trials.best(self.group))
        self._trials = None

    def account(self, step: int, arrivals: Mapping[int, float] | None = None) -> None:
        """Tells the meter what the last pass took. arrivals: when the last rank entered each
        message, where known."""
        meter, before = self.group.meter, self.group.meter.counters
        hidden, shown = before.hidden_seconds, before.communication_seconds
        computed = self.computed if self.way == "beside" else None
        for transfer in self.transfers:
            arrival = (arrivals or {}).get(transfer.number)
            name = (
                "compressed all-reduce"
                if self.how.compresses
                else f"{self.how.algorithm} all-reduce"
            )
            meter.communication(name, transfer.start, transfer.end, step, arrival, computed)
        self.hidden.hidden_seconds += meter.counters.hidden_seconds - hidden
        self.hidden.communication_seconds += meter.counters.communication_seconds - shown

    def lengths(self) -> list[int]:
        """Elements of each message of a step; empty until the first one is through."""
        return self.messages.lengths() if self.messages is not None else []

    # What goes on elsewhere.

    def state(self) -> dict[str, Any]:
        """What makes the sums of the next steps: the order of gradients, and what compressors
        remember."""
        compressors = self.messages.compressors if self.messages is not None else []
        return {
            "order": self.order,
            "compressors": [compressor.state() for compressor in compressors],
        }

    def restore(self, state: Mapping[str, Any]) -> None:
        """Goes on from a `state`, of a reducer that has not summed anything yet."""
        self.order, self._restored = state["order"], list(state["compressors"])


def _is_there(reducer: weakref.ref[Reducer], index: int, parameter: Tensor) -> None:
    alive = reducer()
    if alive is not None and alive._owner() is not None:
        alive.is_there(index)


def check_alike(parameters: Sequence[Tensor], group: Group) -> None:
    """Raises ValueError, on every rank, if the ranks' parameters are not of the same shapes and
    dtypes."""
    text = repr([(tuple(parameter.shape), parameter.dtype) for parameter in parameters])
    number = int.from_bytes(hashlib.blake2b(text.encode(), digest_size=6).digest(), "little")
    numbers = [
        row[0] for row in group.all_gather_values([float(number)], "comparison of the models")
    ]
    others = [rank for rank, other in enumerate(numbers) if other != numbers[0]]
    if others:
        names = ", ".join(map(str, others))
        raise ValueError(
            f"rank {names} has other parameters or buffers than rank 0: their shapes and dtypes "
            f"have to be the same"
        )
