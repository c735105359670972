"""Open files of an untrusted folder without following links out of it.

A folder from elsewhere may contain a link to a file of the reader, a hard link, a pipe on which
reading blocks for ever, or an endless device. Every part of a path below the folder is therefore
opened separately, without following links and without blocking, and the opened file is checked
before a byte is read: a regular file, with a single name, of bounded size.

    opened       a file
    contents     its bytes
    check_file   a file, without opening it
    check_links  a whole folder, before a library opens its files by name

Source: openat(2), O_NOFOLLOW and O_NONBLOCK; SQLite's "How To Corrupt An SQLite Database File",
2.2, for `check_file`.
"""

from __future__ import annotations

import errno
import os
import stat
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from io import BufferedReader
from pathlib import Path

from dure.errors import RunFolderError

MOST = 1 << 28
"""Most bytes of a file that is read as a whole, such as a JSON file: 256 MiB."""

LARGE = 1 << 36
"""Most bytes of a file of tensors, or of a growing file, that is read as a whole: 64 GiB."""

MOST_ENTRIES = 1_000_000
"""Most files of a folder; a run that stores every update has one for each client and round."""

MOST_DEPTH = 16
"""Most levels of nested folders. The folders of a run have four levels."""


# O_NONBLOCK: opening a pipe must not wait for a writer.
_READS = os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK | os.O_NOCTTY


class UnfitFileError(OSError):
    """Raised for a link, a pipe, a device, or a file above the size limit."""

    def __init__(self, reason: str, path: Path) -> None:
        super().__init__(errno.EINVAL, reason, str(path))


def opened(
    path: Path, folder: Path | None = None, most: int | None = None, links: bool = False
) -> BufferedReader:
    """Open a file of a folder for reading.

    Args:
        path: path of the file.
        folder: folder that contains the file, at any depth; by default the parent in `path`. The
            folder itself may be reached by links: the user has named it.
        most: most bytes of the file; None for any size.
        links: follow links, and accept files with several names, as caches of downloaded models
            have them; for a path that the user has named.

    Raises:
        OSError: if the file cannot be opened; `UnfitFileError` if it is no regular file of that
            folder.
    """
    return os.fdopen(descriptor_of(path, folder, most, links), "rb")


def contents(
    path: Path, folder: Path | None = None, most: int = MOST, links: bool = False
) -> bytes:
    """Return the bytes of a file of a folder. Arguments and errors are those of `opened`."""
    with opened(path, folder, most, links) as file:
        content = file.read()
    # The file may have grown since the check.
    if len(content) > most:
        raise _too_long(path, most)
    return content


def descriptor_of(
    path: Path, folder: Path | None = None, most: int | None = None, links: bool = False
) -> int:
    """Open a file of a folder, and return its descriptor. Arguments and errors as in `opened`."""
    if links:
        found = os.open(path, _READS)
    else:
        found = _below(path, path.parent if folder is None else folder)
    try:
        _check(os.fstat(found), path, most, links)
    except BaseException:
        os.close(found)
        raise
    return found


def _below(path: Path, folder: Path) -> int:
    """Open a path below the folder, component by component, and return the descriptor."""
    *folders, name = path.relative_to(folder).parts
    if ".." in (*folders, name):
        raise UnfitFileError("it is outside the folder", path)
    there = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        for each in folders:
            below = _open_at(there, each, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC, path)
            os.close(there)
            there = below
        return _open_at(there, name, _READS, path)
    finally:
        os.close(there)


@contextmanager
def pinned(path: Path, folder: Path | None = None, links: bool = False) -> Iterator[str]:
    """Context manager: return a name of the opened file for libraries that open files by name.

    The name leads to the checked file, even if its path has been replaced since. Arguments and
    errors are those of `opened`.
    """
    descriptor = descriptor_of(path, folder, links=links)
    try:
        name = f"/proc/self/fd/{descriptor}"
        # Without /proc, as on a Mac, the path itself, which was checked a moment ago.
        yield name if os.path.exists(name) else str(path)
    finally:
        os.close(descriptor)


def check_file(path: Path) -> None:
    """Check a file that a library opens by its name, such as a database.

    The file is not opened: a process that closes any descriptor of a database loses the locks that
    SQLite has on it. Raises OSError as `opened` does.
    """
    found = os.lstat(path)
    if stat.S_ISLNK(found.st_mode):
        raise UnfitFileError("it is a link", path)
    _check(found, path, None, links=False)


def check_links(folder: Path) -> None:
    """Check that a folder contains only folders and files of its own.

    Raises RunFolderError with the name of a link, a pipe, a socket, a device, a file with a hard
    link outside the folder, or a file that is nested too deep. Files that vanish meanwhile are
    ignored.
    """
    names: Counter[tuple[int, int]] = Counter()
    several: dict[tuple[int, int], tuple[str, int]] = {}
    for count, (entry, found) in enumerate(_entries(folder, MOST_DEPTH)):
        if count >= MOST_ENTRIES:
            raise RunFolderError(f"{folder} contains more than {MOST_ENTRIES:,} files")
        if stat.S_ISLNK(found.st_mode):
            raise _unfit(entry, "is a link: replace it by its target")
        if stat.S_ISREG(found.st_mode):
            if found.st_nlink > 1:
                key = (found.st_dev, found.st_ino)
                names[key] += 1
                several[key] = (entry, found.st_nlink)
        elif not stat.S_ISDIR(found.st_mode):
            raise _unfit(entry, "is neither a file nor a folder: remove it")
    for key, (entry, links) in several.items():
        # A kill may leave a key with two names, both of them here.
        if names[key] < links:
            raise _unfit(entry, "has a name outside this folder too (a hard link): copy the folder")


def _entries(folder: Path | str, depth: int) -> Iterator[tuple[str, os.stat_result]]:
    """Yield the path and lstat of everything below a folder."""
    with os.scandir(folder) as found:
        entries = list(found)
    for entry in entries:
        try:
            known = entry.stat(follow_symlinks=False)
        except FileNotFoundError:
            continue
        yield entry.path, known
        if stat.S_ISDIR(known.st_mode):
            if not depth:
                raise _unfit(entry.path, "is nested too deep")
            try:
                yield from _entries(entry.path, depth - 1)
            except FileNotFoundError:
                continue


def _open_at(there: int, name: str, flags: int, path: Path) -> int:
    try:
        return os.open(name, flags | os.O_NOFOLLOW, dir_fd=there)
    except OSError as error:
        # ENXIO: a socket.
        if error.errno in (errno.ELOOP, errno.ENXIO) or _is_link(there, name):
            raise UnfitFileError("it is a link, or not a file", path) from error
        raise OSError(error.errno, error.strerror, str(path)) from error


def _is_link(there: int, name: str) -> bool:
    try:
        return stat.S_ISLNK(os.stat(name, dir_fd=there, follow_symlinks=False).st_mode)
    except OSError:
        return False


def _check(found: os.stat_result, path: Path, most: int | None, links: bool) -> None:
    if stat.S_ISDIR(found.st_mode):
        raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), str(path))
    if not stat.S_ISREG(found.st_mode):
        raise UnfitFileError("it is not a regular file", path)
    if found.st_nlink > 1 and not links:
        raise UnfitFileError("it has a hard link", path)
    if most is not None and found.st_size > most:
        raise _too_long(path, most)


def _too_long(path: Path, most: int) -> UnfitFileError:
    return UnfitFileError(f"it has more than {most:,} bytes", path)


def _unfit(entry: str, reason: str) -> RunFolderError:
    return RunFolderError(f"{entry} {reason}")
