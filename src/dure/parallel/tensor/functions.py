"""What travels between divided layers: every operator's backward is its conjugate.

Inside the divided region rank r holds a part x_r; outside all ranks hold the same x, or, along a
sequence, a shard of it. L is the same number on all ranks, and so is its gradient by what is
outside.

    function            forward            backward           a rank sends forward  and backward
    enter (f)           identity           all-reduce         0                     2(N-1)/N·n
    leave (g)           all-reduce         identity           2(N-1)/N·n            0
    gather_features     all-gather         own slice          (N-1)/N·n             0
    scatter_features    own slice          all-gather         0                     (N-1)/N·n
    enter_sequence      all-gather         reduce-scatter     (N-1)/N·n             (N-1)/N·n
    leave_sequence      reduce-scatter     all-gather         (N-1)/N·n             (N-1)/N·n
    scatter_sequence    own slice          all-gather         0                     (N-1)/N·n
    gather_sequence     all-gather         own slice          (N-1)/N·n             0
    share               all-gather         reduce-scatter     (N-1)/N·n             (N-1)/N·n

n is the number of elements of the whole. 2(N-1)/N·n is rounded down:
`dure.collectives.algorithms.native` says how the backend's own collectives are counted. A layer
that enters and leaves once sends the same along a sequence as without: an all-reduce is a
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
from dure.parallel.tensor.division import Division
from dure.parallel.tensor.rooms import room

Value = TypeVar("Value")

# What travels, without derivatives. The meter is told how long the layer waited for it
# (`Meter.inside`).


def timed(name: str, group: Group, work: Callable[[], Value]) -> Value:
    """Does `work`, which transfers inside of a layer or waits for a transfer."""
    started = time.perf_counter()
    done = work()
    # The layer is timed as a whole; what it waited inside is taken out of that.
    group.meter.inside(name, started, time.perf_counter())
    return done


def reduced_in_place(tensor: Tensor, group: Group, op: str = "sum") -> Tensor:
    """The backend's all-reduce."""
    return timed("all-reduce", group, lambda: all_reduce(tensor, group, "native", op))


def summed(tensor: Tensor, group: Group) -> Tensor:
    """The sum over the ranks, in memory of its own."""
    if group.size == 1:
        return tensor
    # in shared memory where there is any, so that peers read it where it lies
    return reduced_in_place(room(tensor.shape, tensor, group).copy_(tensor), group)


def gathered(tensor: Tensor, group: Group, division: Division) -> Tensor:
    """The undivided tensor; parts of unequal length travel padded."""
    if group.size == 1:
        return tensor
    dim = division.dim
    lengths = division.lengths(group.size)
    longest = max(lengths)
    missing = longest - tensor.shape[dim]
    # An all-gather takes as many elements from every rank.
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
    """This rank's slice along `dim` of the sum over the ranks.

    beside: whether this is another thread than the layer's, which does not wait for it here.
    """
    if group.size == 1:
        return tensor
    # A reduce-scatter sends parts that lie one after another, whatever dimension they are slices
    # of.
    parts = torch.stack(tensor.chunk(group.size, dim))

    def work() -> Tensor:
        return reduce_scatter(parts, group, "native")

    # The meter's note of waits belongs to the layer's thread.
    own = work() if beside else timed("reduce-scatter", group, work)
    return own.view(parts.shape[1:])


def along(tensor: Tensor, dim: int, group: Group) -> Division:
    """The division along a sequence of which `tensor` is this rank's shard."""
    return Division(dim, (tensor.shape[dim] * group.size,))


def check_sequence(tensor: Tensor, dim: int, group: Group) -> Division:
    """The division of a whole sequence. Raises ValueError if the degree does not divide it."""
    check_length(tensor.shape[dim], group)
    return Division(dim, (tensor.shape[dim],))


class LengthError(ValueError):
    """A sequence that cannot be divided."""


def check_is_sequence(name: str, dimensions: int, sequence: int | None) -> None:
    """Raises LengthError if a plan takes a tensor's features for its sequence.

    name: of the module that has or gives the tensor. dimensions: how many it has.
    """
    # The last dimension is that of the features. A model that makes rows of all tokens has no
    # dimension of a sequence there.
    if sequence is None:
        return
    if sequence == -1 or sequence not in range(-dimensions, dimensions - 1):
        raise LengthError(
            f"{name} has a tensor of {dimensions} dimensions, the last one of features, so that "
            f"sequence={sequence} is no sequence: where a model makes rows of (batch, sequence), a "
            "layer that computes row by row has sequence=0, and other layers enters=False or "
            "leaves=False in a module with Enter(sequence=1) and Leave(sequence=1)"
        )


def check_length(length: int, group: Group) -> None:
    """Raises LengthError if the degree does not divide a sequence."""
    if length % group.size:
        raise LengthError(
            f"a sequence of {length} cannot be divided by the degree {group.size}: pad it to a "
            "multiple, or divide no sequences"
        )


def of_shard(shape: Sequence[int], dim: int, group: Group) -> list[int]:
    """The shape of a rank's shard of a sequence.

    Raises LengthError if the degree does not divide it.
    """
    made = list(shape)
    check_length(made[dim], group)
    made[dim] //= group.size
    return made


def of_whole(shape: Sequence[int], dim: int, group: Group) -> list[int]:
    """The shape of the sequence of which a rank holds a shard."""
    made = list(shape)
    made[dim] *= group.size
    return made


# With derivatives.


class _Enter(Function):
    @staticmethod
    def forward(ctx: Any, tensor: Tensor, group: Group) -> Tensor:
        ctx.group = group
        return tensor.view_as(tensor)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return summed(gradient, ctx.group), None


class _Leave(Function):
    @staticmethod
    def forward(ctx: Any, tensor: Tensor, group: Group) -> Tensor:
        return summed(tensor, group) if group.size > 1 else tensor.view_as(tensor)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        # Every rank has the same gradient of the sum, and each of its terms has that gradient.
        return gradient, None


class _Gather(Function):
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
            # Each rank has used the whole in a way of its own: the gradients differ, and are
            # summed.
            own = reduce_scattered(gradient, group, division.dim)
        else:
            # All ranks have used the whole alike: each has the full gradient, and takes its slice.
            own = division.part(gradient, group.rank, group.size)
        return own, None, None, None


class _Scatter(Function):
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
    """f: into a divided region; backward, the sum of the ranks' gradients."""
    entered: Tensor = _Enter.apply(tensor, group)  # type: ignore[no-untyped-call]
    return entered


def leave(tensor: Tensor, group: Group) -> Tensor:
    """g: out of a divided region, the sum of the ranks' tensors; backward, the same gradient."""
    left: Tensor = _Leave.apply(tensor, group)  # type: ignore[no-untyped-call]
    return left


def gather_features(tensor: Tensor, group: Group, division: Division | None = None) -> Tensor:
    """The ranks' last dimensions joined, for what all ranks compute alike.

    division: None is one of equal parts.
    """
    division = division or along(tensor, -1, group)
    joined: Tensor = _Gather.apply(tensor, group, division, False)  # type: ignore[no-untyped-call]
    return joined


def scatter_features(tensor: Tensor, group: Group, division: Division | None = None) -> Tensor:
    """This rank's part of the last dimension, of what all ranks have alike."""
    division = division or Division(-1, (tensor.shape[-1],))
    own: Tensor = _Scatter.apply(tensor, group, division, False)  # type: ignore[no-untyped-call]
    return own


def enter_sequence(tensor: Tensor, group: Group, dim: int = 1) -> Tensor:
    """f along a sequence: all shards, into a divided region.

    Backward, this rank's shard of the summed gradient.
    """
    entered: Tensor = _Gather.apply(tensor, group, along(tensor, dim, group), True)  # type: ignore[no-untyped-call]
    return entered


def share(tensor: Tensor, group: Group, sharers: int) -> Tensor:
    """The unit of which this rank and its neighbours hold parts; its gradient is the sum of theirs.

    sharers: how many ranks share a unit.
    """
    # A unit is the parts of `sharers` neighbours in rank, one after another.
    width = tensor.shape[-1] * sharers
    units = enter_sequence(tensor, group, -1)
    return units.narrow(-1, group.rank // sharers * width, width).contiguous()


def leave_sequence(tensor: Tensor, group: Group, dim: int = 1) -> Tensor:
    """g along a sequence: this rank's shard of the sum; backward, the gradients of all shards."""
    left: Tensor = _Scatter.apply(tensor, group, check_sequence(tensor, dim, group), True)  # type: ignore[no-untyped-call]
    return left


def scatter_sequence(tensor: Tensor, group: Group, dim: int = 1) -> Tensor:
    """This rank's shard of a sequence that all ranks have alike.

    Backward, the gradients of all shards.
    """
    own: Tensor = _Scatter.apply(tensor, group, check_sequence(tensor, dim, group), False)  # type: ignore[no-untyped-call]
    return own


def gather_sequence(tensor: Tensor, group: Group, dim: int = 1) -> Tensor:
    """All shards, for what all ranks compute alike; backward, this rank's shard of the gradient."""
    whole: Tensor = _Gather.apply(tensor, group, along(tensor, dim, group), False)  # type: ignore[no-untyped-call]
    return whole
