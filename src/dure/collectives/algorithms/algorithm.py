"""Declaration of an all-reduce algorithm, which all other code reads.

A user-defined all-reduce is an `AllReduce` too: `dure.collectives.all_reduce(t, algorithm=mine)`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

Path = Callable[[int, int], tuple[float, float]]
"""path(n, size): elements sent, and elements reduced, along the critical path of `size` ranks.

Each rank has a separate machine, and chunks count as if N divided n.
"""


def even_path(n: int, size: int) -> tuple[float, float]:
    """Return the path of an algorithm that divides sends and reductions evenly, like a ring."""
    share = n * (size - 1) / size
    return 2 * share, share


@dataclass(frozen=True)
class AllReduce:
    """All-reduce algorithm.

    Args:
        name: name by which callers select the algorithm.
        all_reduce: all_reduce(flat, group, reduction) reduces a contiguous tensor of one dimension
            in place, on every rank.
        elements_sent: elements_sent(n, size, rank) is the exact number of elements that a rank
            sends.
        messages_sent: messages_sent(n, size, rank) is the exact number of messages that a rank
            sends.
        rounds: rounds(size) is the number of sequential transfers.
        path: terms of the critical path; None if unknown, as for a backend's internal algorithm,
            whose time cannot be predicted and which `auto` does not compare.
        over_hosts: whether the algorithm depends on the placement of ranks on hosts. Its functions
            then take a partition of the ranks as a further argument, and `auto` compares it only if
            there is a hierarchy.
    """

    name: str
    all_reduce: Callable[..., None]
    elements_sent: Callable[..., int]
    messages_sent: Callable[..., int]
    rounds: Callable[..., int]
    path: Path | None = None
    over_hosts: bool = False
