"""A log of all that left the machine, in which no line can be changed unnoticed.

    {"time":"2026-03-01T22:15:07.123456Z","kind":"update","bytes":812345,"digest":"…",
     "ticket":17,"round":3,"previous":"…"}

A line a message: when, what kind, how many bytes, and their SHA-256, on the disk before the message
leaves. `previous` is the SHA-256 of the line before, without its end; that of the first line is 64
zeros. So who changes, removes or swaps a line breaks the chain after it. How long the chain is and
what its last line comes to stands in `FILE.head`, so that lines missing at the end are found too.

Whoever may write both files can write both anew. Who wants to hold that against them notes the last
digest elsewhere, which `dure audit FILE` prints.

A kill while a line is written leaves a part of it. Its message has not left. A line of the kind
"cut" takes its place, with the size and the digest of what was there.

Source: S. Haber, W. S. Stornetta, "How to Time-Stamp a Digital Document", 1991.
"""

from __future__ import annotations

import hashlib
import os
import threading
from contextlib import suppress
from datetime import datetime, timezone
from pathlib import Path
from typing import Literal, NamedTuple

import msgspec

from dure.errors import AuditError
from dure.record.disk import sync_folder, told
from dure.worlds.network.client.lock import lock, unlock

Kind = Literal["check-in", "update", "metrics", "failure", "enrol", "ready", "answer"]

FIRST = "0" * 64
"""`previous` of the first line."""


class _Line(msgspec.Struct, omit_defaults=True, forbid_unknown_fields=True):
    time: str
    kind: Kind | Literal["cut"]
    bytes: int
    digest: str
    previous: str
    ticket: int | None = None
    round: int | None = None


class Chain(NamedTuple):
    """What a log comes to. digest: of its last line."""

    lines: int
    digest: str


class Audit:
    """The log of one client, which is made where it is missing. Several threads may record.

    Raises AuditError if it is not as it was written, or another process writes it, and
    RunFolderWriteError if it cannot be written.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._turn = threading.Lock()
        with told(path):
            try:
                self._file = lock(path)
            except BlockingIOError as error:
                raise AuditError(
                    f"{path} is in use by another process: each client has a log of its own"
                ) from error
        try:
            with told(path):
                content = path.read_bytes()
            # The name too is to be on the disk before anything leaves.
            sync_folder(path.parent)
            # Where the next line goes.
            self._end = content.rfind(b"\n") + 1
            self._chain = _chain(path, content[: self._end])
            torn = content[self._end :]
            if torn:
                self._record("cut", len(torn), hashlib.sha256(torn).hexdigest())
        except BaseException:
            self.close()
            raise

    def record(
        self,
        kind: Kind,
        content: bytes | bytearray | memoryview,
        ticket: int | None = None,
        round: int | None = None,
    ) -> None:
        """This is about to leave: it may as soon as this returns.

        Raises RunFolderWriteError if the line cannot be written; then it must not leave.
        """
        self.record_digest(kind, len(content), hashlib.sha256(content).hexdigest(), ticket, round)

    def record_digest(
        self,
        kind: Kind,
        size: int,
        digest: str,
        ticket: int | None = None,
        round: int | None = None,
    ) -> None:
        """As `record`, of so many bytes with this SHA-256."""
        with self._turn:
            self._record(kind, size, digest, ticket, round)

    def close(self) -> None:
        unlock(self._file)

    def __enter__(self) -> Audit:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _record(
        self,
        kind: Kind | Literal["cut"],
        size: int,
        digest: str,
        ticket: int | None = None,
        round: int | None = None,
    ) -> None:
        now = datetime.now(timezone.utc).isoformat(timespec="microseconds").replace("+00:00", "Z")
        line = msgspec.json.encode(
            _Line(now, kind, size, digest, self._chain.digest, ticket, round)
        )
        with told(self.path):
            self._put(line + b"\n")
        self._end += len(line) + 1
        self._chain = Chain(self._chain.lines + 1, hashlib.sha256(line).hexdigest())
        self._put_head()

    def _put(self, line: bytes) -> None:
        """Writes it at the end, over what a kill or a full disk has left there of another one."""
        try:
            at = self._end
            while line:
                written = os.pwrite(self._file, line, at)
                line = line[written:]
                at = at + written
            os.ftruncate(self._file, at)
            os.fsync(self._file)
        except OSError:
            with suppress(OSError):
                os.ftruncate(self._file, self._end)
            raise

    def _put_head(self) -> None:
        # Not synced: it may be behind the log, never before it, and a power failure accuses nobody.
        head = _head(self.path)
        beside = head.with_name(f".{head.name}.{os.getpid()}")
        with suppress(OSError):
            beside.write_bytes(msgspec.json.encode(self._chain))
            os.replace(beside, head)


def verify(path: Path) -> Chain:
    """How many lines the log has, and the digest of the last one.

    Raises AuditError with the first line that is not as it was written, or if it cannot be read.
    """
    try:
        content = path.read_bytes()
    except OSError as error:
        raise AuditError(f"cannot read {path}: {error.strerror}") from error
    chain = _chain(path, content[: content.rfind(b"\n") + 1])
    if not content.endswith(b"\n") and content:
        raise AuditError(
            f"{path}: line {chain.lines + 1} was cut off, before anything left for which it "
            "stands; the client writes this down when it starts next"
        )
    return chain


def _chain(path: Path, content: bytes) -> Chain:
    """What whole lines come to. Raises AuditError with the first one that does not fit."""
    noted = _read_head(path)
    chain = Chain(0, FIRST)
    _compare(path, chain, noted)
    # Not by `splitlines`: other ends of lines than this one are changes.
    for line in content.split(b"\n")[:-1]:
        number = chain.lines + 1
        try:
            previous = msgspec.json.decode(line, type=_Line).previous
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
            raise AuditError(f"{path}: line {number} is no line of this log: {error}") from error
        if previous != chain.digest:
            # The one before may be the one that was changed.
            before = f"line {number - 1}" if chain.lines else "the beginning"
            raise AuditError(
                f"{path}: line {number} does not follow {before}: one was changed, or others "
                "stood between"
            )
        chain = Chain(number, hashlib.sha256(line).hexdigest())
        _compare(path, chain, noted)
    if noted is not None and noted.lines > chain.lines:
        raise AuditError(f"{path}: line {chain.lines + 1} is missing: it had {noted.lines} lines")
    return chain


def _compare(path: Path, chain: Chain, noted: Chain | None) -> None:
    if noted is not None and noted.lines == chain.lines and noted.digest != chain.digest:
        raise AuditError(f"{path}: line {chain.lines} is not the one that was written")


def _head(path: Path) -> Path:
    return path.with_name(f"{path.name}.head")


def _read_head(path: Path) -> Chain | None:
    """What was noted of the log; None where nothing was, or a power failure has taken it."""
    try:
        return msgspec.json.decode(_head(path).read_bytes(), type=Chain)
    except (OSError, ValueError, RecursionError):
        return None
