"""One process at a time: a lock that the kernel takes back however its holder ends."""

from __future__ import annotations

import fcntl
import os
import time
from pathlib import Path

from dure.errors import RunFolderError

MOMENT = 2.0
"""Seconds in which the processes of one that was killed have noticed it."""


class Lock:
    """Keeps other processes of this machine off, from `take` until `release` or the end of this."""

    def __init__(self, descriptor: int) -> None:
        self._descriptor: int | None = descriptor

    @classmethod
    def take(cls, path: Path, others: str) -> Lock:
        """Locks a file, which is made where there is none, or a folder, which is there.

        Raises RunFolderError with the text `others` if another process still has it after `MOMENT`.
        Where the file system has no locks, nobody is kept off.
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
        """Lets others in. May be called again."""
        descriptor = self._descriptor
        self._descriptor = None
        # In a child that was forked, the number may be another file's by now.
        if descriptor in _HELD:
            # Out of the set before it is closed: its number may be another file's right after.
            _HELD.discard(descriptor)
            os.close(descriptor)


def is_held(path: Path) -> bool:
    """Whether somebody has what is locked at `path`, a folder or a file that is there."""
    try:
        # A pipe in its place must not be waited for.
        descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
    except OSError:
        return False
    try:
        # Shared, and given back at once: whoever takes it meanwhile tries for a moment.
        fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    except OSError:
        return False
    finally:
        os.close(descriptor)
    return False


_HELD: set[int] = set()
"""Descriptors that this process holds.

A child that is forked closes them: it may live longer.
"""


def _locked(descriptor: int) -> bool:
    """Whether what is open there is now this process's, or can be nobody's."""
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    # Somebody else has it. Any other error: the file system knows no locks.
    except BlockingIOError:
        return False
    except OSError:
        return True
    return True


def _let_go() -> None:
    # A lock belongs to the open file, which a forked child shares: it lasts until both close it.
    while _HELD:
        os.close(_HELD.pop())


os.register_at_fork(after_in_child=_let_go)
