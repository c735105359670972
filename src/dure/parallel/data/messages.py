"""The messages of a step: what a plan's buckets hold in memory, how they are filled and summed.

Gradients are copied into the flat buffer of their bucket, all at once, and become views of it,
unless they were computed there (`dure.parallel.direct`). If the user keeps them from step to step,
autograd adds to the views and nothing is copied. The buffers lie in shared memory where ranks share
it; elsewhere a long gradient that travels alone stays where autograd has put it: to copy it would
help no rank.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import TypeVar

import torch
from torch import Tensor, nn

from dure.collectives.algorithms import native
from dure.collectives.all_reduce import all_reduce
from dure.collectives.compression import Compressor
from dure.collectives.group import Group
from dure.collectives.operation import reduction as reduction_of
from dure.parallel.data.buckets import Kind, Plan
from dure.parallel.data.how import How
from dure.parallel.gradients import Flat, as_dense, flat_view
from dure.randomness.seeds import derive

OPERATION = "native all-reduce"

Value = TypeVar("Value")


class Messages:
    """The messages of `plan`, for the gradients of `parameters`.

    tail: how many numbers follow the gradients; a view of their memory afterwards. remembered:
    states of the compressors, where a run goes on. split_phase: whether ranks that share memory
    begin and end messages apart; otherwise a rank that begins one sees it through. count: of the
    messages. members: gradients of each bucket.
    """

    def __init__(
        self,
        plan: Plan,
        parameters: Sequence[nn.Parameter],
        group: Group,
        how: How,
        *,
        tail: int,
        remembered: Sequence[Mapping[str, object]] = (),
        split_phase: bool = False,
    ) -> None:
        self.plan = plan
        self.parameters = parameters
        self.group = group
        self.how = how
        self.kinds = [Kind.of(parameter) for parameter in parameters]
        self.count = plan.messages(tail > 0)
        self.members = [len(bucket.members) for bucket in plan.buckets]
        self.bucket_of: dict[int, int] = {}
        for number, bucket in enumerate(plan.buckets):
            self.bucket_of.update(dict.fromkeys(bucket.members, number))
        self._flats = self._made(tail)
        last = self._flats[-1].whole
        self.tail = last[len(last) - tail :]
        # the same memory through numpy
        self._tail = self.tail.numpy() if self.tail.device.type == "cpu" else None
        self._is_native = how.algorithm == "native" and group.size > 1
        # Where ranks could end messages later but must not, each is seen through when it is begun.
        self._prepare = native.prepare_all_reduce
        if native.is_split_phase(group) and not split_phase:
            self._prepare = native.prepare_at_once
        # what begins the all-reduce of a flat buffer, prepared once by message
        self._begins: dict[int, Callable[[], Callable[[], float]]] = {}
        self.compressors = [
            self._compressor(number) for number in range(len(plan.buckets) if how.compresses else 0)
        ]
        # A fresh run remembers nothing; neither does one that was not compressed before.
        for compressor, state in zip(self.compressors, remembered, strict=False):
            compressor.restore(state)

    def _made(self, tail: int) -> list[Flat]:
        """The memory of each bucket, and of the tail where it is a message of its own."""
        flats = []
        for number, bucket in enumerate(self.plan.buckets):
            carries = self.plan.carries and number == len(self.plan.buckets) - 1
            members = [] if bucket.alone else [self.parameters[index] for index in bucket.members]
            flats.append(Flat.of(members, self.group, tail if carries else 0))
        if not self.plan.carries:
            # in half precision the numbers of a tail would lose their value
            wide = any(kind.dtype == torch.float64 for kind in self.kinds)
            exact = torch.float64 if wide else torch.float32
            device = self.kinds[0].device if self.kinds else torch.device("cpu")
            flats.append(Flat.of([], self.group, tail, dtype=exact, device=device))
        return flats

    def _compressor(self, number: int) -> Compressor:
        like = [self.parameters[index].detach() for index in self.plan.buckets[number].members]
        seed = derive(self.how.seed, "compression of gradients", number)
        return self.how.compression.compressor(like, seed)

    def lengths(self) -> list[int]:
        """Elements of each message."""
        return self.plan.lengths(self.kinds, len(self.tail))

    def fill(self, number: int) -> tuple[Tensor, list[Tensor], dict[int, Tensor]]:
        """Puts the gradients of a message in their places.

        Returns (all of them as one flat tensor, each, zeros by index for those that are missing).
        The tail is left to be written.
        """
        flat = self._flats[number]
        # the tail alone
        if number == len(self.plan.buckets):
            return flat.whole, [], {}
        bucket = self.plan.buckets[number]
        if bucket.alone:
            return self._fill_alone(bucket.members[0])
        missing: dict[int, Tensor] = {}
        sources: list[Tensor] = []
        targets: list[Tensor] = []
        for index, view in zip(bucket.members, flat.views, strict=True):
            parameter = self.parameters[index]
            gradient = parameter.grad
            # The user has kept it from step to step, and autograd has added to it in place.
            if gradient is view:
                continue
            if gradient is None:
                # The parameter keeps no gradient until the tail has told whether another rank has
                # one.
                missing[index] = view.zero_()
                continue
            if (
                gradient.is_sparse
                or gradient.requires_grad
                or gradient.is_neg()
                or gradient.is_conj()
            ):
                gradient = as_dense(gradient)
            if gradient.data_ptr() != view.data_ptr():  # else it was computed there
                sources.append(gradient)
                targets.append(view)
            # From here on the sum arrives in the gradient itself.
            parameter.grad = view
        if targets:
            # one call for all: a copy each would cost more than the bytes of small ones
            torch._foreach_copy_(targets, sources)
        return flat.whole, flat.views, missing

    def _fill_alone(self, index: int) -> tuple[Tensor, list[Tensor], dict[int, Tensor]]:
        parameter = self.parameters[index]
        if parameter.grad is None:
            zeros = torch.zeros_like(parameter, requires_grad=False)
            return flat_view(zeros), [zeros], {index: zeros}
        gradient = as_dense(parameter.grad)
        # All ranks send elements in the order of their parameter's memory; autograd may choose
        # another.
        if gradient.stride() != parameter.stride():
            gradient = torch.empty_like(parameter).copy_(gradient)
        if gradient is not parameter.grad:
            parameter.grad = gradient
        return flat_view(gradient), [gradient], {}

    def place_of(self, index: int) -> Tensor | None:
        """Where a gradient leaves from; None if it leaves from where it is."""
        number = self.bucket_of[index]
        bucket = self.plan.buckets[number]
        return None if bucket.alone else self._flats[number].views[bucket.members.index(index)]

    def write_tail(self, numbers: Sequence[float]) -> None:
        """Before the last message leaves."""
        if self._tail is not None:  # without torch, which takes longer in the middle of backward
            self._tail[:] = numbers
        else:
            self.tail.copy_(torch.tensor(numbers, dtype=self.tail.dtype))

    def begin(self, number: int, flat: Tensor, views: Sequence[Tensor]) -> Callable[[], float]:
        """Begins the all-reduce of a message that is filled, or does it.

        What is returned waits for its end, and tells when that was, in seconds of
        `time.perf_counter`.
        """
        if views and self.compressors:
            # A compressor sums, and the mean is left to be taken.
            self.compressors[number].all_reduce(views, self.group, self.how.algorithm)
            if self.how.op == "avg":
                torch._foreach_div_(list(views), self.group.size)
        elif self._is_native:
            return self._begin_native(number, flat)
        else:
            all_reduce(flat, self.group, self.how.algorithm, self.how.op)
        ended = time.perf_counter()
        return lambda: ended

    def _begin_native(self, number: int, flat: Tensor) -> Callable[[], float]:
        """Begins the backend's own all-reduce, which is prepared once for memory that stays."""
        if flat is not self._flats[number].whole:  # a gradient alone, elsewhere in every step
            begin = self._native(flat)
        elif number in self._begins:
            begin = self._begins[number]
        else:
            begin = self._begins[number] = self._native(flat)
        # begun here and now; its end is wrapped alike, so that its errors are diagnosed too
        return partial(self._perform, self._perform(begin, flat), flat)

    def _native(self, flat: Tensor) -> Callable[[], Callable[[], float]]:
        """What begins the backend's own all-reduce of `flat`, again and again."""
        reduction = reduction_of(self.how.op, flat.dtype, self.group.size)
        if not reduction.divides_first(flat.dtype):
            return self._prepare(flat, self.group, reduction)
        # in half precision a sum of many could overflow before it is divided
        begin = self._prepare(flat, self.group, reduction.partial())

        def divided() -> Callable[[], float]:
            reduction.begin(flat)
            return begin()

        return divided

    def _perform(self, work: Callable[[], Value], flat: Tensor) -> Value:
        """`Group.perform`; on CPUs its shortest form, because it is in the way of backward."""
        if flat.is_cuda:
            return self.group.perform(OPERATION, work, flat)
        # What was issued on the group's thread comes first: messages are known by their order.
        self.group.settle()
        with self.group.during(OPERATION):
            return work()
