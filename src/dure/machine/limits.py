"""Memory that this process and its neighbours may still allocate, by limit.

    RLIMIT_AS, RLIMIT_DATA    limits of each process: address space, and writable data
    control groups            limits of a group of processes: a container, a job of a scheduler
    the machine               available memory, and free swap

File pages can be reclaimed, so they count as free memory, also pages of mapped files. Groups are
nested, and the limits of enclosing groups apply too. Both versions of control groups are read.

Source: getrlimit(2); proc_meminfo(5), proc_pid_statm(5); Linux's documentation of control groups,
"Memory Resource Controller" (version 1) and "Control Group v2".
"""

from __future__ import annotations

import mmap
import resource
from collections.abc import Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

_GROUPS = Path("/sys/fs/cgroup")
_PROC = Path("/proc")


class RemainingMemory(NamedTuple):
    """Memory that a single limit leaves.

    nbytes: bytes still available. swap: further bytes available by swapping. whose: name of the
    limit, for messages. shared: whether all processes here share the limit. addressed: whether the
    limit counts address space rather than resident memory. kills: whether the system kills a
    process that exceeds the limit, without an error.
    """

    nbytes: int
    swap: int
    whose: str
    shared: bool
    addressed: bool = False
    kills: bool = False

    @property
    def most(self) -> int:
        """Bytes available including swap."""
        return self.nbytes + self.swap


def remaining_memory() -> list[RemainingMemory]:
    """Return the memory that each limit leaves; empty if the system reports nothing."""
    swap = _meminfo().get("SwapFree", 0)
    return [*_of_process(), *_of_groups(swap), *_of_machine(swap)]


def _of_process() -> Iterator[RemainingMemory]:
    """Yield the memory that the limits of this process leave beyond its present use."""
    with suppress(OSError, ValueError, IndexError):
        sizes = [int(pages) * mmap.PAGESIZE for pages in (_PROC / "self/statm").read_text().split()]
        own = (
            (resource.RLIMIT_AS, "RLIMIT_AS of this process (ulimit -v)", sizes[0], True),
            (resource.RLIMIT_DATA, "RLIMIT_DATA of this process (ulimit -d)", sizes[5], False),
        )
        for kind, whose, used, addressed in own:
            limit, _ = resource.getrlimit(kind)
            if limit != resource.RLIM_INFINITY:
                yield RemainingMemory(
                    max(0, limit - used), 0, whose, shared=False, addressed=addressed
                )


def _of_machine(swap: int) -> Iterator[RemainingMemory]:
    available = _meminfo().get("MemAvailable")
    if available is not None:
        yield RemainingMemory(available, swap, "the free memory of this machine", shared=True)


def _meminfo() -> dict[str, int]:
    """Return the machine's memory figures in bytes; empty if the system reports nothing."""
    found: dict[str, int] = {}
    with suppress(OSError, ValueError, IndexError):
        for line in (_PROC / "meminfo").read_text().splitlines():
            name, _, rest = line.partition(":")
            if rest.endswith("kB"):
                found[name] = int(rest.split()[0]) * 1024
    return found


def _of_groups(swap: int) -> Iterator[RemainingMemory]:
    """Yield the memory that each control group of this process leaves."""
    with suppress(OSError, ValueError):
        for line in (_PROC / "self/cgroup").read_text().splitlines():
            number, kinds, path = line.split(":", 2)
            if "memory" in kinds.split(","):
                yield from _up(_GROUPS / "memory", path, _FIRST, swap)
            elif number == "0":
                yield from _up(_GROUPS, path, _SECOND, swap)


class _Files(NamedTuple):
    """Names of the files of a group.

    both: whether the swap limit covers memory and swap together, rather than swap alone.
    """

    limit: str
    used: str
    swap_limit: str
    swap_used: str
    both: bool
    prefix: str


_FIRST = _Files(
    "memory.limit_in_bytes",
    "memory.usage_in_bytes",
    "memory.memsw.limit_in_bytes",
    "memory.memsw.usage_in_bytes",
    both=True,
    prefix="total_",
)
_SECOND = _Files(
    "memory.max",
    "memory.current",
    "memory.swap.max",
    "memory.swap.current",
    both=False,
    prefix="",
)

_NO_LIMIT = 1 << 60
"""Threshold above which a version 1 limit means "no limit"."""


def _up(mount: Path, path: str, files: _Files, swap: int) -> Iterator[RemainingMemory]:
    """Yield the remaining memory of a group and of its enclosing groups."""
    # In a container the path may be the host's path, and the mount point the group itself.
    place = mount / path.lstrip("/")
    place = place if place.is_dir() else mount
    for group in (place, *place.parents):
        if not group.is_relative_to(mount):
            return
        room = _of_group(group, files, swap)
        if room is not None:
            yield room


def _of_group(group: Path, files: _Files, swap: int) -> RemainingMemory | None:
    limit = _number(group / files.limit)
    used = _number(group / files.used)
    if limit is None or used is None:
        return None
    free = max(0, limit - used + _reclaimable(group, files.prefix))
    swap_limit = _number(group / files.swap_limit)
    swap_used = _number(group / files.swap_used) or 0
    if swap_limit is not None:
        left = max(0, swap_limit - swap_used)
        # With a joint limit, the memory that may still be allocated reduces the share of swap.
        swap = min(swap, max(0, left - (limit - used)) if files.both else left)
    whose = f"the memory limit of the control group {group}"
    return RemainingMemory(free, swap, whose, shared=True, kills=True)


def _number(file: Path) -> int | None:
    """Return the number in a file; None without the file or without a limit."""
    try:
        text = file.read_text().strip()
    except OSError:
        return None
    number = int(text) if text.isdecimal() else _NO_LIMIT
    return None if number >= _NO_LIMIT else number


def _reclaimable(group: Path, prefix: str) -> int:
    """Return the bytes of a group that are file pages."""
    try:
        lines = (group / "memory.stat").read_text().splitlines()
    except OSError:
        return 0
    stat: Mapping[str, int] = {
        name: int(value) for name, _, value in (line.partition(" ") for line in lines)
    }
    return sum(stat.get(f"{prefix}{kind}_file", 0) for kind in ("active", "inactive"))
