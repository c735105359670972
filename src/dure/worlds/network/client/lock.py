"""A file that one process at a time holds, until it lets go or ends."""

from __future__ import annotations

import fcntl
import os
from contextlib import suppress
from pathlib import Path

_HELD: set[int] = set()
"""Descriptors of this process's locks."""


def lock(path: Path) -> int:
    """The file, opened to be read and written, and held; it is made where it is missing.

    Raises BlockingIOError if another process, or this one, holds it, and OSError if it cannot be
    opened.
    """
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o600)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(descriptor)
        raise
    except OSError:
        # The file system knows no locks: nobody else could hold it.
        pass
    _HELD.add(descriptor)
    return descriptor


def unlock(descriptor: int) -> bool:
    """Closes it, so that others may hold the file. False if this process does not hold it."""
    if descriptor not in _HELD:
        return False
    _HELD.remove(descriptor)
    # Said, and not by closing alone: a child that was just forked may have it open too.
    with suppress(OSError):
        fcntl.flock(descriptor, fcntl.LOCK_UN)
    os.close(descriptor)
    return True


def _let_go() -> None:
    # A lock lasts until all have closed it, and a child may live longer than its parent.
    while _HELD:
        os.close(_HELD.pop())


os.register_at_fork(after_in_child=_let_go)
