"""The all-reduces of one model's gradients on one rank, started while backward still computes.

A hook on each parameter tells when its gradient is there. The first time, the order is learned: rank 0's becomes that
of all ranks, and the plan follows (`dure.parallel.buckets`). From then on a bucket leaves when its last gradient is
there and all buckets before it have left, so that all ranks issue the same all-reduces in the same order. When backward
is done, what is still missing counts as zeros, and the last message leaves.

The last message carries a tail: numbers of the owner, and a flag a gradient that says how many ranks used it. A
gradient that nobody used stays None, and one that others used becomes their sum.

Source: Li et al. 2020, "PyTorch Distributed: Experiences on Accelerating Data Parallel Training".
"""

from __future__ import annotations

import hashlib
import time
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from dure.collectives.all_reduce import all_reduce
from dure.collectives.compression import Compressor
from dure.collectives.group import Group
from dure.collectives.handle import Handle
from dure.parallel.buckets import LIMIT, Kind, Plan, filled
from dure.parallel.gradients import Flat, as_dense, flat_view, unwritten_zeros
from dure.parallel.how import How, bits_follow_the_plan, way_of
from dure.parallel.trials import Trials
from dure.randomness import derive
from dure.record.meter import Counters


class Transfer(NamedTuple):
    """An all-reduce that has ended: the message's number in the plan; seconds of `time.perf_counter`."""

    number: int
    start: float
    end: float


class Reducer:
    """The gradients of `parameters` over the ranks of `group`; all ranks make it together.

    tail_length: how many numbers the owner sends, as a function of the messages of a step; tail_numbers: these numbers,
    asked for when the last message leaves, given when each earlier one was entered here (0 if it was not yet).
    begins: called at the first gradient of a backward pass that the owner has not announced by `begin`.
    """

    def __init__(
        self,
        parameters: Sequence[nn.Parameter],
        group: Group,
        how: How,
        tail_length: Callable[[int], int] = lambda messages: 0,
        tail_numbers: Callable[[Sequence[float]], Sequence[float]] = lambda entered: (),
        begins: Callable[[], None] = lambda: None,
    ) -> None:
        self.all_parameters, self.group, self.how = list(parameters), group, how
        self._tail_length, self._tail_numbers, self._begins = tail_length, tail_numbers, begins
        self.enabled = True
        self.active = False
        self.next = 0
        self.hidden = Counters()
        self.order: list[int] | None = None  # as learned or restored
        self.compressors: list[Compressor] = []
        self._restored: list[Mapping[str, Any]] = []
        self._hooks: list[Any] = []
        self._streams: dict[torch.device, torch.cuda.Stream] = {}
        self._adopt()

    def _adopt(self) -> None:
        """Takes the parameters that are trainable now. Nothing is known of their order."""
        for hook in self._hooks:
            hook.remove()
        self._trainable = [parameter.requires_grad for parameter in self.all_parameters]
        self.parameters = [parameter for parameter in self.all_parameters if parameter.requires_grad]
        self.kinds = [Kind.of(parameter) for parameter in self.parameters]
        me = weakref.ref(self)
        self._hooks = [
            parameter.register_post_accumulate_grad_hook(partial(_is_there, me, index))  # type: ignore[no-untyped-call]
            for index, parameter in enumerate(self.parameters)
        ]
        self.way = way_of(self.how, self.group, self.kinds)
        self.plan: Plan | None = None
        self._times = [1] * len(self.parameters)
        self._used: list[bool] | None = None
        self._trials: Trials | None = None

    def check_parameters(self) -> None:
        """Learns the plan anew if parameters were frozen or unfrozen since. All ranks have to do that alike."""
        if self._trainable != [parameter.requires_grad for parameter in self.all_parameters]:
            self.order = None
            self._adopt()

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
        if self.plan is not None:
            self._entered = [0.0] * self._messages
            self._waiting = [len(bucket.members) for bucket in self.plan.buckets]

    def is_there(self, index: int) -> None:
        """A gradient was accumulated; called by the hook of its parameter."""
        if not self.active:
            if not self.enabled:
                return
            self._begins()
            if not self.active:
                self.begin()
        self._count[index] += 1
        if self.plan is None or self._count[index] != self._times[index]:
            self._other_than_learned(index)
            return
        self._ready_at[index] = time.perf_counter()
        bucket = self._bucket_of[index]
        self._waiting[bucket] -= 1
        if self.way != "after":
            while self.next < len(self.plan.buckets) and self._waiting[self.next] == 0:
                self._leave(self.next)

    def _other_than_learned(self, index: int) -> None:
        """In the first pass the order is noted; checkpoints that run backward inside backward count several times."""
        if self.plan is None:
            self._finished.append(index)
            self._ready_at[index] = time.perf_counter()
        elif self._count[index] > self._times[index]:
            shape, times = tuple(self.parameters[index].shape), self._times[index]
            raise RuntimeError(
                f"the gradient of a parameter of shape {shape} was accumulated {self._count[index]} times in a "
                f"backward pass, but {times} in the first: it may have left already. Checkpoint with "
                "use_reentrant=False, or checkpoint the same parts in every step"
            )

    def finish(self) -> None:
        """Backward is done: what has not left leaves now, and all sums are there at the return.

        Raises PeerLostError if a rank is lost.
        """
        self.computed = time.perf_counter()
        self.active = False
        if self.plan is None:
            self._learn()
        while self.next < self._messages:
            self._leave(self.next)
        for handle in self._handles:
            handle.wait()
        for device, stream in self._streams.items():
            torch.cuda.current_stream(device).wait_stream(stream)
        self.numbers = self._arrived()
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

    @torch.no_grad()
    def _leave(self, number: int) -> None:
        """Message `number` of the plan leaves."""
        assert self.plan is not None
        self.next = number + 1
        views, flat = self._collect(number) if number < len(self.plan.buckets) else ([], self._flats[-1].whole)
        if self.next == self._messages and len(self._tail):
            used = [index not in self.missing for index in range(self._flags)]
            numbers = [*self._tail_numbers(self._entered), *map(float, used)]
            self._tail.copy_(torch.tensor(numbers, dtype=self._tail.dtype))
        transfer = partial(self._transfer, number, flat, views)
        if self.way != "beside" or self.group.size == 1:
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

    def _transfer(self, number: int, flat: Tensor, views: Sequence[Tensor]) -> None:
        self._entered[number] = start = time.perf_counter()
        compressor = self.compressors[number] if views and self.compressors else None
        if compressor is None:
            all_reduce(flat, self.group, self.how.algorithm, self.how.op)
        else:
            compressor.all_reduce(views, self.group, self.how.algorithm)
            if self.how.op == "avg":
                torch._foreach_div_(list(views), self.group.size)
        self.transfers.append(Transfer(number, start, time.perf_counter()))

    def _collect(self, number: int) -> tuple[list[Tensor], Tensor]:
        """The gradients of a bucket in their places, and all of them as one flat tensor."""
        assert self.plan is not None
        bucket, flat = self.plan.buckets[number], self._flats[number]
        if bucket.alone:
            gradient = self._alone(bucket.members[0])
            return [gradient], flat_view(gradient)
        sources, targets = [], []
        for index, view in zip(bucket.members, flat.views, strict=True):
            parameter = self.parameters[index]
            found = parameter.grad
            if found is view:
                continue
            if found is None:
                self.missing[index] = view.zero_()
                continue
            sources.append(as_dense(found))
            targets.append(view)
            parameter.grad = view
        if targets:
            torch._foreach_copy_(targets, sources)
        return flat.views, flat.whole

    def _alone(self, index: int) -> Tensor:
        """A gradient that is summed where it lies."""
        parameter = self.parameters[index]
        if parameter.grad is None:
            self.missing[index] = unwritten_zeros(parameter)
            return self.missing[index]
        gradient = as_dense(parameter.grad)
        if gradient.stride() != parameter.stride():
            gradient = torch.empty_like(parameter).copy_(gradient)
        if gradient is not parameter.grad:
            parameter.grad = gradient
        return gradient

    def _arrived(self) -> list[float]:
        """Gives the sums to parameters that only others have used; returns the owner's numbers."""
        numbers: list[float] = self._tail.tolist()
        used = numbers[len(numbers) - self._flags :] if self._flags else self._used
        for index, gradient in self.missing.items():
            if used is None or used[index]:
                self.parameters[index].grad = gradient
        return numbers[: len(numbers) - self._flags]

    # What is planned.

    def _learn(self) -> None:
        """Makes the plan after the first pass; all ranks together."""
        check_alike(self.parameters, self.group)
        self._times = [max(1, count) for count in self._count]
        if self.order is None:
            devices = {kind.device for kind in self.kinds}
            seen = self._finished if len(devices) == 1 else []  # engines of several devices race with each other
            last_first = list(dict.fromkeys(reversed(seen)))[::-1]
            unseen = [index for index in reversed(range(len(self.parameters))) if index not in set(last_first)]
            order = self.group.all_gather_values([float(index) for index in [*last_first, *unseen]])[0]
            self.order = [int(index) for index in order]
        if self.how.static:
            used = [float(parameter.grad is not None) for parameter in self.parameters]
            self._used = [any(flags) for flags in zip(*self.group.all_gather_values(used), strict=True)]
        self._take(filled(self.kinds, self.order, self.how.bucket_bytes or LIMIT))
        chosen_by_time = self.how.bucket_bytes is None and self.way == "beside" and self.group.size > 1
        if chosen_by_time and not bits_follow_the_plan(self.how, self.group, self.kinds):
            self._trials = Trials.of(self.kinds, self.order)
            if self._trials is not None:
                self._take(self._trials.plan())

    def _take(self, plan: Plan) -> None:
        """Follows `plan` from now on."""
        if self.how.compresses:
            plan = replace(plan, carries=False)
        self.plan = plan
        self._flags = 0 if self.how.static else len(self.parameters)
        tail = self._tail_length(plan.messages()) + self._flags
        self._messages = plan.messages(tail > 0)
        self._flats = []
        for number, bucket in enumerate(plan.buckets):
            members = [self.parameters[index] for index in bucket.members]
            carried = tail if plan.carries and number == len(plan.buckets) - 1 else 0
            self._flats.append(Flat.of([] if bucket.alone else members, self.group, carried))
        if not plan.carries:
            device = self.kinds[0].device if self.kinds else torch.device("cpu")
            self._flats.append(Flat.of([], self.group, tail, torch.float32, device))
        whole = self._flats[-1].whole
        self._tail = whole[len(whole) - tail :]
        self._bucket_of = {index: number for number, bucket in enumerate(plan.buckets) for index in bucket.members}
        self._entered = [0.0] * self._messages
        self._waiting = [0] * len(plan.buckets)
        self.compressors = []
        if self.how.compresses:
            for number, bucket in enumerate(plan.buckets):
                like = [self.parameters[index].detach() for index in bucket.members]
                seed = derive(self.how.seed, "compression of gradients", number)
                self.compressors.append(self.how.compression.compressor(like, seed))
            for compressor, state in zip(self.compressors, self._restored, strict=False):
                compressor.restore(state)
            self._restored = []

    def _try(self) -> None:
        """One more trial; at the end rank 0 chooses the plan from what all have measured."""
        assert self._trials is not None
        self._trials.note([at - self.started for at in self._ready_at], self.transfers)
        if self._trials.go_on():
            self._take(self._trials.plan())
            return
        self._take(self._trials.decide(self.group))
        self._trials = None

    def computing(self, start: float) -> list[tuple[float, float]]:
        """When backward computed, from `start` on: all the time but for what it waited for inline."""
        if self.way != "inline":
            return [(start, self.computed)]
        spans = []
        for transfer in self.transfers:
            if transfer.end <= self.computed:
                spans.append((start, transfer.start))
                start = transfer.end
        return [*spans, (start, self.computed)]

    def account(self, step: int, arrivals: Mapping[int, float] | None = None) -> None:
        """Tells the meter what the last pass took. arrivals: when the last rank entered each message, where known."""
        meter, before = self.group.meter, self.group.meter.counters
        hidden, shown = before.hidden_seconds, before.communication_seconds
        computed = self.computed if self.way == "beside" else None
        for transfer in self.transfers:
            arrival = (arrivals or {}).get(transfer.number)
            name = "compressed all-reduce" if self.how.compresses else f"{self.how.algorithm} all-reduce"
            meter.communication(name, transfer.start, transfer.end, step, arrival, computed)
        self.hidden.hidden_seconds += meter.counters.hidden_seconds - hidden
        self.hidden.communication_seconds += meter.counters.communication_seconds - shown

    def lengths(self) -> list[int]:
        """Elements of each message of a step, once the plan is known."""
        assert self.plan is not None
        return self.plan.lengths(self.kinds, len(self._tail))

    # What goes on elsewhere.

    def state(self) -> dict[str, Any]:
        """What makes the sums of the next steps: the order of gradients, and what compressors remember."""
        return {"order": self.order, "compressors": [compressor.state() for compressor in self.compressors]}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Goes on from a `state`, of a reducer that has not summed anything yet."""
        self.order, self._restored = state["order"], list(state["compressors"])


def _is_there(reducer: weakref.ref[Reducer], index: int, parameter: Tensor) -> None:
    alive = reducer()
    if alive is not None:
        alive.is_there(index)


def check_alike(parameters: Sequence[Tensor], group: Group) -> None:
    """Raises ValueError, on every rank, if the ranks' parameters are not of the same shapes and dtypes."""
    text = repr([(tuple(parameter.shape), parameter.dtype) for parameter in parameters])
    number = int.from_bytes(hashlib.blake2b(text.encode(), digest_size=6).digest(), "little")
    numbers = [row[0] for row in group.all_gather_values([float(number)], "comparison of the models")]
    others = [rank for rank, other in enumerate(numbers) if other != numbers[0]]
    if others:
        names = ", ".join(map(str, others))
        raise ValueError(f"rank {names} trains other parameters than rank 0: shapes, dtypes, or what is frozen differ")
