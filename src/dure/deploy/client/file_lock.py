"""Exclusive lock on a file, until the process releases it or ends."""

from __future__ import annotations

import fcntl
import os
from contextlib import suppress
from pathlib import Path

_HELD: set[int] = set()
"""Descriptors of this process's locks."""


def lock(path: Path) -> int:
    """Open a file for reading and writing, create it if missing, and lock it.

    Raises BlockingIOError if this or another process holds the lock, and OSError if the file cannot
    be opened.
    """
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o600)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(descriptor)
        raise
    except OSError:
        # The file system has no locks, so no other process could hold this lock.
        pass
    _HELD.add(descriptor)
    return descriptor


def unlock(descriptor: int) -> bool:
    """Release a lock and close its file. Return False if this process does not hold the lock."""
    if descriptor not in _HELD:
        return False
    _HELD.remove(descriptor)
    # Unlocked explicitly, and not only by closing: a forked child may have the file open too.
    with suppress(OSError):
        fcntl.flock(descriptor, fcntl.LOCK_UN)
    os.close(descriptor)
    return True


def _let_go() -> None:
    # A lock lasts until all processes have closed the file, and a child may outlive its parent.
    while _HELD:
        os.close(_HELD.pop())


os.register_at_fork(after_in_child=_let_go)
