"""All-reduce by a master: everybody sends to rank 0, which adds and sends the sum back.

Cost: rank 0 receives and sends (N-1)·n elements, every other rank n: the master's link is the bottleneck, and the
time grows with N. The sum is formed in order of rank, so it has the same bits in every run and on every rank.

Source: the reduce-and-broadcast of the first parameter-averaging systems; Thakur et al. 2005 call it linear.
"""

from __future__ import annotations

import torch
from torch import Tensor

from dure.collectives.group import Group


def all_reduce(flat: Tensor, group: Group) -> None:
    """The sum over all ranks, in place on every rank. flat: contiguous, of one dimension."""
    if group.size == 1 or flat.numel() == 0:
        return
    if group.rank != 0:
        group.send(flat, 0)
        group.receive(flat, 0)
        return
    incoming = torch.empty_like(flat)
    for source in range(1, group.size):
        group.receive(incoming, source)
        flat += incoming
    for target in range(1, group.size):
        group.send(flat, target)


def elements_sent(n: int, size: int, rank: int) -> int:
    """Elements that `rank` sends: (N-1)·n on the master, n elsewhere."""
    return n * messages_sent(n, size, rank)


def messages_sent(n: int, size: int, rank: int) -> int:
    """Messages that `rank` sends: N-1 on the master, one elsewhere."""
    if size == 1 or n == 0:
        return 0
    return size - 1 if rank == 0 else 1
