"""All-gather: every rank ends with the parts of all ranks.

`ring`: in N-1 steps the parts travel around the ring; every rank sends all parts except the next
rank's. `one_shot`: every rank sends its own part to all others at once. `native`: the backend's
own; counted as one_shot. With n elements in the result a rank sends about (N-1)/N·n, and receives
exactly the elements that it lacks: no algorithm sends less.

Source: Thakur et al. 2005, "Optimization of Collective Communication Operations in MPICH".
"""

from __future__ import annotations

from typing import Literal, get_args

import torch.distributed as dist
from torch import Tensor

from dure.collectives.algorithms import native, one_shot, ring
from dure.collectives.arguments import check_algorithm, check_tensor, lengths_of
from dure.collectives.group import Group
from dure.collectives.handle import Handle, collective

Algorithm = Literal["ring", "one_shot", "native"]
ALGORITHMS: tuple[str, ...] = get_args(Algorithm)


def _ring(chunks: list[Tensor], group: Group) -> None:
    # Rotated by a chunk, since the ring expects chunk r+1 on rank r.
    ring.all_gather(chunks[-1:] + chunks[:-1], group)


_RULES = {"ring": _ring, "one_shot": one_shot.all_gather, "native": native.all_gather}


@collective
def all_gather(
    tensor: Tensor,
    group: Group | dist.ProcessGroup | None = None,
    algorithm: Algorithm = "ring",
    n: int | None = None,
    *,
    async_op: bool = False,
) -> Tensor | Handle[Tensor]:
    """Return the tensors of all ranks, in order of rank: shape (N, *shape).

    Args:
        tensor: any dtype and shape, the same on every rank; unchanged.
        group: as in `all_reduce`.
        algorithm: `ring`, `one_shot` or `native`.
        n: if given, the ranks have the N chunks of n elements as `reduce_scatter` leaves them,
            possibly of unequal length, and the result has shape (n,).
        async_op: return a handle, whose `wait()` returns the result.

    Raises:
        ValueError: an unknown algorithm, or a `tensor` without the length of this rank's chunk;
            raised before any data is sent.
    """
    check_algorithm("all-gather", algorithm, ALGORITHMS)
    check_tensor(tensor)
    group = Group.of(group)
    total = group.size * tensor.numel() if n is None else n
    length = lengths_of(total, group.size)[group.rank]
    if tensor.numel() != length:
        raise ValueError(
            f"rank {group.rank} of {group.size} holds {length} of {total} elements, not "
            f"{tensor.numel()}"
        )

    def work() -> Tensor:
        whole = tensor.new_empty(total)
        chunks = ring.chunks_of(whole, group.size)
        chunks[group.rank].copy_(tensor.detach().reshape(-1))
        if group.size > 1 and total:
            _RULES[algorithm](chunks, group)
        return whole if n is not None else whole.view(group.size, *tensor.shape)

    return group.perform(f"{algorithm} all-gather", work, tensor, async_op)


def elements_sent(n: int, size: int, rank: int, algorithm: Algorithm = "ring") -> int:
    """Return the elements that `rank` sends. n: elements of the result."""
    lengths = lengths_of(n, size)
    if size == 1:
        return 0
    return n - lengths[(rank + 1) % size] if algorithm == "ring" else (size - 1) * lengths[rank]


def messages_sent(n: int, size: int, rank: int, algorithm: Algorithm = "ring") -> int:
    """Return the messages that `rank` sends: N-1, less the empty parts."""
    lengths = lengths_of(n, size)
    if algorithm == "ring":
        return sum(lengths[(rank - step) % size] > 0 for step in range(size - 1))
    return (size - 1) * (lengths[rank] > 0)
