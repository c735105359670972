"""Along a binomial tree: a reduce up to the root, then a broadcast down.

Ranks are counted from the root. The parent of v is v without its lowest one bit, so v has a child v
+ 2^k for every 2^k below that bit (any 2^k for the root), as far as there are ranks. In the reduce
a rank adds what its children send, nearest first, and sends the sum to its parent; in the broadcast
it passes on what its parent sends, farthest first.

Cost of the all-reduce: 2·ceil(log2 N) transfers one after another of all n elements. A rank sends n
to its parent and n to each child, at most ceil(log2 N): good for tensors so small that bytes do not
matter, wasteful for large ones. Any N. Scratch: one tensor, on ranks with children. One rank forms
the sum, always in the same order, and all others copy it.

Source: Thakur et al. 2005, "Optimization of Collective Communication Operations in MPICH".
"""

from __future__ import annotations

import torch
from torch import Tensor

from dure.collectives.algorithms.algorithm import AllReduce
from dure.collectives.group import Group
from dure.collectives.operation import SUM, Reduction


def children(size: int, rank: int, root: int = 0) -> list[int]:
    """The ranks whose parent is `rank`, nearest first."""
    # Up to the lowest one bit of the position: beyond it, v + 2^k has another parent.
    position = (rank - root) % size
    found = []
    distance = 1
    while position + distance < size and not position & distance:
        found.append((position + distance + root) % size)
        distance *= 2
    return found


def parent(size: int, rank: int, root: int = 0) -> int:
    """The rank above; the root has none."""
    position = (rank - root) % size
    return ((position & (position - 1)) + root) % size


def reduce(flat: Tensor, group: Group, reduction: Reduction = SUM, root: int = 0) -> None:
    """The reduction over all ranks, in place on `root`.

    The other ranks with children are left with a part of it.
    """
    below = children(group.size, group.rank, root)
    # Leaves receive nothing, and need no room for it.
    incoming = torch.empty_like(flat) if below else flat
    for child in below:
        group.receive(incoming, child)
        reduction.combine(flat, incoming, flat)
    if group.rank == root:
        reduction.finish(flat)
    else:
        group.send(flat, parent(group.size, group.rank, root))


def broadcast(flat: Tensor, group: Group, root: int = 0) -> None:
    """The root's tensor into every rank's, in place."""
    if group.rank != root:
        group.receive(flat, parent(group.size, group.rank, root))
    # Farthest first: the child with most below it has the longest way to go.
    group.transfer(
        [(flat, child) for child in reversed(children(group.size, group.rank, root))], []
    )


def all_reduce(flat: Tensor, group: Group, reduction: Reduction = SUM) -> None:
    """The reduction over all ranks, in place on every rank. flat: contiguous, of one dimension."""
    reduce(flat, group, reduction)
    broadcast(flat, group)


def elements_sent(n: int, size: int, rank: int) -> int:
    """Elements that `rank` sends: n for every message."""
    return n * messages_sent(n, size, rank)


def messages_sent(n: int, size: int, rank: int) -> int:
    """Messages that `rank` sends: one to its parent, one to every child."""
    return ((rank != 0) + len(children(size, rank))) if n else 0


def rounds(size: int) -> int:
    """Transfers one after another: 2·ceil(log2 N)."""
    return 2 * (size - 1).bit_length()


def path(n: int, ranks: int) -> tuple[float, float]:
    """The whole tensor at every level, up and down."""
    levels = (ranks - 1).bit_length()
    return 2 * levels * n, levels * n


ALL_REDUCE = AllReduce(
    name="tree",
    all_reduce=all_reduce,
    elements_sent=elements_sent,
    messages_sent=messages_sent,
    rounds=rounds,
    path=path,
)
