"""A memory limit that the system enforces: processes that enter it are killed if they need more.

Memory that a process had before it entered does not count, so that a limit is about what comes.
"""

from __future__ import annotations

import os
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

_V1 = Path("/sys/fs/cgroup/memory")
_V2 = Path("/sys/fs/cgroup")


def can_limit() -> bool:
    """Whether this process may make limits: it takes root, and cgroups."""
    try:
        with limit(1 << 30):
            return True
    except OSError:
        return False


@contextmanager
def limit(nbytes: int) -> Iterator[Path]:
    """A limit that processes enter by `enter`, each for itself."""
    is_v1 = (_V1 / "memory.limit_in_bytes").exists()
    folder = (_V1 if is_v1 else _V2) / f"dure-{nbytes}-{uuid.uuid4().hex[:8]}"
    folder.mkdir()
    try:
        if not is_v1:
            (folder / "cgroup.subtree_control").write_text("+memory")
        yield folder
    finally:
        for own in folder.iterdir():
            if own.is_dir():
                own.rmdir()
        folder.rmdir()


def enter(folder: Path) -> None:
    """From here on this process has a part of this limit of its own."""
    own = folder / str(os.getpid())
    # A factory is called several times in a process.
    if own.exists():
        return
    own.mkdir()
    nbytes = folder.name.split("-")[1]
    names = ("memory.limit_in_bytes", "memory.max")
    next(own / name for name in names if (own / name).exists()).write_text(nbytes)
    (own / "cgroup.procs").write_text(str(os.getpid()))
