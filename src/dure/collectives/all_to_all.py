"""All-to-all: rank r ends with part r of every rank's tensor, the transpose of a matrix of parts.

`pairwise`: in step s = 1 … N-1 rank r sends part r+s to rank r+s while it receives from rank r-s
(modulo N); no rank receives from two ranks at once. `native`: the backend's own; counted the same.
Every rank sends all of its n elements except its own part, (N-1)/N·n in N-1 messages: no algorithm
sends less.

Source: Thakur et al. 2005, "Optimization of Collective Communication Operations in MPICH" (pairwise
exchange).
"""

from __future__ import annotations

from typing import Literal, get_args

import torch
import torch.distributed as dist
from torch import Tensor

from dure.collectives.algorithms import native
from dure.collectives.arguments import check_algorithm, check_tensor, flat_of
from dure.collectives.group import Group
from dure.collectives.handle import Handle, collective

Algorithm = Literal["pairwise", "native"]
ALGORITHMS: tuple[str, ...] = get_args(Algorithm)


def pairwise(source: Tensor, target: Tensor, group: Group) -> None:
    """Send part j of the flat `source` to rank j; receive part j of `target` from rank j."""
    leaving = source.tensor_split(group.size)
    arriving = target.tensor_split(group.size)
    arriving[group.rank].copy_(leaving[group.rank])
    # In each step all ranks send at the same distance, so each port has one sender.
    for step in range(1, group.size):
        to = (group.rank + step) % group.size
        origin = (group.rank - step) % group.size
        group.exchange(leaving[to], to, arriving[origin], origin)


_RULES = {"pairwise": pairwise, "native": native.all_to_all}


@collective
def all_to_all(
    tensor: Tensor,
    group: Group | dist.ProcessGroup | None = None,
    algorithm: Algorithm = "pairwise",
    *,
    async_op: bool = False,
) -> Tensor | Handle[Tensor]:
    """Return the parts that all ranks had for this rank, in order of rank.

    tensor: shape (N·k, *rest), the same shape and dtype on every rank; rows j·k to (j+1)·k-1 go to
    rank j. It stays unchanged; the result has the same shape, rows j·k to (j+1)·k-1 from rank j.
    group: as in `all_reduce`.
    algorithm: `pairwise` or `native`.
    async_op: return a handle, whose `wait()` returns the result.

    Raises ValueError, before any data is sent, for an unknown algorithm, and if the number of rows
    is not a multiple of N.
    """
    check_algorithm("all-to-all", algorithm, ALGORITHMS)
    check_tensor(tensor)
    group = Group.of(group)
    if tensor.dim() == 0 or tensor.shape[0] % group.size:
        rows = tensor.shape[0] if tensor.dim() else "no"
        raise ValueError(
            f"an all-to-all of {group.size} ranks needs a multiple of {group.size} rows, not {rows}"
        )

    def work() -> Tensor:
        target = torch.empty_like(tensor, memory_format=torch.contiguous_format)
        if group.size == 1 or tensor.numel() == 0:
            return target.copy_(tensor.detach())
        _RULES[algorithm](flat_of(tensor), target.view(-1), group)
        return target

    return group.perform(f"{algorithm} all-to-all", work, tensor, async_op)


def messages_sent(n: int, size: int, rank: int, algorithm: Algorithm = "pairwise") -> int:
    """Return the messages that `rank` sends: N-1. n: elements of its tensor."""
    return size - 1 if n else 0


def elements_sent(n: int, size: int, rank: int, algorithm: Algorithm = "pairwise") -> int:
    """Return the elements that `rank` sends: all except its own part. n: elements of its tensor."""
    return n // size * messages_sent(n, size, rank, algorithm)
