"""Audit log of all messages that leave the machine: a hash chain in which changes are detected.

    {"time":"2026-03-01T22:15:07.123456Z","kind":"update","number":12,"bytes":812345,"digest":"…",
     "ticket":17,"round":3,"previous":"…"}

Each message has a line: its time, kind, line number, size in bytes and SHA-256. The client writes
the line before it sends the message. `previous` is the SHA-256 of the previous line without its
line end; the first line has 64 zeros. A changed, removed or moved line therefore breaks the chain
after it. `FILE.head` stores the number of lines and the digest of the last line, so that missing
lines at the end are detected too.

A line is synced to the disk before its message leaves, and survives a power failure. The messages
of every step of split learning, and pure queries (`next`, `watch`), are too frequent for a sync
each: their lines are written to the operating system before the message leaves, and synced with the
next synced line or after `LATER` seconds. These lines survive a kill of the process; a power
failure may lose them.

A person with write access to both files can rewrite both. A reader who wants to detect a rewrite
records the last digest elsewhere; `dure audit FILE` prints it.

A kill during the writing of a line leaves a partial line, whose message has not left. The next
start replaces it by a line of the kind "cut" with the size and the digest of the partial line.

Source: S. Haber, W. S. Stornetta, "How to Time-Stamp a Digital Document", 1991.
"""

from __future__ import annotations

import hashlib
import os
import threading
import time
from collections.abc import Sequence
from contextlib import suppress
from datetime import datetime, timezone
from pathlib import Path
from typing import Annotated, NamedTuple

import msgspec

from dure.deploy.client.file_lock import lock, unlock
from dure.deploy.client.quota import Quota
from dure.errors import AuditError
from dure.record.disk import disk_errors, open_regular_file, sync_folder
from dure.record.untrusted_files import LARGE, contents

Kind = Annotated[str, msgspec.Meta(pattern=r"^[a-z][a-z-]{0,39}$")]
"""Kind of a message, such as "update", or "smashed" in split learning."""

FIRST = "0" * 64
"""`previous` of the first line."""

LATER = 1.0
"""Maximum seconds without a sync while messages are sent."""

CUT = "cut"
"""Kind of the line that replaces a partial line."""

Buffer = bytes | bytearray | memoryview


class _Line(msgspec.Struct, omit_defaults=True, forbid_unknown_fields=True):
    time: str
    kind: Kind
    bytes: int
    digest: str
    previous: str
    number: int | None = None
    """Number of the line; None in lines of earlier versions."""
    ticket: int | None = None
    round: int | None = None


class LogChain(NamedTuple):
    """Length of a log, and the digest of its last line."""

    lines: int
    digest: str


class AuditLog:
    """Audit log of a client, created if it is missing. Safe for several threads.

    Raises AuditError if the log was changed or another process has opened it, and
    RunFolderWriteError if it cannot be written.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.quota: Quota | None = None
        """Storage quota of the run; None before the run is known."""
        self._turn = threading.Lock()
        self._unsynced = False
        """Whether lines have been written since the last sync."""
        self._synced = time.monotonic()
        with disk_errors(path):
            try:
                self._file = lock(path)
            except BlockingIOError as error:
                raise AuditError(
                    f"{path} is in use by another process: each client needs its own log"
                ) from error
        try:
            with disk_errors(path):
                content = contents(path, most=LARGE)
            # The directory entry too must be on the disk before any message leaves.
            sync_folder(path.parent)
            # Offset of the next line.
            self._end = content.rfind(b"\n") + 1
            self._chain = _chain(path, content[: self._end])
            torn = content[self._end :]
            if torn:
                self._record(CUT, len(torn), hashlib.sha256(torn).hexdigest())
        except BaseException:
            self.close()
            raise

    def record(
        self,
        kind: Kind,
        content: Buffer,
        ticket: int | None = None,
        round: int | None = None,
        at_once: bool = True,
    ) -> None:
        """Write the line of a message that the caller sends next.

        Args:
            kind: Kind of the message.
            content: Bytes of the message.
            ticket: Assignment id, if the message has one.
            round: Round of the message, if it has one.
            at_once: Whether to sync the line to the disk before returning.

        Raises:
            RunFolderWriteError: The line cannot be written. The message must not be sent.
            PolicyError: The storage quota is exhausted. The message must not be sent.
        """
        self.record_pieces(kind, [content], ticket, round, at_once)

    def record_pieces(
        self,
        kind: Kind,
        pieces: Sequence[Buffer],
        ticket: int | None = None,
        round: int | None = None,
        at_once: bool = True,
    ) -> None:
        """Write the line of a message in pieces, as `record` does."""
        sha = hashlib.sha256()
        size = 0
        for piece in pieces:
            sha.update(piece)
            size += memoryview(piece).nbytes
        self.record_digest(kind, size, sha.hexdigest(), ticket, round, at_once)

    def record_digest(
        self,
        kind: Kind,
        size: int,
        digest: str,
        ticket: int | None = None,
        round: int | None = None,
        at_once: bool = True,
    ) -> None:
        """Write the line of a message of `size` bytes with this SHA-256, as `record` does."""
        with self._turn:
            self._record(kind, size, digest, ticket, round, at_once)

    def close(self) -> None:
        with self._turn, suppress(OSError):
            if self._unsynced:
                self._sync()
        unlock(self._file)

    def __enter__(self) -> AuditLog:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _record(
        self,
        kind: Kind,
        size: int,
        digest: str,
        ticket: int | None = None,
        round: int | None = None,
        at_once: bool = True,
    ) -> None:
        now = datetime.now(timezone.utc).isoformat(timespec="microseconds").replace("+00:00", "Z")
        number = self._chain.lines + 1
        line = msgspec.json.encode(
            _Line(now, kind, size, digest, self._chain.digest, number, ticket, round)
        )
        if self.quota is not None:
            self.quota.check(len(line) + 1, "a line of the log")
        # Checking the clock at each line needs no timer thread.
        at_once = at_once or time.monotonic() - self._synced > LATER
        with disk_errors(self.path):
            self._put(line + b"\n", at_once)
        self._end += len(line) + 1
        self._chain = LogChain(number, hashlib.sha256(line).hexdigest())
        if at_once:
            self._put_head()

    def _put(self, line: bytes, at_once: bool) -> None:
        """Write the line at the end, over remains of a line that a kill or a full disk has cut."""
        try:
            at = self._end
            while line:
                written = os.pwrite(self._file, line, at)
                line = line[written:]
                at = at + written
            os.ftruncate(self._file, at)
            self._unsynced = True
            if at_once:
                os.fsync(self._file)
                self._note_synced()
        except OSError:
            with suppress(OSError):
                os.ftruncate(self._file, self._end)
            raise

    def _sync(self) -> None:
        os.fsync(self._file)
        self._note_synced()
        self._put_head()

    def _note_synced(self) -> None:
        self._unsynced = False
        self._synced = time.monotonic()

    def _put_head(self) -> None:
        # Not synced: the head may be behind the log but never before it, so a power failure causes
        # no false alarm.
        head = _head(self.path)
        beside = head.with_name(f".{head.name}.{os.getpid()}")
        with suppress(OSError):
            with open(beside, "wb", opener=open_regular_file) as file:
                file.write(msgspec.json.encode(self._chain))
            os.replace(beside, head)


def verify(path: Path) -> LogChain:
    """Check the log, and return its number of lines and the digest of the last line.

    Raises AuditError for the first changed line, and for an unreadable log.
    """
    try:
        content = contents(path, most=LARGE)
    except OSError as error:
        raise AuditError(f"cannot read {path}: {error.strerror}") from error
    chain = _chain(path, content[: content.rfind(b"\n") + 1])
    if not content.endswith(b"\n") and content:
        raise AuditError(
            f"{path}: line {chain.lines + 1} is incomplete; its message was not sent; the client "
            "records this at its next start"
        )
    return chain


def _chain(path: Path, content: bytes) -> LogChain:
    """Return the chain of complete lines. Raises AuditError for the first inconsistent line."""
    noted = _read_head(path)
    chain = LogChain(0, FIRST)
    _compare(path, chain, noted)
    # `splitlines` is not used: it would accept other line ends, which are changes.
    for line in content.split(b"\n")[:-1]:
        number = chain.lines + 1
        try:
            said = msgspec.json.decode(line, type=_Line)
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
            raise AuditError(f"{path}: line {number} is not a line of this log: {error}") from error
        if said.number not in (None, number):
            raise AuditError(f"{path}: line {number} has the number {said.number}")
        if said.previous != chain.digest:
            # The changed line may be the line before.
            before = f"line {number - 1}" if chain.lines else "the beginning"
            raise AuditError(
                f"{path}: line {number} does not follow {before}: a line was changed or removed"
            )
        chain = LogChain(number, hashlib.sha256(line).hexdigest())
        _compare(path, chain, noted)
    if noted is not None and noted.lines > chain.lines:
        raise AuditError(f"{path}: line {chain.lines + 1} is missing: it had {noted.lines} lines")
    return chain


def _compare(path: Path, chain: LogChain, noted: LogChain | None) -> None:
    if noted is not None and noted.lines == chain.lines and noted.digest != chain.digest:
        raise AuditError(f"{path}: line {chain.lines} has changed")


def _head(path: Path) -> Path:
    return path.with_name(f"{path.name}.head")


def _read_head(path: Path) -> LogChain | None:
    """Return the content of the head file; None if the file is missing or unreadable."""
    try:
        return msgspec.json.decode(contents(_head(path)), type=LogChain)
    except (OSError, ValueError, RecursionError):
        return None
