"""Gather: the root ends with the tensors of all ranks.

`linear`: every rank sends its own m elements to the root, which receives (N-1)·m through its link;
no rank sends more than its own elements, so no other algorithm sends less. `native`: the backend's
own; counted as linear.

Source: Thakur et al. 2005, "Optimization of Collective Communication Operations in MPICH".
"""

from __future__ import annotations

from typing import Literal, get_args

import torch
import torch.distributed as dist
from torch import Tensor

from dure.collectives.algorithms import native
from dure.collectives.arguments import check_algorithm, check_root, check_tensor, flat_of
from dure.collectives.group import Group
from dure.collectives.handle import Handle, collective

Algorithm = Literal["linear", "native"]
ALGORITHMS: tuple[str, ...] = get_args(Algorithm)


def linear(mine: Tensor, parts: list[Tensor] | None, group: Group, root: int = 0) -> None:
    """Gather every rank's flat tensor into the root's `parts`, in order of rank.

    parts: None on other ranks.
    """
    if parts is None:
        group.send(mine, root)
        return
    # From all at once, so that no rank waits for a slow rank.
    parts[root].copy_(mine)
    group.transfer([], [(part, source) for source, part in enumerate(parts) if source != root])


_RULES = {"linear": linear, "native": native.gather}


@collective
def gather(
    tensor: Tensor,
    group: Group | dist.ProcessGroup | None = None,
    root: int = 0,
    algorithm: Algorithm = "linear",
    *,
    async_op: bool = False,
) -> Tensor | Handle[Tensor | None] | None:
    """Return the tensors of all ranks, in order of rank, on rank `root`; None elsewhere.

    Args:
        tensor: any dtype and shape, the same on every rank; unchanged.
        group: as in `all_reduce`.
        root: a rank of the group.
        algorithm: `linear` or `native`.
        async_op: return a handle, whose `wait()` returns the result.

    Returns:
        A tensor of shape (N, *shape) on the root, and None elsewhere.

    Raises:
        ValueError: an unknown algorithm or root; raised before any data is sent.
    """
    check_algorithm("gather", algorithm, ALGORITHMS)
    group = Group.of(group)
    check_root(root, group.size)
    check_tensor(tensor)

    def work() -> Tensor | None:
        whole = tensor.new_empty((group.size, *tensor.shape)) if group.rank == root else None
        if tensor.numel():
            parts = list(whole.view(group.size, -1)) if whole is not None else None
            _RULES[algorithm](flat_of(tensor), parts, group, root)
        return whole

    if group.size == 1:
        alone = torch.stack([tensor.detach()])
        return Handle.of(alone) if async_op else alone
    return group.perform(f"{algorithm} gather", work, tensor, async_op)


def messages_sent(
    n: int, size: int, rank: int, root: int = 0, algorithm: Algorithm = "linear"
) -> int:
    """Return the messages that `rank` sends: 1, or 0 on the root. n: elements of all ranks."""
    return 1 if n and rank != root else 0


def elements_sent(
    n: int, size: int, rank: int, root: int = 0, algorithm: Algorithm = "linear"
) -> int:
    """Return the elements that `rank` sends: its n/N, or 0 on the root.

    n: elements of all ranks.
    """
    return n // size * messages_sent(n, size, rank, root, algorithm)
