"""The worker that has sent the most bytes, for tables that show a mean over workers.

A master, a server or a party sends more than the mean says: in an all-reduce through a master on N
ranks, rank 0 sends N - 1 times as much as each other rank.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

TOGETHER = " clients"
"""End of the name of a line of `per_worker` that has the sums of many clients."""

_MOST = 1e18
"""Bound on bytes, since a folder from elsewhere may contain any number."""

_ALIKE = 0.01
"""Relative difference up to which bytes count as equal: messages of ranks differ by a few bytes."""


class LargestSender(NamedTuple):
    """A worker by name, and the bytes that it has sent."""

    name: str
    nbytes: float


def largest_sender(
    per_worker: Sequence[Mapping[str, Any]], mean: float | None
) -> LargestSender | None:
    """Return the worker that has sent the most; None if no worker has sent more than the mean.

    per_worker: entries of summary.json. mean: bytes sent per worker, as tables show them.
    """
    sent = [
        LargestSender(name, float(nbytes))
        for one in per_worker
        if isinstance(name := one.get("name"), str)
        and not name.endswith(TOGETHER)
        and isinstance(nbytes := one.get("bytes_sent"), (int, float))
        and 0 <= nbytes < _MOST
    ]
    most = max(sent, key=lambda one: one.nbytes, default=None)
    if most is None or mean is None or most.nbytes <= (1 + _ALIKE) * mean:
        return None
    return most
