"""Copy a run folder, even while a server writes to it.

A folder is data: a link in it may point to any file of this machine, and a copy would disclose that
file. A folder with links is therefore refused (`check_links`), and each file is opened below the
run's folder without following links (`opened`).

The copy is compared with checksums and digests before it counts: its checkpoint, config.json, the
rows of the journal, and each update that the journal names. The check reads the copy once more.
"""

from __future__ import annotations

import os
import shutil
import sqlite3
import stat
from contextlib import closing, suppress
from pathlib import Path

from dure.deploy.journal import events_in
from dure.deploy.server.model_digests import FILE as MODELS
from dure.deploy.server.model_digests import ModelDigests
from dure.deploy.updates import Updates
from dure.errors import DamagedUpdateError, RunFolderError
from dure.record.checkpoint_files import newest
from dure.record.disk import disk_errors
from dure.record.run_files import check_run, read_config
from dure.record.untrusted_files import UnfitFileError, check_file, opened
from dure.wire.requests import UploadRequest, from_json

ATTEMPTS = 20
"""Attempts to copy, each repeated if a checkpoint was written meanwhile."""

_DATABASES = ("journal.db", "clients.db")
"""Databases that SQLite itself copies, because part of their content is in their logs."""

_LEFT = ("journal.lock", "status.token")


def backup(folder: str | Path, to: str | Path) -> Path:
    """Copy the run in `folder` to a new folder; a server may use the run meanwhile.

    The copy can be resumed like the run itself at this moment. Returns the new folder.

    Raises RunFolderError if `folder` has no run, `to` is not empty or is inside the run's folder,
    the folder has a link in the place of a file, or a file of the run is damaged. Raises
    RunFolderWriteError if the copy cannot be written. After an error the copy is deleted, so that
    it cannot pass for a complete one.
    """
    source = Path(folder)
    target = Path(to)
    check_run(source)
    if target.exists() and (not target.is_dir() or any(target.iterdir())):
        raise RunFolderError(f"{target} is not empty: choose another folder")
    if target.resolve().is_relative_to(source.resolve()):
        raise RunFolderError(
            f"{target} is inside {source}, the folder to copy: choose another folder"
        )
    with disk_errors(target):
        rights = stat.S_IMODE(source.stat().st_mode)
        target.mkdir(mode=rights, parents=True, exist_ok=True)
        if stat.S_IMODE(target.stat().st_mode) & ~rights:
            target.chmod(rights)
    try:
        with disk_errors(target):
            return _copied(source, target)
    except BaseException:
        with suppress(OSError):
            _empty(target)
        raise


def _copied(source: Path, target: Path) -> Path:
    """Copy until no checkpoint was written during the copy."""
    for _ in range(ATTEMPTS):
        before = _newest(source)
        try:
            _copy(source, target)
        except UnfitFileError as error:
            raise RunFolderError(f"cannot copy {error.filename}: {error.strerror}") from error
        # Obsolete files are deleted after a checkpoint; without a new checkpoint none was deleted.
        if _newest(source) == before:
            _check(target)
            return target
        _empty(target)
    raise RunFolderError(
        f"the run in {source} writes checkpoints faster than they can be copied to {target}"
    )


def _copy(source: Path, target: Path) -> None:
    """Copy every file, the checkpoint first: the journal may be newer than it, and never older."""
    _copy_tree(source, target, "checkpoint")
    for name in _DATABASES:
        if (source / name).exists():
            _copy_database(source / name, target / name)
    for folder in ("updates", "once"):
        _copy_tree(source, target, folder)
    for file in source.iterdir():
        if file.name.startswith(_DATABASES) or file.name in _LEFT:
            continue
        if not file.is_dir() and not file.name.startswith("."):
            _copy_file(source, target, Path(file.name))


def _copy_database(source: Path, target: Path) -> None:
    """Copy a database. Raises RunFolderError if it cannot be read."""
    check_file(source)
    # Created with mode 0600: the names of clients must never be readable for other users.
    os.close(os.open(target, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600))
    try:
        with closing(sqlite3.connect(source)) as there, closing(sqlite3.connect(target)) as copy:
            # All pages in one step: otherwise every write of the server would restart the copy.
            there.backup(copy)
    except sqlite3.Error as error:
        raise RunFolderError(f"cannot copy {source} to {target}: {error}") from error


def _copy_tree(source: Path, target: Path, folder: str) -> None:
    """Copy a folder of the run, without unfinished files and files that were just deleted."""
    for directory, _, names in os.walk(source / folder):
        place = Path(directory).relative_to(source)
        (target / place).mkdir(mode=stat.S_IMODE(os.stat(directory).st_mode), exist_ok=True)
        for name in names:
            if not name.startswith(".") and not name.endswith((".part", ".parts")):
                _copy_file(source, target, place / name)


def _copy_file(source: Path, target: Path, file: Path) -> None:
    """Copy a file of the run with its times and mode, unless it has just been deleted.

    Raises UnfitFileError for a link.
    """
    with suppress(FileNotFoundError), opened(source / file, source) as there:
        known = os.fstat(there.fileno())
        rights = stat.S_IMODE(known.st_mode)
        descriptor = os.open(target / file, os.O_WRONLY | os.O_CREAT | os.O_EXCL, rights & 0o700)
        with open(descriptor, "wb") as copy:
            shutil.copyfileobj(there, copy, 1 << 20)
            copy.flush()
            os.fchmod(copy.fileno(), rights)
            os.utime(copy.fileno(), ns=(known.st_atime_ns, known.st_mtime_ns))


def _check(copy: Path) -> None:
    """Compare the files of a copy with their recorded digests. Raises RunFolderError."""
    config = read_config(copy)
    _check_checkpoint(copy / "checkpoint")
    ModelDigests(copy / MODELS, writes=False)
    if not (copy / "journal.db").exists():
        return
    updates = Updates(copy / "updates")
    # Without recording, a checkpoint may have made an update obsolete, and its file deleted.
    recorded = bool(config.get("world", {}).get("record"))
    for event in events_in(copy):
        if event.kind != "update":
            continue
        said = from_json(event.body, UploadRequest)
        there = (copy / "updates" / f"{event.ticket}.safetensors").exists()
        if said.failure is None and (there or (recorded and said.bytes)):
            try:
                updates.check(event.ticket, said.digest)
            except DamagedUpdateError as error:
                raise DamagedUpdateError(
                    f"{error}: the file is an update of client {event.client}; the run is "
                    "damaged, so the copy was removed: restore the file from an earlier copy"
                ) from error


def _check_checkpoint(folder: Path) -> None:
    found = newest(folder)
    if found is not None and found.seal is None:
        # Without checksums, damage shows only when the tensors are read. This imports torch.
        from dure.record.checkpoint import stored

        stored(folder)


def _newest(folder: Path) -> list[str]:
    """Return the names of the checkpoints in the folder, sorted."""
    checkpoints = folder / "checkpoint"
    return sorted(os.listdir(checkpoints)) if checkpoints.is_dir() else []


def _empty(folder: Path) -> None:
    for path in folder.iterdir():
        if path.is_dir():
            shutil.rmtree(path)
        else:
            path.unlink()
