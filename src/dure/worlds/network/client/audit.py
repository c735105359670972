"""A log of all messages that leave the machine, in which no line can be changed unnoticed.

    {"time":"2026-03-01T22:15:07.123456Z","kind":"update","number":12,"bytes":812345,"digest":"…",
     "ticket":17,"round":3,"previous":"…"}

A line a message: when, what kind, the number of the line, how many bytes, and their SHA-256. It is
written before the message leaves. `previous` is the SHA-256 of the line before, without its end;
that of the first line is 64 zeros. So who changes, removes or swaps a line breaks the chain after
it. How long the chain is and what its last line comes to stands in `FILE.head`, so that lines
missing at the end are found too.

A line is on the disk before its message leaves, and a power failure takes none. Messages of every
step of split learning, and those that only ask (`next`, `watch`), are too many for that: their
lines are handed to the system before the message leaves, and are on the disk with the next line
that is, or after `LATER` seconds. A kill takes none of these either; a power failure may.

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
import time
from collections.abc import Sequence
from contextlib import suppress
from datetime import datetime, timezone
from pathlib import Path
from typing import Annotated, NamedTuple

import msgspec

from dure.errors import AuditError
from dure.record.disk import opened_itself, sync_folder, told
from dure.record.inside import LARGE, contents
from dure.worlds.network.client.lock import lock, unlock
from dure.worlds.network.client.quota import Quota

Kind = Annotated[str, msgspec.Meta(pattern=r"^[a-z][a-z-]{0,39}$")]
"""What a message is: "update", or "smashed" in split learning."""

FIRST = "0" * 64
"""`previous` of the first line."""

LATER = 1.0
"""Seconds after which a line is on the disk that did not have to be there at once, as long as
messages go on."""

CUT = "cut"
"""The kind of a line that a kill has left in part."""

Buffer = bytes | bytearray | memoryview


class _Line(msgspec.Struct, omit_defaults=True, forbid_unknown_fields=True):
    time: str
    kind: Kind
    bytes: int
    digest: str
    previous: str
    number: int | None = None
    """None in lines of earlier versions."""
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
        self.quota: Quota | None = None
        """What its run may store, once that is known."""
        self._turn = threading.Lock()
        self._unsynced = False
        """Whether a line is written that may not be on the disk."""
        self._synced = time.monotonic()
        with told(path):
            try:
                self._file = lock(path)
            except BlockingIOError as error:
                raise AuditError(
                    f"{path} is in use by another process: each client has a log of its own"
                ) from error
        try:
            with told(path):
                content = contents(path, most=LARGE)
            # The name too is to be on the disk before anything leaves.
            sync_folder(path.parent)
            # Where the next line goes.
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
        """Write the line of a message that leaves as soon as this returns.

        at_once: whether the line has to be on the disk by then. Raises RunFolderWriteError if the
        line cannot be written, and PolicyError where the site stores no more; then the message must
        not leave.
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
        """As `record`, of a message in pieces."""
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
        """As `record`, of so many bytes with this SHA-256."""
        with self._turn:
            self._record(kind, size, digest, ticket, round, at_once)

    def close(self) -> None:
        with self._turn, suppress(OSError):
            if self._unsynced:
                self._sync()
        unlock(self._file)

    def __enter__(self) -> Audit:
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
        # A clock that is looked at when a line is written costs no thread that wakes.
        at_once = at_once or time.monotonic() - self._synced > LATER
        with told(self.path):
            self._put(line + b"\n", at_once)
        self._end += len(line) + 1
        self._chain = Chain(number, hashlib.sha256(line).hexdigest())
        if at_once:
            self._put_head()

    def _put(self, line: bytes, at_once: bool) -> None:
        """Write it at the end, over what a kill or a full disk has left there of another one."""
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
        # Not synced: it may be behind the log, never before it, and a power failure accuses nobody.
        head = _head(self.path)
        beside = head.with_name(f".{head.name}.{os.getpid()}")
        with suppress(OSError):
            with open(beside, "wb", opener=opened_itself) as file:
                file.write(msgspec.json.encode(self._chain))
            os.replace(beside, head)


def verify(path: Path) -> Chain:
    """How many lines the log has, and the digest of the last one.

    Raises AuditError with the first line that is not as it was written, or if it cannot be read.
    """
    try:
        content = contents(path, most=LARGE)
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
            said = msgspec.json.decode(line, type=_Line)
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
            raise AuditError(f"{path}: line {number} is no line of this log: {error}") from error
        if said.number not in (None, number):
            raise AuditError(f"{path}: line {number} says that it is line {said.number}")
        if said.previous != chain.digest:
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
        return msgspec.json.decode(contents(_head(path)), type=Chain)
    except (OSError, ValueError, RecursionError):
        return None
