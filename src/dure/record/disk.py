"""Files that survive a kill, a full disk and a power failure.

The order is: the content, then the folder that names it, then what refers to it. An error of the
disk says which file could not be written.
"""

from __future__ import annotations

import errno
import os
import stat
import time
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from pathlib import Path

from dure.errors import RunFolderWriteError
from dure.record.seal import checksum

MOMENT = 2.0
"""Seconds for which a disk may be full before the run fails."""

_NO_SYNC = (errno.EINVAL, errno.ENOTSUP, errno.EBADF)
"""What file systems answer that cannot sync a folder; then there is nothing better to do."""


Piece = bytes | memoryview
"""Bytes that are next to each other in a file."""


def write_atomically(path: Path, content: bytes | Iterable[Piece]) -> None:
    """Writes a file so that a reader sees the old content or the new one, even across a kill.

    content: the file, or its pieces, of which each is written before the next one is asked for.

    Raises RunFolderWriteError, and leaves the old content, if it cannot be written.
    """
    # The number of the process: two that write the same file do not write into each other's.
    beside = path.with_name(f".{path.name}.{os.getpid()}")
    with told(path):
        try:
            write_synced(beside, content)
            os.replace(beside, path)
        except OSError:
            # On a full disk, what was written of it takes room that others need.
            with suppress(OSError):
                beside.unlink()
            raise
        sync_folder(path.parent)


def write_synced(path: Path, content: bytes | Iterable[Piece]) -> None:
    """Writes a file whose content is on the disk when this returns. Raises OSError.

    content: as for `write_atomically`.
    """
    with open(path, "wb", opener=opened_itself) as file:
        for piece in (content,) if isinstance(content, bytes) else content:
            file.write(piece)
        file.flush()
        # Else the name could be on the disk before the content, when the power fails.
        os.fsync(file.fileno())


def cut(path: Path, length: int) -> None:
    """Removes what a file holds after so many bytes. Raises RunFolderWriteError."""
    with told(path), open(path, "r+b", opener=opened_itself) as file:
        file.truncate(length)


def opened_itself(path: str, flags: int) -> int:
    """Open a file for writing, with the rights of its folder: an opener for `open`.

    Who may not look into a folder may not read what is written there, whatever the umask is. A
    folder that somebody sent may have a link, a pipe, or another name of a file of the user's in
    its place: nothing is written to those. Raises OSError.
    """
    rights = 0o666 & os.stat(os.path.dirname(path) or ".").st_mode
    writes = os.O_NOFOLLOW | os.O_NONBLOCK
    descriptor = os.open(path, flags & ~os.O_TRUNC | writes, rights)
    try:
        found = os.fstat(descriptor)
        if not stat.S_ISREG(found.st_mode) or found.st_nlink > 1:
            reason = "it is no regular file, or has another name too (a hard link)"
            raise OSError(errno.EINVAL, reason, path)
        if flags & os.O_TRUNC:
            os.ftruncate(descriptor, 0)
    except BaseException:
        os.close(descriptor)
        raise
    return descriptor


def make_folder(path: Path) -> None:
    """Make a folder with the rights of the one in which it lies, unless it is there.

    Raises OSError.
    """
    try:
        path.mkdir(0o777 & path.parent.stat().st_mode)
    except FileExistsError:
        if not path.is_dir():
            raise


def make_private(folder: Path) -> None:
    """Make a folder, or all that is in one, its owner's alone, whatever the umask is.

    What is written into it later is private too (`opened_itself`). Private keys and tokens stay as
    they are: one that others could read is refused where it is read. Raises RunFolderWriteError.
    """
    with told(folder):
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        if stat.S_IMODE(folder.stat().st_mode) & 0o077:
            folder.chmod(0o700)
        for directory, folders, files in os.walk(folder):
            for name in (*folders, *filter(_is_no_secret, files)):
                _take_away(os.path.join(directory, name))


def _is_no_secret(name: str) -> bool:
    return not name.endswith((".key", ".pem", ".token"))


def _take_away(path: str) -> None:
    """Take the rights of everybody but the owner away from a file or folder, if it is there."""
    with suppress(FileNotFoundError):
        found = os.lstat(path)
        mode = stat.S_IMODE(found.st_mode)
        # Of a link, the rights of what it leads to would change.
        if not stat.S_ISLNK(found.st_mode) and mode & 0o077:
            os.chmod(path, mode & 0o700)


def sync_folder(path: Path) -> None:
    """The names in a folder are on the disk when this returns, where the file system can do that.

    Raises RunFolderWriteError where the disk fails.
    """
    with told(path):
        try:
            descriptor = os.open(path, os.O_RDONLY)
        except PermissionError:
            # A folder of somebody else's, say, that may be passed through and not read.
            return
        try:
            os.fsync(descriptor)
        except OSError as error:
            if error.errno not in _NO_SYNC:
                raise
        finally:
            os.close(descriptor)


@contextmanager
def told(path: Path) -> Iterator[None]:
    """An error of the disk is told with the name of the file, and so of its folder."""
    try:
        yield
    except OSError as error:
        reason = error.strerror or str(error)
        raise RunFolderWriteError(f"cannot write {path}: {reason}") from error


def patiently(write: Callable[[], object]) -> None:
    """Does `write` again while the disk does not take it, for `MOMENT` seconds."""
    until = time.monotonic() + MOMENT
    while True:
        try:
            write()
            return
        except RunFolderWriteError:
            if time.monotonic() > until:
                raise
        time.sleep(0.02)


class Lines:
    """A file that grows by whole lines.

    length, checksum: of what it holds, up to the last line that is whole. What a kill cut off at
    its end is removed when it is opened.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._rest = b""
        """Not written yet."""
        self._uncounted = b""
        """Not in `length` and `checksum` yet: `_rest`, and what was written before it."""
        with told(path):
            # Unbuffered, one write a call: a kill cuts off no more than the end.
            self._file = open(path, "ab", buffering=0, opener=opened_itself)  # noqa: SIM115, see close()
            content = path.read_bytes()
            self.length = content.rfind(b"\n") + 1
            self.checksum = checksum(content[: self.length])
            self._cut()

    def add(self, lines: bytes) -> None:
        """Writes them, after what the disk did not take before.

        Raises RunFolderWriteError where it does not take all of them; the rest is written by the
        next call, which may be one without lines.
        """
        self._rest += lines
        self._uncounted += lines
        with told(self.path):
            while self._rest:
                # On a disk that is almost full, a write takes a part, and the next one raises.
                self._rest = self._rest[os.write(self._file.fileno(), self._rest) :]
        self.length += len(self._uncounted)
        self.checksum = checksum(self._uncounted, self.checksum)
        self._uncounted = b""

    def sync(self) -> None:
        """What was added is on the disk when this returns."""
        with told(self.path):
            os.fsync(self._file.fileno())

    def close(self) -> None:
        """No more lines come from here; of one that was written in part, nothing is left."""
        with suppress(OSError):
            self._cut()
        self._file.close()

    def _cut(self) -> None:
        if os.fstat(self._file.fileno()).st_size > self.length:
            os.ftruncate(self._file.fileno(), self.length)


class Summed:
    """The pieces of a file on their way to the disk, and their checksum.

    checksum: of the pieces that were taken. It is counted while the disk has the piece.
    """

    def __init__(self, pieces: Iterable[Piece]) -> None:
        self.checksum = checksum(b"")
        self._pieces = pieces

    def __iter__(self) -> Iterator[Piece]:
        with ThreadPoolExecutor(1) as pool:
            for piece in self._pieces:
                # Counting releases the interpreter, as writing does; a thread costs time too.
                if len(piece) < _WORTH:
                    self.checksum = checksum(piece, self.checksum)
                    yield piece
                else:
                    counted = pool.submit(checksum, piece, self.checksum)
                    yield piece
                    self.checksum = counted.result()


_WORTH = 1 << 20
"""Bytes whose checksum is worth a thread's time."""
