"""Cores of this computer, and the number of cores that a rank may use.

A container's limit of CPU time is a quota of its control group (cgroup): an amount of time in each
period, on any cores. Neither the number of cores nor a process's affinity shows the quota. A
process with a thread for each core of the host is throttled again and again in the middle of a
step.

Source: the Linux kernel's "Control Group v2" (cpu.max) and "CFS Bandwidth Control" (version 1:
cpu.cfs_quota_us and cpu.cfs_period_us).
"""

from __future__ import annotations

import functools
import os
from collections.abc import Iterator
from pathlib import Path, PurePosixPath

_GROUPS = Path("/sys/fs/cgroup")
"""Mount point of control groups."""

_OWN_GROUPS = Path("/proc/self/cgroup")
"""Control groups of this process: lines of number:controllers:path."""


def available_cores() -> int:
    """Return the number of cores this process may use, bounded by its CPU quota; at least 1."""
    cores = allowed_cores()
    quota = cpu_quota()
    # Rounded down: threads that wait for each other would wait for the throttled thread.
    return cores if quota is None else max(1, min(cores, int(quota)))


def allowed_cores() -> int:
    """Return the number of cores in the scheduler affinity of this process, ignoring the quota."""
    if hasattr(os, "sched_getaffinity"):  # Linux
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def threads_under_quota(threads: int) -> int:
    """Return `threads`, torch's default that ignores quotas, bounded by the quota."""
    quota = cpu_quota()
    return threads if quota is None else max(1, min(threads, int(quota)))


def threads_per_rank(ranks: int) -> int:
    """Return the cores for each of `ranks` ranks of this machine, at least 1."""
    return max(1, available_cores() // ranks)


@functools.cache
def cpu_quota() -> float | None:
    """Return the CPU quota of this process in cores, or None without a limit.

    The quota is read once, because layers ask for the number of cores in every step.
    """
    quotas = [quota for folder in _group_folders() if (quota := _quota_of(folder)) is not None]
    return min(quotas, default=None)


def _group_folders() -> Iterator[Path]:
    """Yield the folders of this process's groups and their ancestors, whose limits also apply."""
    for mounted, path in [(_GROUPS, "/"), *_mounted_groups()]:
        group = PurePosixPath(path.lstrip("/"))
        # Inside a container the path may be the host's, and only the mount itself is there.
        for part in (group, *group.parents):
            yield mounted / part


def _mounted_groups() -> list[tuple[Path, str]]:
    """Return (mount point, path below the mount point) of each group that can limit CPU time."""
    try:
        lines = _OWN_GROUPS.read_text().splitlines()
    except OSError:
        lines = []
    groups = [(_GROUPS / "cpu", "/"), (_GROUPS / "cpu,cpuacct", "/")]
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if not controllers:  # version 2 has one hierarchy for all
            groups += [(_GROUPS, path), (_GROUPS / "unified", path)]
        elif "cpu" in controllers.split(","):
            groups += [(_GROUPS / "cpu", path), (_GROUPS / controllers, path)]
    return groups


def _quota_of(folder: Path) -> float | None:
    """Return the quota in a group's files, in cores; None if there is no quota or no file."""
    for files in (("cpu.max",), ("cpu.cfs_quota_us", "cpu.cfs_period_us")):
        try:
            words = [word for file in files for word in (folder / file).read_text().split()]
            quota, period = map(int, words)  # "max" of version 2 is no number
        except (OSError, ValueError):
            continue
        if quota > 0 and period > 0:  # version 1 says -1 where there is no limit
            return quota / period
    return None
