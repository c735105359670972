"""All-reduce through a master: every rank sends to rank 0, which adds and sends the result back.

Cost of the all-reduce: rank 0 receives and sends (N-1)·n elements, every other rank n: the master's
link is the bottleneck, and the time grows with N. A reduce or a broadcast alone is half of the
all-reduce, the linear algorithm. Scratch: a tensor on the master. The sum is formed in order of
rank (the root's own part first), so it has the same bits in every run and on every rank.

Source: the reduce-and-broadcast of the first parameter-averaging systems; Thakur et al. 2005 call
it linear.
"""

from __future__ import annotations

import torch
from torch import Tensor

from dure.collectives.algorithms.algorithm import AllReduce
from dure.collectives.group import Group
from dure.collectives.operation import SUM, Reduction


def reduce(flat: Tensor, group: Group, reduction: Reduction = SUM, root: int = 0) -> None:
    """Reduce over all ranks, in place on `root`; tensors of other ranks stay unchanged."""
    if group.rank != root:
        group.send(flat, root)
        return
    # The root's own part, then the others' in order of rank, each as soon as it has come.
    total = reduction.accumulator(flat)
    incoming = torch.empty_like(flat)
    for source in range(group.size):
        if source != root:
            group.receive(incoming, source)
            reduction.combine(total, incoming, total)
    reduction.finish(total)
    if total is not flat:
        flat.copy_(total)


def broadcast(flat: Tensor, group: Group, root: int = 0) -> None:
    """Copy the root's tensor into every rank's tensor, in place."""
    if group.rank == root:
        group.transfer([(flat, target) for target in range(group.size) if target != root], [])
    else:
        group.receive(flat, root)


def all_reduce(flat: Tensor, group: Group, reduction: Reduction = SUM) -> None:
    """Reduce over all ranks, in place on every rank. flat: contiguous, of one dimension."""
    reduce(flat, group, reduction)
    broadcast(flat, group)


def elements_sent(n: int, size: int, rank: int) -> int:
    """Return the elements that `rank` sends: (N-1)·n on the master, n elsewhere."""
    return n * messages_sent(n, size, rank)


def messages_sent(n: int, size: int, rank: int) -> int:
    """Return the messages that `rank` sends: N-1 on the master, 1 elsewhere."""
    if size == 1 or n == 0:
        return 0
    return size - 1 if rank == 0 else 1


def rounds(size: int) -> int:
    """Return the sequential transfers, all through the master's link: 2(N-1)."""
    return 2 * (size - 1)


def path(n: int, size: int) -> tuple[float, float]:
    """Return the path: all tensors pass through the master sequentially."""
    return 2 * (size - 1) * n, (size - 1) * n


ALL_REDUCE = AllReduce(
    name="master",
    all_reduce=all_reduce,
    elements_sent=elements_sent,
    messages_sent=messages_sent,
    rounds=rounds,
    path=path,
)
