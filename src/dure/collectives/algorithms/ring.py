"""Ring all-reduce: a reduce-scatter, then an all-gather, each of N-1 steps around the ring.

The tensor of n elements is cut into N chunks. In step s of the reduce-scatter rank r sends its sum
of chunk r-s to rank r+1, receives the sum of chunk r-s-1 from rank r-1 and adds its own chunk (all
modulo N): after N-1 steps rank r has the complete sum of chunk r+1. In the all-gather the finished
chunks travel around the ring once more.

Cost: 2(N-1) messages a rank; each of the two passes sends all chunks except one, so about
2(N-1)/N·n elements, `elements_sent` exactly: the optimum of bandwidth, at a latency that grows with
N. Scratch: two chunks. Every chunk is summed once, in the ring's order, and then copied: all ranks
have the same bits.

Source: Patarasuk and Yuan 2009, "Bandwidth optimal all-reduce algorithms for clusters of
workstations".
"""

from __future__ import annotations

import torch
from torch import Tensor

from dure.collectives.algorithms.algorithm import AllReduce, even_path
from dure.collectives.arguments import lengths_of
from dure.collectives.group import Group
from dure.collectives.operation import SUM, Reduction


def chunks_of(flat: Tensor, size: int) -> list[Tensor]:
    """Return N views of a flat tensor; the first n mod N are longer by an element.

    Some are empty if n < N.
    """
    return list(flat.tensor_split(size))


def reduce_scatter(
    chunks: list[Tensor], group: Group, reduction: Reduction = SUM, into: Tensor | None = None
) -> int:
    """Reduce the ranks' `chunks` so that chunk r+1 is complete on rank r; return r+1 mod N.

    The result is written to `into`, by default to the chunk itself; other chunks stay unchanged.
    """
    size = group.size
    whole = (group.rank + 1) % group.size
    into = chunks[whole] if into is None else into
    if size == 1:
        reduction.fold(chunks, 0, into)
        return whole
    # Two alternating buffers: the part of the previous step is sent while the next part arrives.
    longest = max(chunks, key=Tensor.numel)
    buffers = [torch.empty_like(longest) for _ in range(min(2, size - 1))]
    leaving = chunks[group.rank]
    for step in range(size - 1):
        own = chunks[(group.rank - step - 1) % size]
        part = buffers[step % 2][: own.numel()]
        group.exchange(leaving, whole, part, (group.rank - 1) % size)
        # The partial sum is the first operand, the own chunk the second: the order of the ring.
        reduction.combine(part, own, into if step == size - 2 else part)
        leaving = part
    reduction.finish(into)
    return whole


def all_gather(chunks: list[Tensor], group: Group) -> None:
    """Fill all `chunks` in place; on rank r chunk r+1 is complete at the beginning."""
    following = (group.rank + 1) % group.size
    previous = (group.rank - 1) % group.size
    for step in range(group.size - 1):
        leaving = chunks[(group.rank + 1 - step) % group.size]
        arriving = chunks[(group.rank - step) % group.size]
        group.exchange(leaving, following, arriving, previous)


def all_reduce(flat: Tensor, group: Group, reduction: Reduction = SUM) -> None:
    """Reduce over all ranks, in place on every rank. flat: contiguous, of one dimension."""
    chunks = chunks_of(flat, group.size)
    reduce_scatter(chunks, group, reduction)
    all_gather(chunks, group)


def elements_sent(n: int, size: int, rank: int) -> int:
    """Return the elements that `rank` sends in two passes.

    All chunks except r+1 in the first, and all except r+2 in the second.
    """
    lengths = lengths_of(n, size)
    return 2 * n - lengths[(rank + 1) % size] - lengths[(rank + 2) % size] if size > 1 else 0


def messages_sent(n: int, size: int, rank: int) -> int:
    """Return the messages that `rank` sends: 2(N-1), less the empty chunks if n < N."""
    lengths = lengths_of(n, size)
    first = sum(lengths[(rank - step) % size] > 0 for step in range(size - 1))
    second = sum(lengths[(rank + 1 - step) % size] > 0 for step in range(size - 1))
    return first + second


def rounds(size: int) -> int:
    """Return the sequential transfers: 2(N-1)."""
    return 2 * (size - 1)


ALL_REDUCE = AllReduce(
    name="ring",
    all_reduce=all_reduce,
    elements_sent=elements_sent,
    messages_sent=messages_sent,
    rounds=rounds,
    path=even_path,
)
