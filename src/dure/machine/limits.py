"""How much memory this process, and its neighbours, may still have, and who says so.

    RLIMIT_AS, RLIMIT_DATA    limits of each process: what it may address, and what it may write
    control groups            of all processes in one: a container, a job of a scheduler
    the machine               what is available, and what swap is free

Pages of files make way, so they are free memory here: also those of mapped files. A group lies in
others, whose limits hold as well. Both versions of control groups are read.

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


class Room(NamedTuple):
    """What one limit leaves.

    nbytes: that may still be had. swap: that may be had beyond that, at the price of swapping.
    whose: the limit, for people. shared: whether all processes here have it together. addressed:
    whether it counts what is addressed, and not what is in memory. kills: whether a process that
    asks for more is killed, and hears nothing.
    """

    nbytes: int
    swap: int
    whose: str
    shared: bool
    addressed: bool = False
    kills: bool = False

    @property
    def most(self) -> int:
        """Bytes that may be had at all."""
        return self.nbytes + self.swap


def rooms() -> list[Room]:
    """What every limit here leaves; nothing where nobody says."""
    swap = _meminfo().get("SwapFree", 0)
    return [*_of_process(), *_of_groups(swap), *_of_machine(swap)]


def _of_process() -> Iterator[Room]:
    """What the limits of this process leave, with what it has now."""
    with suppress(OSError, ValueError, IndexError):
        sizes = [int(pages) * mmap.PAGESIZE for pages in (_PROC / "self/statm").read_text().split()]
        own = (
            (resource.RLIMIT_AS, "RLIMIT_AS of this process (ulimit -v)", sizes[0], True),
            (resource.RLIMIT_DATA, "RLIMIT_DATA of this process (ulimit -d)", sizes[5], False),
        )
        for kind, whose, used, addressed in own:
            limit, _ = resource.getrlimit(kind)
            if limit != resource.RLIM_INFINITY:
                yield Room(max(0, limit - used), 0, whose, shared=False, addressed=addressed)


def _of_machine(swap: int) -> Iterator[Room]:
    available = _meminfo().get("MemAvailable")
    if available is not None:
        yield Room(available, swap, "the memory that is free on this machine", shared=True)


def _meminfo() -> dict[str, int]:
    """The machine's memory in bytes; nothing where the system does not say."""
    found: dict[str, int] = {}
    with suppress(OSError, ValueError, IndexError):
        for line in (_PROC / "meminfo").read_text().splitlines():
            name, _, rest = line.partition(":")
            if rest.endswith("kB"):
                found[name] = int(rest.split()[0]) * 1024
    return found


def _of_groups(swap: int) -> Iterator[Room]:
    """What each control group leaves, of those that this process is in."""
    with suppress(OSError, ValueError):
        for line in (_PROC / "self/cgroup").read_text().splitlines():
            number, kinds, path = line.split(":", 2)
            if "memory" in kinds.split(","):
                yield from _up(_GROUPS / "memory", path, _FIRST, swap)
            elif number == "0":
                yield from _up(_GROUPS, path, _SECOND, swap)


class _Files(NamedTuple):
    """What the files of a group are called. both: the limit of memory and swap together, or of
    swap alone."""

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
"""What version 1 says where there is none, is more."""


def _up(mount: Path, path: str, files: _Files, swap: int) -> Iterator[Room]:
    """The rooms of a group and of those that it lies in."""
    # In a container the group's path may be that outside of it, and the mount the group itself.
    place = mount / path.lstrip("/")
    place = place if place.is_dir() else mount
    for group in (place, *place.parents):
        if not group.is_relative_to(mount):
            return
        room = _of_group(group, files, swap)
        if room is not None:
            yield room


def _of_group(group: Path, files: _Files, swap: int) -> Room | None:
    limit = _number(group / files.limit)
    used = _number(group / files.used)
    if limit is None or used is None:
        return None
    free = max(0, limit - used + _reclaimable(group, files.prefix))
    swap_limit = _number(group / files.swap_limit)
    swap_used = _number(group / files.swap_used) or 0
    if swap_limit is not None:
        left = max(0, swap_limit - swap_used)
        # Together they leave less for swap by what memory may still have.
        swap = min(swap, max(0, left - (limit - used)) if files.both else left)
    whose = f"the memory limit of the control group {group}"
    return Room(free, swap, whose, shared=True, kills=True)


def _number(file: Path) -> int | None:
    """The number in a file; None where there is no file, or no limit."""
    try:
        text = file.read_text().strip()
    except OSError:
        return None
    number = int(text) if text.isdecimal() else _NO_LIMIT
    return None if number >= _NO_LIMIT else number


def _reclaimable(group: Path, prefix: str) -> int:
    """Bytes of a group that are pages of files."""
    try:
        lines = (group / "memory.stat").read_text().splitlines()
    except OSError:
        return 0
    stat: Mapping[str, int] = {
        name: int(value) for name, _, value in (line.partition(" ") for line in lines)
    }
    return sum(stat.get(f"{prefix}{kind}_file", 0) for kind in ("active", "inactive"))
