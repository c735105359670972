"""Which processes live below another one, and their end."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
from pathlib import Path
from typing import Any


def descendants(of: int) -> set[int]:
    """Pids of the living processes below `of`; zombies do not count."""
    parents: dict[int, int] = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                state, parent = (entry / "stat").read_text().rpartition(")")[2].split()[:2]
            except OSError:
                continue
            if state != "Z":
                parents[int(entry.name)] = int(parent)
    found: set[int] = set()
    frontier = {of}
    while frontier:
        frontier = {pid for pid, parent in parents.items() if parent in frontier}
        found |= frontier
    return found


def has_children(pid: int) -> bool:
    """Whether a process of one thread has children, living or zombies; also where nobody knows."""
    tasks = Path(f"/proc/{pid}/task/{pid}")
    try:
        return (tasks / "children").read_text() != ""
    except OSError:  # the process is gone, or the kernel was built without these files
        return tasks.exists()


def end_family(process: subprocess.Popen[Any]) -> None:
    """Kills the process and all below it; some of them may be ending by themselves in this
    moment."""
    family = descendants(process.pid)
    process.kill()
    process.wait()
    for pid in family:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
