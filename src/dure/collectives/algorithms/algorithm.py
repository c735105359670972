"""What an all-reduce declares of itself, in its own file; everything else reads it from there.

An all-reduce of your own is an `AllReduce` too: `dure.collectives.all_reduce(t, algorithm=mine)`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

Path = Callable[[int, int], tuple[float, float]]
"""path(n, ranks): the elements of n that are sent, and those that are reduced, one after another,
where each rank has a machine of its own. Chunks are as if N divided n."""


def even_path(n: int, ranks: int) -> tuple[float, float]:
    """The path of those that divide sending and reducing evenly among the ranks, as a ring does."""
    share = n * (ranks - 1) / ranks
    return 2 * share, share


@dataclass(frozen=True)
class AllReduce:
    """An all-reduce.

    all_reduce(flat, group, reduction): reduces a contiguous tensor of one dimension in place, on
    every rank.

    elements_sent, messages_sent (n, size, rank): what a rank sends, exactly. rounds(size): the
    number of transfers one after another.

    path: what the critical path is made of; None where nobody knows, as with what a backend does by
    itself, so that its time cannot be predicted and `auto` does not compare it.

    over_hosts: whether it depends on who shares a host. Its functions then take a partition of the
    ranks as one more argument, and `auto` compares it only where there is a hierarchy.
    """

    name: str
    all_reduce: Callable[..., None]
    elements_sent: Callable[..., int]
    messages_sent: Callable[..., int]
    rounds: Callable[..., int]
    path: Path | None = None
    over_hosts: bool = False
