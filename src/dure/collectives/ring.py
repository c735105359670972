"""Ring all-reduce: a reduce-scatter, then an all-gather, each of N-1 steps around the ring.

The tensor of n elements is cut into N chunks. In step s of the reduce-scatter rank r sends chunk r-s to rank r+1
and adds what comes from rank r-1 to its chunk r-s-1 (all modulo N): after N-1 steps rank r holds the whole sum of
chunk r+1. In the all-gather the finished chunks go round once more.

Cost: 2(N-1) messages a rank; each of the two passes sends every chunk but one, so about 2(N-1)/N·n elements,
`elements_sent` exactly: the optimum of bandwidth, at a latency that grows with N.
Every chunk is summed once, in the ring's order, and then copied: all ranks hold the same bits.

Source: Patarasuk and Yuan 2009, "Bandwidth optimal all-reduce algorithms for clusters of workstations".
"""

from __future__ import annotations

import torch
from torch import Tensor

from dure.collectives.group import Group


def chunks_of(flat: Tensor, size: int) -> list[Tensor]:
    """N views of a flat tensor; the first n mod N hold one element more; some are empty if n < N."""
    return list(flat.tensor_split(size))


def reduce_scatter(chunks: list[Tensor], group: Group) -> int:
    """Sums the ranks' `chunks` in place so that this rank's chunk r+1 is complete; returns its index."""
    following, previous = (group.rank + 1) % group.size, (group.rank - 1) % group.size
    incoming = torch.empty_like(chunks[0])  # the first chunk is the longest
    for step in range(group.size - 1):
        leaving = chunks[(group.rank - step) % group.size]
        growing = chunks[(group.rank - step - 1) % group.size]
        part = incoming[: growing.numel()]
        group.exchange(leaving, following, part, previous)
        growing += part
    return following


def all_gather(chunks: list[Tensor], group: Group) -> None:
    """Fills all `chunks` in place, where this rank's chunk r+1 is the complete one."""
    following, previous = (group.rank + 1) % group.size, (group.rank - 1) % group.size
    for step in range(group.size - 1):
        leaving = chunks[(group.rank + 1 - step) % group.size]
        arriving = chunks[(group.rank - step) % group.size]
        group.exchange(leaving, following, arriving, previous)


def all_reduce(flat: Tensor, group: Group) -> None:
    """The sum over all ranks, in place on every rank. flat: contiguous, of one dimension."""
    chunks = chunks_of(flat, group.size)
    reduce_scatter(chunks, group)
    all_gather(chunks, group)


def elements_sent(n: int, size: int, rank: int) -> int:
    """Elements that `rank` sends: two passes over all chunks, but for r+1 in the first and r+2 in the second."""
    lengths = [n // size + (index < n % size) for index in range(size)]
    return 2 * n - lengths[(rank + 1) % size] - lengths[(rank + 2) % size] if size > 1 else 0


def messages_sent(n: int, size: int, rank: int) -> int:
    """Messages that `rank` sends: 2(N-1), less those of empty chunks when n < N."""
    lengths = [n // size + (index < n % size) for index in range(size)]
    first = sum(lengths[(rank - step) % size] > 0 for step in range(size - 1))
    second = sum(lengths[(rank + 1 - step) % size] > 0 for step in range(size - 1))
    return first + second
