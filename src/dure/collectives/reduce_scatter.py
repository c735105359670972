"""Reduce-scatter: every rank ends with its chunk of the reduction over all ranks.

`ring`: in N-1 steps the partial sums travel around the ring. `one_shot`: every rank sends chunk j
to rank j at once, which adds in order of rank. `native`: the backend's own; counted as one_shot. Of
n elements a rank sends all chunks except its own, about (N-1)/N·n, whatever the algorithm; no
algorithm sends less.

Source: Patarasuk and Yuan 2009 (ring); Thakur et al. 2005 (pairwise exchange, here called
one_shot).
"""

from __future__ import annotations

from typing import Any, Literal, get_args

import torch.distributed as dist
from torch import Tensor

from dure.collectives.algorithms import native, one_shot, ring
from dure.collectives.arguments import check_algorithm, check_tensor, flat_of, lengths_of
from dure.collectives.group import Group
from dure.collectives.handle import Handle, collective
from dure.collectives.operation import SUM, Reduction
from dure.collectives.operation import reduction as reduction_of

Algorithm = Literal["ring", "one_shot", "native"]
ALGORITHMS: tuple[str, ...] = get_args(Algorithm)


def _ring(
    chunks: list[Tensor], group: Group, reduction: Reduction = SUM, into: Tensor | None = None
) -> None:
    # Rotated by a chunk, since the ring leaves chunk r+1 with rank r.
    ring.reduce_scatter(chunks[-1:] + chunks[:-1], group, reduction, into)


_RULES = {"ring": _ring, "one_shot": one_shot.reduce_scatter, "native": native.reduce_scatter}


@collective
def reduce_scatter(
    tensor: Tensor,
    group: Group | dist.ProcessGroup | None = None,
    algorithm: Algorithm = "ring",
    op: Any = "sum",
    *,
    async_op: bool = False,
) -> Tensor | Handle[Tensor]:
    """Return chunk r of the reduction over all ranks, on rank r.

    The n elements of the tensor, flattened, are cut into N chunks of which the first n mod N are
    longer by an element; the result has one dimension. `all_gather` with `n` is the inverse.

    Args:
        tensor: any shape, the same shape and dtype on every rank; unchanged.
        group: as in `all_reduce`.
        algorithm: `ring`, `one_shot` or `native`.
        op: as in `all_reduce`.
        async_op: return a handle, whose `wait()` returns the result.

    Raises:
        ValueError: an unknown algorithm or operation; raised before any data is sent.
    """
    check_algorithm("reduce-scatter", algorithm, ALGORITHMS)
    check_tensor(tensor)
    group = Group.of(group)
    reduction = reduction_of(op, tensor.dtype, group.size)
    length = lengths_of(tensor.numel(), group.size)[group.rank]

    def work() -> Tensor:
        flat = flat_of(tensor)
        result = tensor.new_empty(length)
        # `begin` divides in place, and the caller's tensor must not change.
        if reduction.divides_first(flat.dtype) and flat.data_ptr() == tensor.data_ptr():
            flat = flat.clone()
        if group.size == 1:
            result.copy_(flat)
        elif flat.numel():
            _RULES[algorithm](
                ring.chunks_of(flat, group.size), group, reduction.begin(flat), result
            )
        return result

    return group.perform(f"{algorithm} reduce-scatter", work, tensor, async_op)


def elements_sent(n: int, size: int, rank: int, algorithm: Algorithm = "ring") -> int:
    """Return the elements that `rank` sends: all chunks except its own.

    n: elements of the tensor.
    """
    return n - lengths_of(n, size)[rank]


def messages_sent(n: int, size: int, rank: int, algorithm: Algorithm = "ring") -> int:
    """Return the messages that `rank` sends: N-1, less the empty chunks."""
    return sum(length > 0 for index, length in enumerate(lengths_of(n, size)) if index != rank)
