"""Scatter: every rank ends with its part of the root's tensor.

`linear`: the root sends each of the N-1 others its m elements: (N-1)·m through its link, each
element once. `native`: the backend's own; counted as linear.

Source: Thakur et al. 2005, "Optimization of Collective Communication Operations in MPICH".
"""

from __future__ import annotations

from typing import Literal, get_args

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
from dure.collectives.handle import Handle, collective
from dure.tensors.overlap import overlap

Algorithm = Literal["linear", "native"]
ALGORITHMS: tuple[str, ...] = get_args(Algorithm)


def linear(mine: Tensor, parts: list[Tensor] | None, group: Group, root: int = 0) -> None:
    """Send the root's flat `parts`, in order of rank, into every rank's `mine`.

    parts: None on other ranks.
    """
    if parts is None:
        group.receive(mine, root)
        return
    group.transfer([(part, target) for target, part in enumerate(parts) if target != root], [])
    mine.copy_(parts[root])


_RULES = {"linear": linear, "native": native.scatter}


@collective
def scatter(
    tensor: Tensor,
    source: Tensor | None = None,
    group: Group | dist.ProcessGroup | None = None,
    root: int = 0,
    algorithm: Algorithm = "linear",
    *,
    async_op: bool = False,
) -> Tensor | Handle[Tensor]:
    """Copy row r of the root's `source` into the `tensor` of rank r, in place.

    Args:
        tensor: receives the row; its dtype is the same on every rank.
        source: on rank `root`, shape (N, *tensor.shape) and the dtype of `tensor`; ignored on other
            ranks.
        group: as in `all_reduce`.
        root: a rank of the group.
        algorithm: `linear` or `native`.
        async_op: as in `all_reduce`.

    Returns:
        `tensor`, or a handle whose `wait()` returns it.

    Raises:
        ValueError: an unknown algorithm or root, or a `source` that does not fit; raised before
            this rank sends any data.
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
            # `rows` is None on all ranks except the root. A source that overlaps the output is
            # copied, because the output is written while the other parts are sent.
            given = rows.clone() if rows is not None and overlap(tensor, rows) else rows
            parts = list(flat_of(given).view(group.size, -1)) if given is not None else None
            _RULES[algorithm](flat, parts, group, root)
        return give_back(flat, tensor)

    return group.perform(f"{algorithm} scatter", work, tensor, async_op)


def _checked(source: Tensor | None, tensor: Tensor, size: int) -> Tensor:
    """Return the root's source. Raises ValueError if it does not fit."""
    if source is None:
        raise ValueError("the root of a scatter needs a source")
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
    """Return the messages that `rank` sends: N-1 on the root. n: elements of the whole source."""
    return size - 1 if n and rank == root else 0


def elements_sent(
    n: int, size: int, rank: int, root: int = 0, algorithm: Algorithm = "linear"
) -> int:
    """Return the elements that `rank` sends: n/N a message. n: elements of the whole source."""
    return n // size * messages_sent(n, size, rank, root, algorithm)
