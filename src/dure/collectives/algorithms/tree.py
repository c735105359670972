"""All-reduce along a binomial tree: a reduce up to the root, then a broadcast down.

Ranks are counted from the root. The parent of v is v without its lowest set bit, so v has a child v
+ 2^k for every 2^k below that bit (any 2^k for the root), as far as there are ranks. In the reduce
a rank adds its children's sums, nearest first, and sends the sum to its parent; in the broadcast a
rank forwards its parent's tensor, farthest first.

Cost of the all-reduce: 2·ceil(log2 N) sequential transfers of all n elements. A rank sends n to its
parent and n to each child, at most ceil(log2 N) children: good for tensors so small that bytes do
not matter, wasteful for large tensors. Any N. Scratch: a tensor, on ranks with children. The root
completes the sum in a fixed order, and all others copy it.

Source: Thakur et al. 2005, "Optimization of Collective Communication Operations in MPICH".
"""

from __future__ import annotations

import torch
from torch import Tensor

from dure.collectives.algorithms.algorithm import AllReduce
from dure.collectives.group import Group
from dure.collectives.operation import SUM, Reduction


def children(size: int, rank: int, root: int = 0) -> list[int]:
    """Return the ranks whose parent is `rank`, nearest first."""
    # Up to the lowest set bit of the position: beyond it, v + 2^k has another parent.
    position = (rank - root) % size
    found = []
    distance = 1
    while position + distance < size and not position & distance:
        found.append((position + distance + root) % size)
        distance *= 2
    return found


def parent(size: int, rank: int, root: int = 0) -> int:
    """Return the parent of a rank other than the root."""
    position = (rank - root) % size
    return ((position & (position - 1)) + root) % size


def reduce(flat: Tensor, group: Group, reduction: Reduction = SUM, root: int = 0) -> None:
    """Reduce over all ranks, in place on `root`.

    Other ranks with children have a partial sum afterwards.
    """
    own_children = children(group.size, group.rank, root)
    # Leaves receive nothing and need no buffer.
    incoming = torch.empty_like(flat) if own_children else flat
    for child in own_children:
        group.receive(incoming, child)
        reduction.combine(flat, incoming, flat)
    if group.rank == root:
        reduction.finish(flat)
    else:
        group.send(flat, parent(group.size, group.rank, root))


def broadcast(flat: Tensor, group: Group, root: int = 0) -> None:
    """Copy the root's tensor into every rank's tensor, in place."""
    if group.rank != root:
        group.receive(flat, parent(group.size, group.rank, root))
    # Farthest first: that child has the deepest subtree.
    group.transfer(
        [(flat, child) for child in reversed(children(group.size, group.rank, root))], []
    )


def all_reduce(flat: Tensor, group: Group, reduction: Reduction = SUM) -> None:
    """Reduce over all ranks, in place on every rank. flat: contiguous, of one dimension."""
    reduce(flat, group, reduction)
    broadcast(flat, group)


def elements_sent(n: int, size: int, rank: int) -> int:
    """Return the elements that `rank` sends: n for every message."""
    return n * messages_sent(n, size, rank)


def messages_sent(n: int, size: int, rank: int) -> int:
    """Return the messages that `rank` sends: to its parent and to every child."""
    return ((rank != 0) + len(children(size, rank))) if n else 0


def rounds(size: int) -> int:
    """Return the sequential transfers: 2·ceil(log2 N)."""
    return 2 * (size - 1).bit_length()


def path(n: int, size: int) -> tuple[float, float]:
    """Return the path: the whole tensor at every level, up and down."""
    levels = (size - 1).bit_length()
    return 2 * levels * n, levels * n


ALL_REDUCE = AllReduce(
    name="tree",
    all_reduce=all_reduce,
    elements_sent=elements_sent,
    messages_sent=messages_sent,
    rounds=rounds,
    path=path,
)
