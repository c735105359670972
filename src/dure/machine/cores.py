"""The cores of this computer, and how many of them a rank may use.

A container's limit of CPU time is a quota of its control group (cgroup): so much time in each
period, on whichever cores. Neither the number of cores nor a process's affinity shows it, and who
starts a thread for each core of the host is stopped again and again in the middle of a step.

Source: the Linux kernel's "Control Group v2" (cpu.max) and "CFS Bandwidth Control" (version 1:
cpu.cfs_quota_us and cpu.cfs_period_us).
"""

from __future__ import annotations

import functools
import os
from collections.abc import Iterator
from pathlib import Path, PurePosixPath

_GROUPS = Path("/sys/fs/cgroup")
"""Where control groups are mounted."""

_OWN_GROUPS = Path("/proc/self/cgroup")
"""Which of them this process is in: lines of number:controllers:path."""


def available_cores() -> int:
    """The cores that this process may run on, bounded by its quota of CPU time; at least one."""
    cores = allowed_cores()
    quota = cpu_quota()
    # Rounded down: threads that wait for each other wait for the one that is stopped.
    return cores if quota is None else max(1, min(cores, int(quota)))


def allowed_cores() -> int:
    """The cores that the scheduler may put this process on, whatever its quota is."""
    if hasattr(os, "sched_getaffinity"):  # Linux
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def threads_under_quota(threads: int) -> int:
    """As many threads as torch has by itself, which knows of no quota, or as the quota allows."""
    quota = cpu_quota()
    return threads if quota is None else max(1, min(threads, int(quota)))


def threads_per_rank(ranks: int) -> int:
    """The cores divided over `ranks` of this machine, at least one each."""
    return max(1, available_cores() // ranks)


@functools.cache
def cpu_quota() -> float | None:
    """Cores' worth of CPU time that this process may use; None where nothing limits it.

    It is read once: layers ask in every step how many cores there are.
    """
    quotas = [quota for folder in _group_folders() if (quota := _quota_of(folder)) is not None]
    return min(quotas, default=None)


def _group_folders() -> Iterator[Path]:
    """Folders of the groups that this process is in: a group's limit holds for those within it."""
    for mounted, path in [(_GROUPS, "/"), *_mounted_groups()]:
        group = PurePosixPath(path.lstrip("/"))
        # Inside a container the path may be the host's, and only the mount itself is there.
        for part in (group, *group.parents):
            yield mounted / part


def _mounted_groups() -> list[tuple[Path, str]]:
    """(where its hierarchy is mounted, path in it) of each group that can limit CPU time."""
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
    """The quota that a group's files set, in cores; None where they set none, or are not there."""
    for files in (("cpu.max",), ("cpu.cfs_quota_us", "cpu.cfs_period_us")):
        try:
            words = [word for file in files for word in (folder / file).read_text().split()]
            quota, period = map(int, words)  # "max" of version 2 is no number
        except (OSError, ValueError):
            continue
        if quota > 0 and period > 0:  # version 1 says -1 where there is no limit
            return quota / period
    return None
