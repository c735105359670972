"""Communication between divided layers: every operator's backward is its conjugate.

Inside a divided region rank r holds a part x_r; outside it all ranks hold the same x, or, along a
sequence, a shard of it. The loss L is the same number on all ranks, and so is its gradient with
respect to values outside the region.

    function            forward            backward           a rank sends forward  and backward
    enter (f)           identity           all-reduce         0                     2(N-1)/N·n
    leave (g)           all-reduce         identity           2(N-1)/N·n            0
    gather_features     all-gather         own slice          (N-1)/N·n             0
    scatter_features    own slice          all-gather         0                     (N-1)/N·n
    enter_sequence      all-gather         reduce-scatter     (N-1)/N·n             (N-1)/N·n
    leave_sequence      reduce-scatter     all-gather         (N-1)/N·n             (N-1)/N·n
    scatter_sequence    own slice          all-gather         0                     (N-1)/N·n
    share               all-gather         reduce-scatter     (N-1)/N·n             (N-1)/N·n

n is the number of elements of the whole tensor. 2(N-1)/N·n is rounded down:
`dure.collectives.algorithms.native` describes how the backend's own collectives are counted. A
layer that enters and leaves once sends equally much with and without sequences: an all-reduce is a
reduce-scatter and an all-gather.

Sources: Shoeybi et al. 2019, "Megatron-LM: Training Multi-Billion Parameter Language Models Using
Model Parallelism"; Korthikanti et al. 2022, "Reducing Activation Recomputation in Large Transformer
Models".
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch.autograd import Function
from torch.autograd.function import once_differentiable

from dure.collectives.all_gather import all_gather
from dure.collectives.all_reduce import all_reduce
from dure.collectives.group import Group
from dure.collectives.reduce_scatter import reduce_scatter
from dure.parallel.tensor.buffers import shared_buffer
from dure.parallel.tensor.division import Division

Value = TypeVar("Value")

# Transfers without derivatives. The meter records the layer's waits for them (`Meter.inside`).


def timed(name: str, group: Group, work: Callable[[], Value]) -> Value:
    """Run `work`, a transfer inside a layer or a wait for a transfer, and record its time."""
    started = time.perf_counter()
    done = work()
    # The layer is timed as a whole; the meter subtracts the waits inside.
    group.meter.inside(name, started, time.perf_counter())
    return done


def reduced_in_place(tensor: Tensor, group: Group, op: str = "sum") -> Tensor:
    """Return the tensor, reduced in place by the backend's all-reduce."""
    return timed("all-reduce", group, lambda: all_reduce(tensor, group, "native", op))


def summed(tensor: Tensor, group: Group) -> Tensor:
    """Return the sum over the ranks in new memory; on a single rank the tensor itself."""
    if group.size == 1:
        return tensor
    # in shared memory if possible, so that peers read it without a copy
    return reduced_in_place(shared_buffer(tensor.shape, tensor, group).copy_(tensor), group)


def gathered(tensor: Tensor, group: Group, division: Division) -> Tensor:
    """Return the undivided tensor; parts of unequal length travel padded."""
    if group.size == 1:
        return tensor
    dim = division.dim
    lengths = division.lengths(group.size)
    longest = max(lengths)
    missing = longest - tensor.shape[dim]
    # An all-gather takes equally many elements from every rank.
    if missing:
        shape = list(tensor.shape)
        shape[dim] = missing
        tensor = torch.cat([tensor, tensor.new_zeros(shape)], dim)
    own = tensor.contiguous()
    parts = timed("all-gather", group, lambda: all_gather(own, group, "native")).unbind()
    # takes the padding off again
    if min(lengths) < longest:
        padded = zip(parts, lengths, strict=True)
        parts = tuple(part.narrow(dim, 0, length) for part, length in padded)
    return division.join(parts)


def reduce_scattered(tensor: Tensor, group: Group, dim: int, beside: bool = False) -> Tensor:
    """Return this rank's slice along `dim` of the sum over the ranks.

    beside: whether another thread than the layer's runs this function.
    """
    if group.size == 1:
        return tensor
    # A reduce-scatter needs contiguous parts, whichever dimension is divided.
    parts = torch.stack(tensor.chunk(group.size, dim))

    def work() -> Tensor:
        return reduce_scatter(parts, group, "native")

    # The meter records waits of the layer's thread only.
    own = work() if beside else timed("reduce-scatter", group, work)
    return own.view(parts.shape[1:])


def along(tensor: Tensor, dim: int, group: Group) -> Division:
    """Return the division along a sequence of which `tensor` is this rank's shard."""
    return Division(dim, (tensor.shape[dim] * group.size,))


def check_sequence(tensor: Tensor, dim: int, group: Group) -> Division:
    """Return the division of a whole sequence; raise LengthError if it cannot be even."""
    check_length(tensor.shape[dim], group)
    return Division(dim, (tensor.shape[dim],))


class LengthError(ValueError):
    """Error: a sequence cannot be divided."""


def check_is_sequence(name: str, dimensions: int, sequence: int | None) -> None:
    """Raise LengthError if a plan uses a tensor's feature dimension as its sequence.

    name: the module that takes or returns the tensor. dimensions: the tensor's number of
    dimensions.
    """
    # The last dimension has the features. A model that flattens all tokens to rows has no sequence
    # dimension there.
    if sequence is None:
        return
    if sequence == -1 or sequence not in range(-dimensions, dimensions - 1):
        raise LengthError(
            f"{name} has a tensor of {dimensions} dimensions, the last one of features, so "
            f"sequence={sequence} is not a sequence dimension: where a model flattens (batch, "
            "sequence) into rows, a layer that computes row by row needs sequence=0, and other "
            "layers enters=False or leaves=False in a module with Enter(sequence=1) and "
            "Leave(sequence=1)"
        )


def check_length(length: int, group: Group) -> None:
    """Raise LengthError if the degree does not divide a sequence."""
    if length % group.size:
        raise LengthError(
            f"a sequence of {length} cannot be divided by the degree {group.size}: pad it to a "
            "multiple, or do not divide sequences"
        )


def of_shard(shape: Sequence[int], dim: int, group: Group) -> list[int]:
    """Return the shape of a rank's shard of a sequence.

    Raises LengthError if the degree does not divide the sequence.
    """
    made = list(shape)
    check_length(made[dim], group)
    made[dim] //= group.size
    return made


def of_whole(shape: Sequence[int], dim: int, group: Group) -> list[int]:
    """Return the shape of the sequence of which a rank holds a shard."""
    made = list(shape)
    made[dim] *= group.size
    return made


# With derivatives.


class _Enter(Function):
    """Identity forward; all-reduce of the gradient backward."""

    @staticmethod
    def forward(ctx: Any, tensor: Tensor, group: Group) -> Tensor:
        ctx.group = group
        return tensor.view_as(tensor)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return summed(gradient, ctx.group), None


class _Leave(Function):
    """All-reduce forward; identity backward."""

    @staticmethod
    def forward(ctx: Any, tensor: Tensor, group: Group) -> Tensor:
        return summed(tensor, group) if group.size > 1 else tensor.view_as(tensor)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        # Every rank has the same gradient of the sum, and each of its terms has that gradient.
        return gradient, None


class _Gather(Function):
    """All-gather forward; backward a reduce-scatter if `sums`, otherwise this rank's slice."""

    @staticmethod
    def forward(ctx: Any, tensor: Tensor, group: Group, division: Division, sums: bool) -> Tensor:
        ctx.group = group
        ctx.division = division
        ctx.sums = sums
        return gathered(tensor, group, division) if group.size > 1 else tensor.view_as(tensor)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None, None]:
        group = ctx.group
        division = ctx.division
        if ctx.sums:
            # Each rank has used the whole differently: the gradients differ, and are summed.
            own = reduce_scattered(gradient, group, division.dim)
        else:
            # All ranks have used the whole equally: each has the full gradient, and takes a slice.
            own = division.part(gradient, group.rank, group.size)
        return own, None, None, None


class _Scatter(Function):
    """Reduce-scatter if `sums`, otherwise this rank's slice, forward; all-gather backward."""

    @staticmethod
    def forward(ctx: Any, tensor: Tensor, group: Group, division: Division, sums: bool) -> Tensor:
        ctx.group = group
        ctx.division = division
        if group.size == 1:
            return tensor.view_as(tensor)
        if sums:
            return reduce_scattered(tensor, group, division.dim)
        return division.part(tensor, group.rank, group.size)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None, None]:
        # With or without the sum forward, each rank knows the gradient of its own slice.
        return gathered(gradient, ctx.group, ctx.division), None, None, None


def enter(tensor: Tensor, group: Group) -> Tensor:
    """Enter a divided region (f): identity; backward sums the ranks' gradients."""
    entered: Tensor = _Enter.apply(tensor, group)  # type: ignore[no-untyped-call]
    return entered


def leave(tensor: Tensor, group: Group) -> Tensor:
    """Leave a divided region (g): sum the ranks' tensors; backward is the identity."""
    left: Tensor = _Leave.apply(tensor, group)  # type: ignore[no-untyped-call]
    return left


def gather_features(tensor: Tensor, group: Group, division: Division | None = None) -> Tensor:
    """Join the ranks' last dimensions, for equal computations on all ranks.

    division: None for equal parts.
    """
    division = division or along(tensor, -1, group)
    joined: Tensor = _Gather.apply(tensor, group, division, False)  # type: ignore[no-untyped-call]
    return joined


def scatter_features(tensor: Tensor, group: Group, division: Division | None = None) -> Tensor:
    """Return this rank's part of the last dimension of a tensor that is equal on all ranks."""
    division = division or Division(-1, (tensor.shape[-1],))
    own: Tensor = _Scatter.apply(tensor, group, division, False)  # type: ignore[no-untyped-call]
    return own


def enter_sequence(tensor: Tensor, group: Group, dim: int = 1) -> Tensor:
    """Enter a divided region from shards of a sequence (f): gather all shards.

    Backward returns this rank's shard of the summed gradient.
    """
    entered: Tensor = _Gather.apply(tensor, group, along(tensor, dim, group), True)  # type: ignore[no-untyped-call]
    return entered


def gather_shared_unit(tensor: Tensor, group: Group, sharers: int) -> Tensor:
    """Return the unit that this rank shares with neighbours; backward sums their gradients.

    sharers: the number of ranks that share a unit.
    """
    # A unit is the parts of `sharers` neighbours in rank, one after another.
    width = tensor.shape[-1] * sharers
    units = enter_sequence(tensor, group, -1)
    return units.narrow(-1, group.rank // sharers * width, width).contiguous()


def leave_sequence(tensor: Tensor, group: Group, dim: int = 1) -> Tensor:
    """Leave a divided region to shards of a sequence (g): return this rank's shard of the sum.

    Backward gathers the gradients of all shards. Raises LengthError if the degree does not divide
    the sequence.
    """
    left: Tensor = _Scatter.apply(tensor, group, check_sequence(tensor, dim, group), True)  # type: ignore[no-untyped-call]
    return left


def scatter_sequence(tensor: Tensor, group: Group, dim: int = 1) -> Tensor:
    """Return this rank's shard of a sequence that is equal on all ranks.

    Backward gathers the gradients of all shards.
    """
    own: Tensor = _Scatter.apply(tensor, group, check_sequence(tensor, dim, group), False)  # type: ignore[no-untyped-call]
    return own
