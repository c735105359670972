"""Files of updates: received in parts, read as memory mappings, and deleted after use.

    TICKET.part           received bytes; a part counts once it is checked
    TICKET.parts          index: a line for the announcement, and a line for every part
    TICKET.safetensors    the complete stream, checked and synced: may be acknowledged

Parts are not synced individually. `TICKET.parts` has the digest of each part, against which the
server checks the remains of a kill or a power failure: complete parts count, and the client resumes
after them. Only a complete stream is guaranteed: the file is synced, then renamed, then the folder
is synced.

A complete file is compared with its digest before it is read. A file that this process has received
was hashed on arrival, and is hashed again only if it was replaced or modified since.

Memory: a piece of a part, whatever the size of the part. An update is read as a private mapping of
its file: pages that are not touched take no memory, and writing into its tensors does not change
the file.
"""

from __future__ import annotations

import hashlib
import os
import threading
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, BinaryIO, NamedTuple

import msgspec

from dure.deploy.local_disk import free_bytes
from dure.errors import DamagedUpdateError, RunFolderError, RunFolderWriteError
from dure.record.disk import disk_errors, sync_folder
from dure.record.seal import sha256_of
from dure.record.untrusted_files import contents, descriptor_of, opened

if TYPE_CHECKING:
    from torch import Tensor

    from dure.wire.tensors import TensorSpec

KEPT_FREE = 64 << 20
"""Bytes of the disk reserved for the journal and the log of the run."""

_CHUNK = 1 << 20
"""Bytes per read of a whole file."""

_ENDINGS = (".part", ".parts", ".safetensors")


class PartError(ValueError):
    """A part, or the update of all parts, differs from its announcement.

    The upload's `offset` is the next expected byte.
    """


class OvertakenError(Exception):
    """A newer part of the same update replaces this part."""


class _Announced(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    bytes: int
    digest: str


class _Part(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    end: int
    digest: str


class _Checked(NamedTuple):
    """Identity of a file that was compared with its digest; changes when the file is written."""

    digest: str
    device: int
    number: int
    bytes: int
    changed: int

    @classmethod
    def of(cls, path: Path, digest: str) -> _Checked:
        """Return the identity of the file. Raises OSError."""
        found = path.stat()
        return cls(digest, found.st_dev, found.st_ino, found.st_size, found.st_mtime_ns)


class Updates:
    """Files of updates in `folder`, which is created if missing. Safe for several threads."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        with disk_errors(folder):
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        sync_folder(folder.parent)
        self._lock = threading.Lock()
        """Protects `_uploads` and `_checked`."""
        self._uploads: dict[int, Upload] = {}
        """Uploads opened by this process."""
        self._checked: dict[int, _Checked] = {}
        """Files of an earlier process that were compared with their digests."""

    def open(self, ticket: int, size: int, digest: str) -> Upload:
        """Open the upload of an assignment's update: a stream of `size` bytes with this SHA-256.

        Returns the upload in progress if its announcement is the same; otherwise a new upload,
        which deletes the earlier bytes. Do not call this for an acknowledged update. After a
        restart the existing bytes are checked once. Raises RunFolderWriteError if the disk has no
        space for the rest, and PartError if the upload is deleted at the same time.
        """
        announced = _Announced(size, digest)
        with self._lock:
            upload = self._uploads.get(ticket)
            if upload is None or upload.announced != announced:
                if upload is not None:
                    upload.end()
                upload = self._uploads[ticket] = Upload(self.folder, ticket, announced)
        upload.begin()
        self._check_room(upload)
        return upload

    def _check_room(self, upload: Upload) -> None:
        with disk_errors(self.folder):
            free = max(0, free_bytes(self.folder) - KEPT_FREE)
        with self._lock:
            others = sum(each.left for each in self._uploads.values() if each is not upload)
            if upload.left <= free - others:
                return
            if self._uploads.get(upload.ticket) is upload:
                del self._uploads[upload.ticket]
        upload.end()
        raise RunFolderWriteError(
            f"cannot take {upload.left} bytes of an update: {free} bytes of the disk of "
            f"{self.folder} may be used, and {others} are reserved for other updates: free disk "
            "space there"
        )

    def read(
        self, ticket: int, expected: Mapping[str, TensorSpec], digest: str | None = None
    ) -> dict[str, Tensor]:
        """Return the tensors of a complete update, in the order of `expected`, on the CPU.

        Writing to the tensors changes neither the file nor later reads. `digest` is as in `check`.
        Raises DamagedUpdateError as `check` does, and TensorsError for unexpected tensors.
        """
        # Imported here, so that checking digests does not need torch.
        from dure.deploy.mapped_updates import mapped_update

        self.check(ticket, digest)
        path = self._complete(ticket)
        try:
            tensors = mapped_update(path, expected)
        except OSError as error:
            raise DamagedUpdateError(f"cannot read {path}: {error.strerror}") from error
        return {name: tensors[name] for name in expected}

    def check(self, ticket: int, digest: str | None = None) -> None:
        """Compare the file of a complete update with its digest.

        `digest` is the SHA-256 of the client's stream; None for the digest announced to this
        process. Raises DamagedUpdateError if the file is missing or differs.
        """
        path = self._complete(ticket)
        with self._lock:
            upload = self._uploads.get(ticket)
            checked = self._checked.get(ticket)
        if digest is None and upload is not None:
            digest = upload.announced.digest
        try:
            found = _Checked.of(path, digest or "")
            if checked != found and (upload is None or upload.checked != found):
                if sha256_of(path) != digest:
                    raise DamagedUpdateError(f"{path} is damaged: its SHA-256 differs")
                with self._lock:
                    self._checked[ticket] = found
        except OSError as error:
            raise DamagedUpdateError(f"cannot read {path}: {error.strerror}") from error

    def digest(self, ticket: int) -> str:
        """Return the SHA-256 of a complete update's file.

        Raises RunFolderError without the file.
        """
        path = self._complete(ticket)
        try:
            return sha256_of(path)
        except OSError as error:
            raise RunFolderError(f"cannot read {path}: {error.strerror}") from error

    def all(self) -> list[int]:
        """Return the assignment ids of all complete updates."""
        return sorted(
            ticket for ticket, path in self._files() if path.name == f"{ticket}.safetensors"
        )

    def delete(self, tickets: Collection[int]) -> None:
        """Delete the existing files of these updates. Raises RunFolderWriteError."""
        self._remove(set(tickets))

    def keep_only(self, tickets: Collection[int]) -> None:
        """Delete the files of all other updates, complete or not. Raises RunFolderWriteError."""
        with self._lock:
            here = {ticket for ticket, _ in self._files()} | set(self._uploads)
        self._remove(here - set(tickets))

    def _remove(self, tickets: Collection[int]) -> None:
        with self._lock:
            for ticket in tickets:
                upload = self._uploads.pop(ticket, None)
                self._checked.pop(ticket, None)
                if upload is not None:
                    upload.end()
                _remove(self.folder, ticket)

    def _complete(self, ticket: int) -> Path:
        return self.folder / f"{ticket}.safetensors"

    def _files(self) -> Iterator[tuple[int, Path]]:
        """Yield every file of an update, with its assignment id; other files are ignored."""
        for path in self.folder.iterdir():
            if path.stem.isdecimal() and path.suffix in _ENDINGS:
                yield int(path.stem), path


class Upload:
    """Upload of an update. Safe for several threads.

    `offset` is the number of received bytes of the stream. `checked` identifies the complete file,
    once it was hashed.
    """

    def __init__(self, folder: Path, ticket: int, announced: _Announced) -> None:
        self.checked: _Checked | None = None
        self.ticket = ticket
        self.announced = announced
        self.offset = 0
        self._folder = folder
        self._part, self._parts, self._whole = (folder / f"{ticket}{ending}" for ending in _ENDINGS)
        self._lock = threading.Lock()
        self._begun = self._ended = False
        self._stream = hashlib.sha256()
        """Hash of the bytes up to `offset`."""
        self._coming: UploadPart | None = None
        """Part in progress."""

    @property
    def left(self) -> int:
        """Number of missing bytes."""
        return self.announced.bytes - self.offset

    def begin(self) -> None:
        """Find the bytes that an earlier process has received; do nothing at the second call.

        Raises PartError if the upload has ended.
        """
        with self._lock:
            self._check_open()
            if not self._begun:
                with disk_errors(self._part):
                    self._find()
                self._begun = True

    def _find(self) -> None:
        if self._is_complete():
            self.offset = self.announced.bytes
            return
        parts = self._known_parts()
        if parts is None:
            self._empty()
        else:
            self._take_over(parts)

    def _is_complete(self) -> bool:
        try:
            same_size = self._whole.stat().st_size == self.announced.bytes
        except FileNotFoundError:
            return False
        if not same_size or sha256_of(self._whole) != self.announced.digest:
            return False
        self.checked = _Checked.of(self._whole, self.announced.digest)
        return True

    def _known_parts(self) -> list[_Part] | None:
        """Return the recorded parts; None without a record of this announcement."""
        try:
            first, *rest = contents(self._parts).split(b"\n")
            if msgspec.json.decode(first, type=_Announced) != self.announced:
                return None
        except (OSError, msgspec.DecodeError, UnicodeDecodeError, RecursionError):
            return None
        parts: list[_Part] = []
        # A truncated line ends the usable record.
        with suppress(msgspec.DecodeError, UnicodeDecodeError):
            parts.extend(msgspec.json.decode(line, type=_Part) for line in rest)
        return parts

    def _take_over(self, parts: list[_Part]) -> None:
        """Accept the parts whose digests match, and remove the bytes after them."""
        counted = []
        with suppress(FileNotFoundError), opened(self._part) as file:
            for part in parts:
                stream = self._stream.copy()
                if not self.offset < part.end <= self.announced.bytes:
                    break
                if _digest_of_next(file, part.end - self.offset, stream) != part.digest:
                    break
                self._stream = stream
                self.offset = part.end
                counted.append(part)
            os.truncate(self._part, self.offset)
        self._note(counted)

    def _note(self, parts: Sequence[_Part]) -> None:
        """Write a new record of this update."""
        self._parts.unlink(missing_ok=True)
        lines = b"".join(msgspec.json.encode(each) + b"\n" for each in (self.announced, *parts))
        _write_at(self._parts, 0, memoryview(lines))

    def part(self, offset: int) -> UploadPart:
        """Start a part at byte `offset` of the stream.

        The new part replaces a part in progress: a client whose connection broke starts again
        before the server notices. Raises PartError for an offset after the received bytes.
        """
        with self._lock:
            self._check_open()
            if not 0 <= offset <= self.offset:
                raise PartError(
                    f"a part starts at byte {offset}, but {self.offset} bytes are stored"
                )
            self._coming = UploadPart(self, offset)
            return self._coming

    def _is_here(self, offset: int, piece: memoryview) -> bool:
        path = self._part if self._part.exists() else self._whole
        with opened(path) as file:
            file.seek(offset)
            return file.read(len(piece)) == piece

    def _count(self, end: int, digest: str, stream: hashlib._Hash) -> None:
        """Record the bytes up to `end` as received; `digest` is that of the new bytes."""
        line = msgspec.json.encode(_Part(end, digest)) + b"\n"
        _write_at(self._parts, self._parts.stat().st_size, memoryview(line))
        self.offset = end
        self._stream = stream

    def _drop(self) -> None:
        """Remove the bytes of a part that does not count."""
        self._coming = None
        with suppress(OSError):
            os.truncate(self._part, self.offset)

    def complete(self, lasts: bool = True) -> None:
        """Complete the upload durably. May be called repeatedly.

        `lasts` is False for a file that is useless after a power failure, and need not be synced.
        Raises PartError if bytes are missing, or if the stream has another digest, and
        RunFolderWriteError if the disk fails; the last two discard all bytes.
        """
        with self._lock:
            self._check_open()
            if self.left:
                raise PartError(f"{self.left} bytes of {self.announced.bytes} are missing")
            if self._whole.exists() and not self._part.exists():
                return
            with disk_errors(self._part):
                # Creates the file of an update without bytes, which has no parts.
                _write_at(self._part, self.offset, memoryview(b""))
            if self._stream.hexdigest() != self.announced.digest:
                self._empty()
                raise PartError("the update does not match its digest: send it again")
            try:
                with disk_errors(self._part):
                    if lasts:
                        _sync(self._part)
                    os.replace(self._part, self._whole)
                    if lasts:
                        sync_folder(self._folder)
                    self.checked = _Checked.of(self._whole, self.announced.digest)
            except RunFolderWriteError:
                # The content of the disk after a failed sync is unknown.
                self._empty()
                raise
            self._parts.unlink(missing_ok=True)

    def _empty(self) -> None:
        """Discard all bytes, so that the upload starts again."""
        self._coming = None
        _remove(self._folder, self.ticket)
        self.offset = 0
        self._stream = hashlib.sha256()
        with disk_errors(self._parts):
            self._note([])

    def end(self) -> None:
        """End the upload: nothing more is written."""
        with self._lock:
            self._ended = True

    def _check_open(self) -> None:
        if self._ended:
            raise PartError(f"the update of ticket {self.ticket} is not wanted any more")


class UploadPart:
    """Part in progress, whose bytes are written to the disk on arrival, piece by piece.

    `size` is the number of received bytes. The bytes count once the part is complete and has its
    digest. Bytes that were received before are compared.
    """

    def __init__(self, upload: Upload, offset: int) -> None:
        self.upload = upload
        self.size = 0
        self._begin = offset
        self._all = hashlib.sha256()
        # If all bytes are new, or the part is the whole stream, nothing is hashed twice.
        self._new = self._all if offset == upload.offset else hashlib.sha256()
        self._stream = upload._stream.copy() if upload.offset else self._new
        """Hash of the stream up to the received bytes."""

    def add(self, piece: bytes | bytearray | memoryview) -> None:
        """Add the next bytes.

        Raises PartError for bytes beyond the end of the update or different from the received
        bytes, RunFolderWriteError if the disk fails, and OvertakenError. The first two discard the
        part.
        """
        with self._its_turn() as upload:
            at = self._begin + self.size
            end = at + len(piece)
            if end > upload.announced.bytes:
                raise PartError(
                    f"a part ends at byte {end}, but {upload.announced.bytes} bytes were announced"
                )
            here = min(len(piece), max(0, upload.offset - at))
            known = memoryview(piece)[:here]
            rest = memoryview(piece)[here:]
            if here and not upload._is_here(at, known):
                raise PartError(f"the bytes from {at} on differ from the stored ones")
            self._all.update(piece)
            for other in {self._new, self._stream} - {self._all}:
                other.update(rest)
            if rest:
                _write_at(upload._part, at + here, rest)
            self.size += len(piece)

    def done(self, digest: str) -> int:
        """Complete a part with this SHA-256, and return the number of received bytes of the update.

        Raises the errors of `add`, and PartError for another digest.
        """
        with self._its_turn() as upload:
            if self._all.hexdigest() != digest:
                raise PartError("the part does not match its digest")
            end = self._begin + self.size
            if end > upload.offset:
                upload._count(end, self._new.hexdigest(), self._stream)
            upload._coming = None
            return upload.offset

    @contextmanager
    def _its_turn(self) -> Iterator[Upload]:
        upload = self.upload
        with upload._lock:
            upload._check_open()
            if upload._coming is not self:
                raise OvertakenError
            try:
                with disk_errors(upload._part):
                    yield upload
            except (PartError, RunFolderWriteError):
                upload._drop()
                raise


def _remove(folder: Path, ticket: int) -> None:
    for ending in _ENDINGS:
        path = folder / f"{ticket}{ending}"
        with disk_errors(path):
            path.unlink(missing_ok=True)


def _write_at(path: Path, offset: int, content: memoryview) -> None:
    """Write all bytes, or remove them after an error. Raises OSError."""
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK, 0o600)
    try:
        at = 0
        while at < len(content):
            at += os.pwrite(descriptor, content[at:], offset + at)
    except OSError:
        # On a full disk the partial bytes take space that others need.
        with suppress(OSError):
            os.ftruncate(descriptor, offset)
        raise
    finally:
        os.close(descriptor)


def _sync(path: Path) -> None:
    descriptor = descriptor_of(path)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _digest_of_next(file: BinaryIO, size: int, also: hashlib._Hash | None = None) -> str:
    """Return the SHA-256 of the next `size` bytes, or fewer at the end of the file.

    `also` is another hash that takes the same bytes.
    """
    digest = hashlib.sha256()
    while size and (chunk := file.read(min(size, _CHUNK))):
        size -= len(chunk)
        digest.update(chunk)
        if also is not None:
            also.update(chunk)
    return digest.hexdigest()
