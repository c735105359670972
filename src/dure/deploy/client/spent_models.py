"""Spent models: models whose secure sum a client has helped to unmask; an append-only file.

    spent-models    records of 36 bytes: 32 of the model's digest, CRC-32 of these

The client syncs a record to the disk before it helps (`add`). A kill can therefore leave a record
without a sum, but never a sum without a record. A partial record is cut off when the file is opened
next: the client has not helped with its sum.

The file belongs to the client's key, not to a run: removing a run keeps the file. No quota counts
the file: 100,000 rounds take 3.6 MB of storage, and some 10 MB of memory.
"""

from __future__ import annotations

import os
import zlib
from pathlib import Path

from dure.errors import StateError
from dure.record.disk import disk_errors, sync_folder, truncate_file

SPENT = "spent-models"
"""Name of the file."""

DIGEST = 32
RECORD = DIGEST + 4


class SpentModelsFile:
    """Set of spent models in `folder`.

    `fewest` is the least number of models that the file must have.

    Raises StateError for a damaged file, and for a file with fewer models, which is an older copy.
    """

    def __init__(self, folder: Path, fewest: int) -> None:
        self._path = folder / SPENT
        self._models = self._read()
        if len(self._models) < fewest:
            raise StateError(
                f"{self._path} lists {len(self._models)} models, but this client has helped to "
                f"unmask sums of {fewest}: the list is an older copy. With an older list a server "
                "could get one client's update: join with a new key, in an empty folder"
            )

    def __len__(self) -> int:
        return len(self._models)

    def __contains__(self, model: bytes) -> bool:
        return model in self._models

    def add(self, model: bytes) -> None:
        """Add the model and sync the file to the disk.

        Raises RunFolderWriteError if the file cannot be written.
        """
        if model in self._models:
            return
        new = not self._path.exists()
        whole = RECORD * len(self._models)
        with disk_errors(self._path):
            flags = os.O_WRONLY | os.O_CREAT | os.O_NOFOLLOW
            descriptor = os.open(self._path, flags, 0o600)
            try:
                # Written at its offset, over a record that a full disk has cut off.
                os.pwrite(descriptor, _record(model), whole)
                os.fsync(descriptor)
            finally:
                os.close(descriptor)
        if new:
            sync_folder(self._path.parent)
        self._models.add(model)

    def _read(self) -> set[bytes]:
        try:
            content = self._path.read_bytes()
        except FileNotFoundError:
            return set()
        except OSError as error:
            raise StateError(f"cannot read {self._path}: {error.strerror}") from error
        records = [content[at : at + RECORD] for at in range(0, len(content), RECORD)]
        # The last record may be partial after a kill or a power failure.
        if records and not _is_whole(records[-1]):
            records.pop()
            truncate_file(self._path, RECORD * len(records))
        damaged = next((at for at, one in enumerate(records) if not _is_whole(one)), None)
        if damaged is not None:
            raise StateError(
                f"{self._path} is damaged in record {damaged + 1}: with a shorter list a server "
                f"could get one client's update: join with a new key, in an empty folder"
            )
        return {one[:DIGEST] for one in records}


def _record(model: bytes) -> bytes:
    assert len(model) == DIGEST
    return model + zlib.crc32(model).to_bytes(4, "little")


def _is_whole(record: bytes) -> bool:
    return len(record) == RECORD and record == _record(record[:DIGEST])
