"""Reduce: the root ends with the reduction over all ranks; other tensors stay unchanged.

`tree`: up a binomial tree, ceil(log2 N) sequential transfers of n elements. `linear`: every rank
sends to the root, which adds in order of rank (its own part first) and whose link transfers
(N-1)·n. `native`: the backend's own; counted as linear. Every rank except the root sends n elements
in a single message, whatever the algorithm.

Source: Thakur et al. 2005, "Optimization of Collective Communication Operations in MPICH".
"""

from __future__ import annotations

from typing import Any, Literal, get_args

import torch.distributed as dist
from torch import Tensor

from dure.collectives.algorithms import master, native, tree
from dure.collectives.arguments import (
    check_algorithm,
    check_root,
    check_tensor,
    check_writable,
    flat_of,
    give_back,
)
from dure.collectives.group import Group
from dure.collectives.handle import Handle, collective
from dure.collectives.operation import reduction as reduction_of

Algorithm = Literal["tree", "linear", "native"]
ALGORITHMS: tuple[str, ...] = get_args(Algorithm)

_RULES = {"tree": tree.reduce, "linear": master.reduce, "native": native.reduce}


@collective
def reduce(
    tensor: Tensor,
    group: Group | dist.ProcessGroup | None = None,
    root: int = 0,
    algorithm: Algorithm = "tree",
    op: Any = "sum",
    *,
    async_op: bool = False,
) -> Tensor | Handle[Tensor]:
    """Reduce over all ranks into the tensor of rank `root`, in place.

    Args:
        tensor: any shape, the same shape and dtype on every rank; tensors of other ranks stay
            unchanged.
        group: as in `all_reduce`.
        root: a rank of the group.
        algorithm: `tree`, `linear` or `native`.
        op: as in `all_reduce`.
        async_op: as in `all_reduce`.

    Returns:
        `tensor`, or a handle whose `wait()` returns it.

    Raises:
        ValueError: an unknown algorithm, root or operation; raised before any data is sent.
    """
    check_algorithm("reduce", algorithm, ALGORITHMS)
    group = Group.of(group)
    check_root(root, group.size)
    # Only the root is written to.
    (check_writable if group.rank == root else check_tensor)(tensor)
    reduction = reduction_of(op, tensor.dtype, group.size)
    if group.size == 1 or tensor.numel() == 0:
        return Handle.of(tensor) if async_op else tensor
    # Whether the algorithm would overwrite this rank's tensor, though only the root's may change:
    # by sums of the tree's inner ranks, by a backend, or by an average that divides first.
    spoils = algorithm == "native" or reduction.divides_first(tensor.dtype)
    spoils = spoils or (
        algorithm == "tree" and len(tree.children(group.size, group.rank, root)) > 0
    )

    def work() -> Tensor:
        flat = flat_of(tensor)
        if group.rank != root and spoils and flat.data_ptr() == tensor.data_ptr():
            flat = flat.clone()
        _RULES[algorithm](flat, group, reduction.begin(flat), root)
        return give_back(flat, tensor) if group.rank == root else tensor

    return group.perform(f"{algorithm} reduce", work, tensor, async_op)


def messages_sent(
    n: int, size: int, rank: int, root: int = 0, algorithm: Algorithm = "tree"
) -> int:
    """Return the messages that `rank` sends: 1, or 0 on the root."""
    return 1 if n and rank != root else 0


def elements_sent(
    n: int, size: int, rank: int, root: int = 0, algorithm: Algorithm = "tree"
) -> int:
    """Return the elements that `rank` sends: n, or 0 on the root."""
    return n * messages_sent(n, size, rank, root, algorithm)
