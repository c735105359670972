"""Broadcast: every rank ends with the root's tensor.

`tree`: down a binomial tree, ceil(log2 N) sequential transfers of n elements; a rank sends n to
each of its children. `linear`: the root sends n to each of the N-1 others, all through its own
link. `native`: the backend's own; counted as linear. All of them deliver N-1 times n elements.

Source: Thakur et al. 2005, "Optimization of Collective Communication Operations in MPICH".
"""

from __future__ import annotations

from typing import Literal, get_args

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

Algorithm = Literal["tree", "linear", "native"]
ALGORITHMS: tuple[str, ...] = get_args(Algorithm)

_RULES = {"tree": tree.broadcast, "linear": master.broadcast, "native": native.broadcast}


@collective
def broadcast(
    tensor: Tensor,
    group: Group | dist.ProcessGroup | None = None,
    root: int = 0,
    algorithm: Algorithm = "tree",
    *,
    async_op: bool = False,
) -> Tensor | Handle[Tensor]:
    """Copy the tensor of rank `root` into every rank's tensor, in place.

    Args:
        tensor: any dtype and shape, the same on every rank.
        group: None is all ranks of torch.distributed.
        root: a rank of the group.
        algorithm: `tree`, `linear` or `native`.
        async_op: as in `all_reduce`.

    Returns:
        `tensor`, or a handle for it.

    Raises:
        ValueError: an unknown algorithm or root; raised before any data is sent.
    """
    check_algorithm("broadcast", algorithm, ALGORITHMS)
    group = Group.of(group)
    check_root(root, group.size)
    # The root's tensor is only read; all other tensors are written.
    (check_tensor if group.rank == root else check_writable)(tensor)
    if group.size == 1 or tensor.numel() == 0:
        return Handle.of(tensor) if async_op else tensor

    def work() -> Tensor:
        flat = flat_of(tensor)
        _RULES[algorithm](flat, group, root)
        return tensor if group.rank == root else give_back(flat, tensor)

    return group.perform(f"{algorithm} broadcast", work, tensor, async_op)


def messages_sent(
    n: int, size: int, rank: int, root: int = 0, algorithm: Algorithm = "tree"
) -> int:
    """Return the messages that `rank` sends."""
    if n == 0:
        return 0
    if algorithm == "tree":
        return len(tree.children(size, rank, root))
    return size - 1 if rank == root else 0


def elements_sent(
    n: int, size: int, rank: int, root: int = 0, algorithm: Algorithm = "tree"
) -> int:
    """Return the elements that `rank` sends: n for every message."""
    return n * messages_sent(n, size, rank, root, algorithm)
