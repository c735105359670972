"""A lock between processes, which the kernel releases however its owner ends."""

from __future__ import annotations

import fcntl
import os
import time
from pathlib import Path

from dure.errors import RunFolderError

MOMENT = 2.0
"""Seconds that the child processes of a killed process may take to notice its end."""


class Lock:
    """A lock against other processes of this machine, from `take` until `release` or exit."""

    def __init__(self, descriptor: int) -> None:
        self._descriptor: int | None = descriptor

    @classmethod
    def take(cls, path: Path, others: str) -> Lock:
        """Lock a file, which is made if it is missing, or an existing folder.

        Raises RunFolderError with the text `others` if another process still has the lock after
        `MOMENT`. On a file system without locks, other processes are not kept out.
        """
        try:
            flags = os.O_RDONLY if path.is_dir() else os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW
            descriptor = os.open(path, flags, 0o600)
        except OSError as error:
            raise RunFolderError(f"cannot open {path}: {error.strerror}") from error
        until = time.monotonic() + MOMENT
        try:
            while not _locked(descriptor):
                if time.monotonic() > until:
                    raise RunFolderError(others)
                time.sleep(0.01)
        except BaseException:
            os.close(descriptor)
            raise
        _HELD.add(descriptor)
        return cls(descriptor)

    def release(self) -> None:
        """Release the lock. May be called again."""
        descriptor = self._descriptor
        self._descriptor = None
        # In a forked child, the number may be another file's by now.
        if descriptor in _HELD:
            # Removed before the close: the number may be another file's right after.
            _HELD.discard(descriptor)
            os.close(descriptor)


def is_held(path: Path) -> bool:
    """Return whether a process has locked `path`, an existing folder or file."""
    try:
        # A pipe in its place must not block.
        descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
    except OSError:
        return False
    try:
        # Shared, and released at once: a process that takes the lock meanwhile retries briefly.
        fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    except OSError:
        return False
    finally:
        os.close(descriptor)
    return False


_HELD: set[int] = set()
"""Descriptors of the locks of this process.

A forked child closes them, because it may live longer.
"""


def _locked(descriptor: int) -> bool:
    """Try to lock; return whether this process has the lock, or no process can have it."""
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    # Another process has the lock. Any other error: the file system has no locks.
    except BlockingIOError:
        return False
    except OSError:
        return True
    return True


def _let_go() -> None:
    # A lock belongs to the open file, which a forked child shares: both would have to close it.
    while _HELD:
        os.close(_HELD.pop())


os.register_at_fork(after_in_child=_let_go)
