"""Files that survive a kill, a full disk and a power failure.

The order of writing is: the content, then the folder with its name, then files that refer to it.
An error of the disk includes the name of the file.
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
"""Errors of file systems that cannot sync a folder, which are ignored."""


Piece = bytes | memoryview
"""Consecutive bytes of a file."""


def write_atomically(path: Path, content: bytes | Iterable[Piece]) -> None:
    """Write a file so that a reader sees the old content or the new, even after a kill.

    content: the file, or its pieces; each piece is written before the next is requested. Raises
    RunFolderWriteError, and leaves the old content, if the file cannot be written.
    """
    # The process id: two processes that write the same file must not mix their content.
    beside = path.with_name(f".{path.name}.{os.getpid()}")
    with disk_errors(path):
        try:
            write_synced(beside, content)
            os.replace(beside, path)
        except OSError:
            # On a full disk, the incomplete file would take room that others need.
            with suppress(OSError):
                beside.unlink()
            raise
        sync_folder(path.parent)


def write_synced(path: Path, content: bytes | Iterable[Piece]) -> None:
    """Write a file and sync it to the disk. Raises OSError.

    content: as for `write_atomically`.
    """
    with open(path, "wb", opener=open_regular_file) as file:
        for piece in (content,) if isinstance(content, bytes) else content:
            file.write(piece)
        file.flush()
        # Otherwise the name could be on the disk before the content when the power fails.
        os.fsync(file.fileno())


def truncate_file(path: Path, length: int) -> None:
    """Truncate a file to `length` bytes. Raises RunFolderWriteError."""
    with disk_errors(path), open(path, "r+b", opener=open_regular_file) as file:
        file.truncate(length)


def open_regular_file(path: str, flags: int) -> int:
    """Open a file for writing, with the permissions of its folder: an opener for `open`.

    A user without access to a folder must not be able to read files written there, whatever the
    umask. A folder from elsewhere may have a link, a pipe, or a hard link to a file of the user in
    place of the file: writing to them is refused. Raises OSError.
    """
    rights = 0o666 & os.stat(os.path.dirname(path) or ".").st_mode
    writes = os.O_NOFOLLOW | os.O_NONBLOCK
    descriptor = os.open(path, flags & ~os.O_TRUNC | writes, rights)
    try:
        found = os.fstat(descriptor)
        if not stat.S_ISREG(found.st_mode) or found.st_nlink > 1:
            reason = "it is not a regular file, or has a hard link"
            raise OSError(errno.EINVAL, reason, path)
        if flags & os.O_TRUNC:
            os.ftruncate(descriptor, 0)
    except BaseException:
        os.close(descriptor)
        raise
    return descriptor


def make_folder(path: Path) -> None:
    """Make a folder with the permissions of its parent, unless it exists.

    Raises OSError.
    """
    try:
        path.mkdir(0o777 & path.parent.stat().st_mode)
    except FileExistsError:
        if not path.is_dir():
            raise


def make_private(folder: Path) -> None:
    """Make a folder and its content accessible to the owner alone, whatever the umask.

    Files written into it later are private too (`open_regular_file`). Private keys and tokens stay
    unchanged: a key that others could read is refused when it is read. Raises RunFolderWriteError.
    """
    with disk_errors(folder):
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        if stat.S_IMODE(folder.stat().st_mode) & 0o077:
            folder.chmod(0o700)
        for directory, folders, files in os.walk(folder):
            for name in (*folders, *filter(_is_no_secret, files)):
                _take_away(os.path.join(directory, name))


def _is_no_secret(name: str) -> bool:
    return not name.endswith((".key", ".pem", ".token"))


def _take_away(path: str) -> None:
    """Remove all permissions except the owner's from a file or folder, if it exists."""
    with suppress(FileNotFoundError):
        found = os.lstat(path)
        mode = stat.S_IMODE(found.st_mode)
        # chmod of a link would change the permissions of its target.
        if not stat.S_ISLNK(found.st_mode) and mode & 0o077:
            os.chmod(path, mode & 0o700)


def sync_folder(path: Path) -> None:
    """Sync the names in a folder to the disk, if the file system supports it.

    Raises RunFolderWriteError if the disk fails.
    """
    with disk_errors(path):
        try:
            descriptor = os.open(path, os.O_RDONLY)
        except PermissionError:
            # For example another user's folder that may be traversed but not read.
            return
        try:
            os.fsync(descriptor)
        except OSError as error:
            if error.errno not in _NO_SYNC:
                raise
        finally:
            os.close(descriptor)


@contextmanager
def disk_errors(path: Path) -> Iterator[None]:
    """Context manager: turn OSError into RunFolderWriteError with the name of the file."""
    try:
        yield
    except OSError as error:
        reason = error.strerror or str(error)
        raise RunFolderWriteError(f"cannot write {path}: {reason}") from error


def retry_write(write: Callable[[], object]) -> None:
    """Retry `write` for `MOMENT` seconds while the disk rejects it."""
    until = time.monotonic() + MOMENT
    while True:
        try:
            write()
            return
        except RunFolderWriteError:
            if time.monotonic() > until:
                raise
        time.sleep(0.02)


class LineFile:
    """A file that grows by whole lines.

    length, checksum: of the content up to the last complete line. An incomplete line, left by a
    kill, is removed when the file is opened.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._rest = b""
        """Bytes that are not written yet."""
        self._uncounted = b""
        """Bytes not in `length` and `checksum` yet: `_rest`, and written bytes before it."""
        with disk_errors(path):
            # Unbuffered, a write per call: a kill truncates only the last line.
            self._file = open(path, "ab", buffering=0, opener=open_regular_file)  # noqa: SIM115, see close()
            content = path.read_bytes()
            self.length = content.rfind(b"\n") + 1
            self.checksum = checksum(content[: self.length])
            self._cut()

    def add(self, lines: bytes) -> None:
        """Write lines, after the rest of earlier calls.

        Raises RunFolderWriteError if the disk does not take all of them; the next call, possibly
        without lines, writes the rest.
        """
        self._rest += lines
        self._uncounted += lines
        with disk_errors(self.path):
            while self._rest:
                # On a disk that is almost full, a write takes a part, and the next write raises.
                self._rest = self._rest[os.write(self._file.fileno(), self._rest) :]
        self.length += len(self._uncounted)
        self.checksum = checksum(self._uncounted, self.checksum)
        self._uncounted = b""

    def sync(self) -> None:
        """Sync the added lines to the disk."""
        with disk_errors(self.path):
            os.fsync(self._file.fileno())

    def close(self) -> None:
        """Close the file, and remove an incompletely written line."""
        with suppress(OSError):
            self._cut()
        self._file.close()

    def _cut(self) -> None:
        if os.fstat(self._file.fileno()).st_size > self.length:
            os.ftruncate(self._file.fileno(), self.length)


class ChecksummedPieces:
    """The pieces of a file on their way to the disk, and their checksum.

    checksum: of the consumed pieces, computed while the disk writes the piece.
    """

    def __init__(self, pieces: Iterable[Piece]) -> None:
        self.checksum = checksum(b"")
        self._pieces = pieces

    def __iter__(self) -> Iterator[Piece]:
        with ThreadPoolExecutor(1) as pool:
            for piece in self._pieces:
                # zlib releases the interpreter lock, as writing does; but a thread has a cost too.
                if len(piece) < _WORTH:
                    self.checksum = checksum(piece, self.checksum)
                    yield piece
                else:
                    counted = pool.submit(checksum, piece, self.checksum)
                    yield piece
                    self.checksum = counted.result()


_WORTH = 1 << 20
"""Least bytes of a piece whose checksum is computed by a thread."""
