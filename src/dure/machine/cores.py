"""The cores of this computer, and how many of them a rank may use."""

from __future__ import annotations

import os


def available_cores() -> int:
    """The cores that this process may run on."""
    if hasattr(os, "sched_getaffinity"):  # Linux
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def threads_per_rank(ranks: int) -> int:
    """The cores divided over `ranks` of this machine, at least one each."""
    return max(1, available_cores() // ranks)
