"""One-shot all-reduce: everybody sends chunk j directly to rank j, which adds and sends it back.

The tensor of n elements is cut into N chunks. In the reduce-scatter every rank sends its chunk j to
rank j, for all j at once, and rank r adds the N parts of chunk r in order of rank; in the
all-gather rank r sends the finished chunk r to all others. The N-1 messages of a phase do not wait
for each other.

Cost: 2(N-1) messages a rank and about 2(N-1)/N·n elements as in a ring, `elements_sent` exactly,
but there are only 2 transfers one after another: the shortest way for tensors that are small, as
long as every rank can talk to all others at once. Large switched networks see N-1 flows into one
port. Scratch: N-1 chunks. Sums are formed in order of rank, so they have the bits that `master`
gives.

Source: Thakur et al. 2005, "Optimization of Collective Communication Operations in MPICH" (pairwise
exchange); "two-shot" in the GPU libraries that call one-shot what sends the whole tensor to
everybody.
"""

from __future__ import annotations

import torch
from torch import Tensor

from dure.collectives.algorithms.algorithm import AllReduce, even_path
from dure.collectives.algorithms.ring import chunks_of
from dure.collectives.arguments import lengths_of
from dure.collectives.group import Group
from dure.collectives.operation import SUM, Reduction


def others(group: Group) -> list[int]:
    """All ranks but this one, the next one first: so not everybody begins with rank 0."""
    return [(group.rank + step) % group.size for step in range(1, group.size)]


def reduce_scatter(
    chunks: list[Tensor], group: Group, reduction: Reduction = SUM, into: Tensor | None = None
) -> None:
    """Reduces the ranks' `chunks` so that this rank's chunk r is complete, in `into` or in place.

    There may be fewer chunks than ranks: then the last ranks get none.
    """
    ranks = others(group)
    sends = [(chunks[rank], rank) for rank in ranks if rank < len(chunks)]
    if group.rank >= len(chunks):
        group.transfer(sends, [])
        return
    mine = chunks[group.rank]
    # Room for the parts of all others; this rank's own one stays where it is, at its place in the
    # order of ranks.
    parts = list(torch.empty(group.size - 1, mine.numel(), dtype=mine.dtype, device=mine.device))
    parts.insert(group.rank, mine)
    # The rank before this one sends to this one first, hence the other way round.
    group.transfer(sends, [(parts[rank], rank) for rank in reversed(ranks)])
    reduction.fold(parts, group.rank, mine if into is None else into)


def all_gather(chunks: list[Tensor], group: Group) -> None:
    """Fills all `chunks` in place, where this rank's chunk r is the complete one, if it has one."""
    ranks = others(group)
    sends = [(chunks[group.rank], rank) for rank in ranks] if group.rank < len(chunks) else []
    group.transfer(sends, [(chunks[rank], rank) for rank in reversed(ranks) if rank < len(chunks)])


def all_reduce(flat: Tensor, group: Group, reduction: Reduction = SUM) -> None:
    """The reduction over all ranks, in place on every rank. flat: contiguous, of one dimension."""
    chunks = chunks_of(flat, group.size)
    reduce_scatter(chunks, group, reduction)
    all_gather(chunks, group)


def elements_sent(n: int, size: int, rank: int) -> int:
    """Elements that `rank` sends: all chunks but its own, and its own to all others."""
    own = lengths_of(n, size)[rank]
    return n - own + (size - 1) * own


def messages_sent(n: int, size: int, rank: int) -> int:
    """Messages that `rank` sends: 2(N-1), less those of empty chunks when n < N."""
    lengths = lengths_of(n, size)
    others_chunks = sum(length > 0 for length in lengths) - (lengths[rank] > 0)
    return others_chunks + (size - 1) * (lengths[rank] > 0)


def rounds(size: int) -> int:
    """Transfers one after another: 2."""
    return 2 if size > 1 else 0


ALL_REDUCE = AllReduce(
    name="one_shot",
    all_reduce=all_reduce,
    elements_sent=elements_sent,
    messages_sent=messages_sent,
    rounds=rounds,
    path=even_path,
)
