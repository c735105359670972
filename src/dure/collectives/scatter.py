"""Scatter: every rank ends with its part of the root's tensor.

`linear`: the root sends each of the N-1 others its m elements: (N-1)·m by one link, and nothing
travels twice. `native`: the backend's own; counted as linear.

Source: Thakur et al. 2005, "Optimization of Collective Communication Operations in MPICH".
"""

from __future__ import annotations

from typing import Literal, get_args, overload

import torch.distributed as dist
from torch import Tensor

from dure.collectives.algorithms import native
from dure.collectives.arguments import (
    check_algorithm,
    check_root,
    check_tensor,
    check_writable,
    flat_of,
    give_back,
)
from dure.collectives.group import Group
from dure.collectives.handle import Handle
from dure.tensors.overlap import overlap

Algorithm = Literal["linear", "native"]
ALGORITHMS: tuple[str, ...] = get_args(Algorithm)


def linear(mine: Tensor, parts: list[Tensor] | None, group: Group, root: int = 0) -> None:
    """The root's flat `parts`, in order of rank, into everybody's `mine`; None elsewhere."""
    if parts is None:
        group.receive(mine, root)
        return
    group.transfer([(part, target) for target, part in enumerate(parts) if target != root], [])
    mine.copy_(parts[root])


_RULES = {"linear": linear, "native": native.scatter}


@overload
def scatter(
    tensor: Tensor,
    source: Tensor | None = None,
    group: Group | dist.ProcessGroup | None = None,
    root: int = 0,
    algorithm: Algorithm = "linear",
    *,
    async_op: Literal[False] = False,
) -> Tensor: ...
@overload
def scatter(
    tensor: Tensor,
    source: Tensor | None = None,
    group: Group | dist.ProcessGroup | None = None,
    root: int = 0,
    algorithm: Algorithm = "linear",
    *,
    async_op: Literal[True],
) -> Handle[Tensor]: ...
def scatter(
    tensor: Tensor,
    source: Tensor | None = None,
    group: Group | dist.ProcessGroup | None = None,
    root: int = 0,
    algorithm: Algorithm = "linear",
    *,
    async_op: bool = False,
) -> Tensor | Handle[Tensor]:
    """Row r of the root's `source` into the `tensor` of rank r, in place.

    Returns `tensor`, or a handle whose `wait()` returns it.

    source: on rank `root`, of shape (N, *tensor.shape) and the same dtype; elsewhere it is not
    looked at. group, async_op: as in `all_reduce`. Raises ValueError, before this rank sends
    anything, for an algorithm or a root that there is not, and if `source` does not fit.
    """
    check_algorithm("scatter", algorithm, ALGORITHMS)
    group = Group.of(group)
    check_root(root, group.size)
    check_writable(tensor)
    rows = _checked(source, tensor, group.size) if group.rank == root else None
    if tensor.numel() == 0:
        return Handle.of(tensor) if async_op else tensor

    def work() -> Tensor:
        flat = flat_of(tensor)
        if group.size == 1 and rows is not None:
            flat.copy_(flat_of(rows.clone() if overlap(tensor, rows) else rows))
        else:
            # None on all ranks but the root.
            # A part that lies where this rank's own is written is read from a copy.
            given = rows.clone() if rows is not None and overlap(tensor, rows) else rows
            parts = list(flat_of(given).view(group.size, -1)) if given is not None else None
            _RULES[algorithm](flat, parts, group, root)
        return give_back(flat, tensor)

    return group.perform(f"{algorithm} scatter", work, tensor, async_op)


def _checked(source: Tensor | None, tensor: Tensor, size: int) -> Tensor:
    """The root's source. Raises ValueError if it does not fit."""
    if source is None:
        raise ValueError("the root of a scatter gives a source")
    check_tensor(source)
    shape = (size, *tensor.shape)
    if source.shape != shape or source.dtype != tensor.dtype:
        raise ValueError(
            f"the source of this scatter is {tuple(source.shape)} of {source.dtype}, "
            f"but {size} ranks with {tuple(tensor.shape)} each take {shape} of {tensor.dtype}"
        )
    return source


def messages_sent(
    n: int, size: int, rank: int, root: int = 0, algorithm: Algorithm = "linear"
) -> int:
    """Messages that `rank` sends: N-1 on the root. n: elements of the whole source."""
    return size - 1 if n and rank == root else 0


def elements_sent(
    n: int, size: int, rank: int, root: int = 0, algorithm: Algorithm = "linear"
) -> int:
    """Elements that `rank` sends: n/N a message. n: elements of the whole source."""
    return n // size * messages_sent(n, size, rank, root, algorithm)
