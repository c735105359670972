"""All-reduce along a binomial tree: a reduce up to the root, then a broadcast down.

Ranks are counted from the root, which is v = 0. The parent of v is v without its lowest set bit.

    N = 8        0 -> 1, 2, 4        2 -> 3        4 -> 5, 6        6 -> 7

So v has the children v + 2^k < N with 2^k below the lowest set bit of v, and the root has the
children 2^k < N. In the reduce a rank adds the partial sums of its children, the nearest child
first, and sends the sum to its parent. In the broadcast a rank sends the result to its children,
the farthest child first.

Cost of the all-reduce: 2·ceil(log2 N) sequential transfers of all n elements. A rank sends n
elements to its parent and n elements to each child, and has at most ceil(log2 N) children. The tree
is good for tensors so small that bytes do not matter, and wasteful for large tensors. N may be any
number. A rank with children needs a temporary tensor of n elements. The result has the same bits on
every rank and in every call: the order of additions is fixed, and the other ranks copy the root's
result.

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
    # A distance at or above the lowest set bit leads to a rank with another parent.
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

    On other ranks with children, `flat` is overwritten by a partial sum. flat: contiguous, of one
    dimension.
    """
    own_children = children(group.size, group.rank, root)
    # A rank without children receives nothing and needs no buffer.
    incoming = torch.empty_like(flat) if own_children else flat
    for child in own_children:
        group.receive(incoming, child)
        reduction.combine(flat, incoming, flat)
    if group.rank == root:
        # Divides by N if the reduction is a mean.
        reduction.finish(flat)
    else:
        group.send(flat, parent(group.size, group.rank, root))


def broadcast(flat: Tensor, group: Group, root: int = 0) -> None:
    """Copy the root's tensor into every rank's tensor, in place."""
    if group.rank != root:
        group.receive(flat, parent(group.size, group.rank, root))
    # The farthest child has the deepest subtree, and therefore comes first.
    group.transfer(
        [(flat, child) for child in reversed(children(group.size, group.rank, root))], []
    )


def all_reduce(flat: Tensor, group: Group, reduction: Reduction = SUM) -> None:
    """Reduce over all ranks, in place on every rank. flat: contiguous, of one dimension."""
    reduce(flat, group, reduction)
    broadcast(flat, group)


def elements_sent(n: int, size: int, rank: int) -> int:
    """Return the number of elements that `rank` sends: n for every message."""
    return n * messages_sent(n, size, rank)


def messages_sent(n: int, size: int, rank: int) -> int:
    """Return the number of messages that `rank` sends: to its parent and to every child."""
    return ((rank != 0) + len(children(size, rank))) if n else 0


def rounds(size: int) -> int:
    """Return the number of sequential transfers: 2·ceil(log2 N)."""
    return 2 * (size - 1).bit_length()


def path(n: int, size: int) -> tuple[float, float]:
    """Return (elements sent, elements reduced) along the critical path.

    At each level of the tree, all n elements are sent up and down, and reduced on the way up.
    """
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
