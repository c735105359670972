"""Messages of a step: the memory of a plan's buckets, how it is filled and summed.

All gradients of a bucket are copied into its flat buffer at once and become views of the buffer,
unless they were computed there (`dure.parallel.gradients_into_buckets`). If the user does not clear
gradients between steps, autograd adds to the views and nothing is copied. The buffers are in shared
memory if the ranks share memory; otherwise a long gradient that travels alone stays in autograd's
memory, because a copy would help no rank.
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
from dure.collectives.trailer import Number
from dure.machine.devices import pinned_like
from dure.parallel.data.buckets import BucketPlan, GradientSpec
from dure.parallel.data.reduction_settings import ReductionSettings
from dure.parallel.gradients import FlatGradients, as_dense, flat_view
from dure.randomness.seeds import derive

OPERATION = "native all-reduce"

Value = TypeVar("Value")


class BucketMessages:
    """Messages of `plan`, for the gradients of `parameters`.

    Args:
        plan: Buckets, in order.
        parameters: Parameters whose gradients are summed.
        group: The ranks.
        how: Settings of the sum.
        tail: Number of elements of the trailer, after the gradients.
        remembered: States of the compressors, in a run that is resumed.
        split_phase: Whether ranks that share memory start and end messages separately; otherwise a
            rank that starts a message completes it.

    Attributes:
        tail: View of the trailer's memory.
        count: Number of messages.
        members: Number of gradients of each bucket.
    """

    def __init__(
        self,
        plan: BucketPlan,
        parameters: Sequence[nn.Parameter],
        group: Group,
        how: ReductionSettings,
        *,
        tail: int,
        remembered: Sequence[Mapping[str, object]] = (),
        split_phase: bool = False,
    ) -> None:
        self.plan = plan
        self.parameters = parameters
        self.group = group
        self.how = how
        self.kinds = [GradientSpec.of(parameter) for parameter in parameters]
        self.count = plan.messages(tail > 0)
        self.members = [len(bucket.members) for bucket in plan.buckets]
        self.bucket_of: dict[int, int] = {}
        for number, bucket in enumerate(plan.buckets):
            self.bucket_of.update(dict.fromkeys(bucket.members, number))
        self._flats = self._made(tail)
        last = self._flats[-1].whole
        self.trailer = last[len(last) - tail :]
        # the same memory as a numpy array
        self._tail = self.trailer.numpy() if self.trailer.device.type == "cpu" else None
        self._pinned: Tensor | None = None
        self._is_native = how.algorithm == "native" and group.size > 1
        # If ranks could end messages later but must not, each message is completed at its start.
        self._prepare = native.prepare_all_reduce
        if native.is_split_phase(group) and not split_phase:
            self._prepare = native.prepare_at_once
        # functions that start the all-reduce of a flat buffer, prepared once for each message
        self._begins: dict[int, Callable[[], Callable[[], float]]] = {}
        self.compressors = [
            self._compressor(number) for number in range(len(plan.buckets) if how.compresses else 0)
        ]
        # A new run has no states; neither has a run that was not compressed before.
        for compressor, state in zip(self.compressors, remembered, strict=False):
            compressor.restore(state)

    def _made(self, tail: int) -> list[FlatGradients]:
        """Return the memory of each bucket, and of the trailer if it is a separate message."""
        flats = []
        for number, bucket in enumerate(self.plan.buckets):
            carries = self.plan.carries and number == len(self.plan.buckets) - 1
            members = [] if bucket.alone else [self.parameters[index] for index in bucket.members]
            flats.append(FlatGradients.of(members, self.group, tail if carries else 0))
        if not self.plan.carries:
            # half precision does not represent the numbers of a trailer exactly
            wide = any(kind.dtype == torch.float64 for kind in self.kinds)
            exact = torch.float64 if wide else torch.float32
            device = self.kinds[0].device if self.kinds else torch.device("cpu")
            flats.append(FlatGradients.of([], self.group, tail, dtype=exact, device=device))
        return flats

    def _compressor(self, number: int) -> Compressor:
        like = [self.parameters[index].detach() for index in self.plan.buckets[number].members]
        seed = derive(self.how.seed, "compression of gradients", number)
        return self.how.compression.compressor(like, seed)

    def lengths(self) -> list[int]:
        """Return the elements of each message."""
        return self.plan.lengths(self.kinds, len(self.trailer))

    def fill(self, number: int) -> tuple[Tensor, list[Tensor], dict[int, Tensor]]:
        """Copy the gradients of a message to their places.

        Returns (all gradients as a flat tensor, each gradient, zeros by index for missing
        gradients). The trailer is not written.
        """
        flat = self._flats[number]
        # the trailer alone
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
            # The user did not clear the gradient, and autograd has added to it in place.
            if gradient is view:
                continue
            if gradient is None:
                # The parameter has no gradient until the trailer shows whether another rank has
                # used it.
                missing[index] = view.zero_()
                continue
            if (
                gradient.is_sparse
                or gradient.requires_grad
                or gradient.is_neg()
                or gradient.is_conj()
            ):
                gradient = as_dense(gradient)
            if gradient.data_ptr() != view.data_ptr():  # otherwise it was computed there
                sources.append(gradient)
                targets.append(view)
            # From here on the sum is written to the gradient itself.
            parameter.grad = view
        if targets:
            # a single call: separate calls would cost more than the bytes of small gradients
            torch._foreach_copy_(targets, sources)
        return flat.whole, flat.views, missing

    def _fill_alone(self, index: int) -> tuple[Tensor, list[Tensor], dict[int, Tensor]]:
        parameter = self.parameters[index]
        if parameter.grad is None:
            zeros = torch.zeros_like(parameter, requires_grad=False)
            return flat_view(zeros), [zeros], {index: zeros}
        gradient = as_dense(parameter.grad)
        # All ranks send elements in the memory order of the parameter; autograd may choose another
        # order.
        if gradient.stride() != parameter.stride():
            gradient = torch.empty_like(parameter).copy_(gradient)
        if gradient is not parameter.grad:
            parameter.grad = gradient
        return flat_view(gradient), [gradient], {}

    def place_of(self, index: int) -> Tensor | None:
        """Return the buffer that a gradient is sent from.

        None if it is sent from autograd's memory.
        """
        number = self.bucket_of[index]
        bucket = self.plan.buckets[number]
        return None if bucket.alone else self._flats[number].views[bucket.members.index(index)]

    def write_tail(self, numbers: Sequence[Number]) -> None:
        """Write the trailer, before the last message is sent.

        The host waits for no number that is in the memory of an accelerator.
        """
        if self._tail is not None:  # numpy has less overhead than torch during backward
            self._tail[:] = numbers
            return
        there = [(at, one) for at, one in enumerate(numbers) if isinstance(one, Tensor)]
        if self._pinned is None:
            self._pinned = pinned_like(self.trailer)
        # The last step's copy is over: its sum was read since.
        here = [0.0 if isinstance(one, Tensor) else one for one in numbers]
        self._pinned.copy_(torch.tensor(here, dtype=self.trailer.dtype))
        self.trailer.copy_(self._pinned, non_blocking=True)
        for at, one in there:
            self.trailer[at].copy_(one)

    def begin(self, number: int, flat: Tensor, views: Sequence[Tensor]) -> Callable[[], float]:
        """Start the all-reduce of a filled message, or run it.

        Returns a function that waits for its end and returns the time of the end, in seconds of
        `time.perf_counter`.
        """
        if views and self.compressors:
            # A compressor only sums: the mean is computed here.
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
        """Start the backend's own all-reduce, which is prepared once for memory that stays."""
        if flat is not self._flats[number].whole:  # a single gradient, in new memory in every step
            begin = self._native(flat)
        elif number in self._begins:
            begin = self._begins[number]
        else:
            begin = self._begins[number] = self._native(flat)
        # starts here; the end is wrapped in the same way, so that its errors are diagnosed too
        return partial(self._perform, self._perform(begin, flat), flat)

    def _native(self, flat: Tensor) -> Callable[[], Callable[[], float]]:
        """Return a function that starts the backend's own all-reduce of `flat` at each call."""
        reduction = reduction_of(self.how.op, flat.dtype, self.group.size)
        if not reduction.divides_first(flat.dtype):
            return self._prepare(flat, self.group, reduction)
        # in half precision a sum of many ranks could overflow before the division
        begin = self._prepare(flat, self.group, reduction.partial())

        def divided() -> Callable[[], float]:
            reduction.begin(flat)
            return begin()

        return divided

    def _perform(self, work: Callable[[], Value], flat: Tensor) -> Value:
        """Run `Group.perform`; on CPUs with less overhead, because backward waits for it."""
        if not flat.is_cpu:
            return self.group.perform(OPERATION, work, flat)
        # Operations on the group's thread come first: messages are matched by their order.
        self.group.settle()
        with self.group.during(OPERATION):
            return work()
