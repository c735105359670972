"""Direct all-reduce: every rank sends chunk j to rank j, which adds and sends the sum back.

The tensor of n elements is cut into N chunks. In the reduce-scatter every rank sends its chunk j to
rank j, for all j at once, and rank r adds the N parts of chunk r in order of rank; in the
all-gather rank r sends the finished chunk r to all others. The N-1 messages of a phase do not wait
for each other.

Cost: 2(N-1) messages a rank and about 2(N-1)/N·n elements as in a ring, `elements_sent` exactly,
but only 2 sequential transfers: the fastest algorithm for small tensors, as long as every rank can
send to all others at once. Large switched networks see N-1 flows into a port. Scratch: N-1 chunks.
Sums are formed in order of rank, so they have the same bits as `master`.

Source: Thakur et al. 2005, "Optimization of Collective Communication Operations in MPICH" (pairwise
exchange); called "two-shot" in GPU libraries, whose "one-shot" sends the whole tensor to every
rank.
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
    """Return all ranks except this rank, starting with the next, so that targets differ."""
    return [(group.rank + step) % group.size for step in range(1, group.size)]


def reduce_scatter(
    chunks: list[Tensor], group: Group, reduction: Reduction = SUM, into: Tensor | None = None
) -> None:
    """Reduce the ranks' `chunks` so that chunk r is complete on rank r, in `into` or in place.

    If there are fewer chunks than ranks, the last ranks get none.
    """
    ranks = others(group)
    sends = [(chunks[rank], rank) for rank in ranks if rank < len(chunks)]
    if group.rank >= len(chunks):
        group.transfer(sends, [])
        return
    mine = chunks[group.rank]
    # Buffers for the parts of all others; this rank's own part stays in its memory, and is inserted
    # at its position in the order of ranks.
    parts = list(torch.empty(group.size - 1, mine.numel(), dtype=mine.dtype, device=mine.device))
    parts.insert(group.rank, mine)
    # The previous rank sends to this rank first, so receives run in reverse order.
    group.transfer(sends, [(parts[rank], rank) for rank in reversed(ranks)])
    reduction.fold(parts, group.rank, mine if into is None else into)


def all_gather(chunks: list[Tensor], group: Group) -> None:
    """Fill all `chunks` in place; chunk r is complete on rank r at the beginning.

    If there are fewer chunks than ranks, the last ranks contribute none.
    """
    ranks = others(group)
    sends = [(chunks[group.rank], rank) for rank in ranks] if group.rank < len(chunks) else []
    group.transfer(sends, [(chunks[rank], rank) for rank in reversed(ranks) if rank < len(chunks)])


def all_reduce(flat: Tensor, group: Group, reduction: Reduction = SUM) -> None:
    """Reduce over all ranks, in place on every rank. flat: contiguous, of one dimension."""
    chunks = chunks_of(flat, group.size)
    reduce_scatter(chunks, group, reduction)
    all_gather(chunks, group)


def elements_sent(n: int, size: int, rank: int) -> int:
    """Return the elements that `rank` sends: all other chunks, and its own chunk to all others."""
    own = lengths_of(n, size)[rank]
    return n - own + (size - 1) * own


def messages_sent(n: int, size: int, rank: int) -> int:
    """Return the messages that `rank` sends: 2(N-1), less the empty chunks if n < N."""
    lengths = lengths_of(n, size)
    others_chunks = sum(length > 0 for length in lengths) - (lengths[rank] > 0)
    return others_chunks + (size - 1) * (lengths[rank] > 0)


def rounds(size: int) -> int:
    """Return the sequential transfers: 2."""
    return 2 if size > 1 else 0


ALL_REDUCE = AllReduce(
    name="one_shot",
    all_reduce=all_reduce,
    elements_sent=elements_sent,
    messages_sent=messages_sent,
    rounds=rounds,
    path=even_path,
)
