"""Journal of a federation: every input of the coordinator in order, written to the disk first.

    append     from any thread; the future resolves when the row is committed and synced
    next       the committed rows in order, for the single thread that drives the coordinator

A row is (seq, at, kind, client, ticket, body): seq counts 1, 2, 3 …, `at` is the federation's clock
and never runs backwards. `next` returns only rows read from the disk, also while the server runs. A
restarted server therefore repeats the same steps: it calls `read_from` with the last row in its
checkpoint, and gets all later rows in order without a gap or a duplicate, first the rows of its
earlier process.

**Syncing.** SQLite with a write-ahead log and `synchronous=FULL`: before the commit returns, the
transaction is in the log, and the log and its directory entry are synced. A single thread writes.
It commits all waiting rows in a transaction, so that many clients share a sync.

**A full disk**, or a database that another program has locked for seconds, fails the rows of a
transaction, whose futures raise RunFolderWriteError. None of these rows is delivered, the next rows
reuse their numbers, and the journal continues once there is space. **Any other error** of the disk
closes the journal for good, because the state after a failed sync is unknown: every later append
raises, and `next` raises after it has delivered the committed rows, so that the server ends with an
error message and can be restarted. A row whose append raised may still exist after a restart, like
a request whose answer was lost: the sender repeats the request, which must be harmless.

**Damage** is detected by SQLite's own checks and by a checksum in each row.

Source: SQLite's pages on write-ahead logging (https://sqlite.org/wal.html) and on the pragma
`synchronous`.
"""

from __future__ import annotations

import math
import os
import queue
import sqlite3
import struct
import threading
import time
import zlib
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import ExitStack, closing, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from dure.deploy.clock import FederationClock
from dure.deploy.local_disk import warn_if_remote
from dure.errors import RunFolderError, RunFolderWriteError
from dure.record.disk import disk_errors, sync_folder
from dure.record.lock import Lock
from dure.record.untrusted_files import opened

VERSION = 1
"""Version of the tables. A journal of another version is refused."""

NAME = "journal.db"
"""File name of the journal.

Further files are `journal.db-wal`, the log, `journal.db-shm`, its index, and `journal.lock`.
"""

MOST_BODY = 16 << 20
"""Maximum bytes of a body. Tensors have separate files."""

_MOST_AT_ONCE = 1024
"""Maximum rows per transaction and per read."""

_CHECKED_WHOLE = 64 << 20
"""Size in bytes up to which opening checks the whole journal, in about a second."""

_TABLES = """
CREATE TABLE about (name TEXT PRIMARY KEY, value TEXT NOT NULL) WITHOUT ROWID;
CREATE TABLE events (
    seq INTEGER PRIMARY KEY, at REAL NOT NULL, kind TEXT NOT NULL, client INTEGER NOT NULL,
    ticket INTEGER NOT NULL, body BLOB NOT NULL, sum INTEGER NOT NULL
);
"""

_LOG_HEADER = struct.Struct(">II I I 8s 8s")
"""Header of SQLite's log: magic, version, page size, checkpoints, salts, checksum."""

_LITTLE = 0x377F0682
"""Magic number of a log with checksums of little-endian words."""

_FRAME = struct.Struct(">I I 8s 8s")
"""Header of a page in the log.

Fields: page number, number of pages of the database if this page ends a transaction, salts,
checksum.
"""

_COLUMNS = "seq, at, kind, client, ticket, body, sum"


class Event(NamedTuple):
    """Row of the journal.

    `at` is in seconds of the federation's clock. `client` and `ticket` are -1 if absent.
    """

    seq: int
    at: float
    kind: str
    client: int
    ticket: int
    body: bytes


@dataclass(frozen=True)
class _Row:
    """Row that waits to be written."""

    kind: str
    client: int
    ticket: int
    body: bytes
    done: Future[Event]


@dataclass(frozen=True)
class _Forget:
    """Request to delete the rows before `seq`."""

    seq: int
    done: Future[None]


class Journal:
    """Journal in `folder`, created if there is none; open until `close`.

    `run` is the id of the run, which an existing journal must have too. The attribute `resumed` is
    True if the journal had rows. `last` is the seq of the newest committed row, 0 without rows.

    The constructor sets the clock to the time of the last row, and stops it: the caller then calls
    `hold` or `run`. Warns if the folder is on a network file system. Raises RunFolderError if the
    journal is damaged, of another run or version, or open in another process, and
    RunFolderWriteError if it cannot be written.
    """

    def __init__(self, folder: Path, clock: FederationClock, run: str = "") -> None:
        self.path = folder / NAME
        self._clock = clock
        warn_if_remote(folder)
        self._open = ExitStack()
        with self._open:
            self._open.callback(
                Lock.take(
                    folder / "journal.lock",
                    f"another process serves the run in {folder}: wait until it has ended, or end "
                    f"it",
                ).release
            )
            with _named(self.path):
                if _is_missing(self.path):
                    _make(self.path, run)
                _check_log(self.path.with_name(f"{NAME}-wal"))
                # The connection closed last moves the log into the database.
                self._writer = self._open.enter_context(closing(_connected(self.path)))
                self._reader = self._open.enter_context(closing(_connected(self.path)))
                _check(self._writer, self.path, run)
                newest = self._writer.execute(
                    "SELECT seq, at FROM events ORDER BY seq DESC LIMIT 1"
                ).fetchone()
            self._open = self._open.pop_all()
        last, at = newest or (0, 0.0)
        # An SQLite column has values of any type.
        if not isinstance(at, float) or not math.isfinite(at) or last < 0:
            raise _damaged(self.path, f"its newest row has the number {last} and the time {at!r}")
        self.last: int = last
        self.resumed = self.last > 0
        self._there = self.last
        """Newest row at the time of opening."""
        self._position = 0
        """Seq of the row read last."""
        self._read: deque[Event] = deque()
        """Rows read from the disk and not yet delivered."""
        clock.begin_at(at)
        self._closed = False
        self._broken: str | None = None
        self.synced: Callable[[float], object] = lambda seconds: None
        """Listener for the seconds that a transaction took, sync included."""
        self._asked: queue.SimpleQueue[_Row | _Forget | None] = queue.SimpleQueue()
        self._news = threading.Condition()
        """Protects `last`, `_closed` and `_broken`."""
        self._thread = threading.Thread(target=self._work, name="journal", daemon=True)
        self._thread.start()

    # Methods for any thread

    def append(
        self, kind: str, client: int = -1, ticket: int = -1, body: bytes = b""
    ) -> Future[Event]:
        """Write a row; the future returns it once it is synced.

        The future raises RunFolderWriteError if the row could not be written. Raises ValueError for
        values that a row cannot have.
        """
        if not kind.isascii() or not (-(1 << 63) <= client < 1 << 63 > ticket >= -(1 << 63)):
            raise ValueError(f"no event is {kind!r} of client {client} and ticket {ticket}")
        if len(body) > MOST_BODY:
            raise ValueError(f"an event has {len(body)} bytes, but may have at most {MOST_BODY}")
        row = _Row(kind, client, ticket, bytes(body), Future())
        self._ask(row)
        return row.done

    def write(self, kind: str, client: int = -1, ticket: int = -1, body: bytes = b"") -> Event:
        """Write a row as `append` does, and wait for it."""
        return self.append(kind, client, ticket, body).result()

    def backup(self, to: Path) -> None:
        """Copy the committed rows while the journal is open; see `backup`."""
        backup(self.path.parent, to)

    def _ask(self, asked: _Row | _Forget) -> None:
        with self._news:
            if self._broken is None and not self._closed:
                self._asked.put(asked)
                return
        asked.done.set_exception(self._refusal())

    # Methods for the thread that drives the coordinator

    def read_from(self, applied: int) -> None:
        """Position `next` after the row `applied`, the last row that the checkpoint includes.

        Raises RunFolderError if later rows are damaged or missing.
        """
        with self._news:
            last = self.last
        if applied > last:
            raise RunFolderError(
                f"{self.path} ends with row {last}, but the checkpoint needs rows up to "
                f"{applied}: restore the journal that belongs to it"
            )
        self._read.clear()
        self._position = applied
        # Checks all rows before the first is applied.
        while self._position < last:
            self._position = self._rows_after(self._position)[-1].seq
        self._position = applied

    def next(self, timeout: float | None = None) -> Event | None:
        """Return the next committed row; None after `timeout` seconds, or if the journal is closed.

        Raises RunFolderWriteError if the disk failed, after all committed rows are delivered.
        """
        if not self._read and self._wait(timeout):
            self._read.extend(self._rows_after(self._position))
            self._position = self._read[-1].seq
        return self._read.popleft() if self._read else None

    def forget_before(self, seq: int) -> Future[None]:
        """Delete rows before `seq`, which a synced checkpoint includes; keep the newest row.

        The newest row stays for its number. Raises ValueError if some of the rows have not been
        delivered.
        """
        if seq > self._position - len(self._read) + 1:
            raise ValueError(f"rows before {seq} are to go, but not all of them were delivered")
        forget = _Forget(seq, Future())
        self._ask(forget)
        return forget.done

    @property
    def broken(self) -> str | None:
        """Reason why the journal cannot be written any more; None while it can."""
        return self._broken

    @property
    def behind(self) -> bool:
        """Whether rows from before the opening remain to be delivered."""
        return self._position - len(self._read) < self._there

    def _wait(self, timeout: float | None) -> bool:
        """Wait for a row after the last read row, and return whether there is one."""
        until = None if timeout is None else time.monotonic() + timeout
        with self._news:
            while not self._closed and self.last <= self._position:
                left = None if until is None else until - time.monotonic()
                if self._broken is not None:
                    raise self._refusal()
                if left is not None and left <= 0:
                    return False
                self._news.wait(left)
            return not self._closed

    def _rows_after(self, seq: int) -> list[Event]:
        """Read the next rows, at least one.

        Raises RunFolderError if they are damaged or missing.
        """
        try:
            rows = self._reader.execute(
                f"SELECT {_COLUMNS} FROM events WHERE seq > ? ORDER BY seq LIMIT ?",
                (seq, _MOST_AT_ONCE),
            ).fetchall()
        except sqlite3.Error as error:
            raise RunFolderError(f"cannot read {self.path}: {error}") from error
        events = []
        for *fields, found in rows:
            event = Event(*fields)
            seq += 1
            if event.seq != seq or not _is_whole(event, found):
                break
            events.append(event)
        if len(events) < max(1, len(rows)):
            raise RunFolderError(
                f"{self.path} is damaged: row {seq if rows else seq + 1} is missing or has "
                "changed: restore it from a copy"
            )
        return events

    def close(self) -> None:
        """Write the waiting rows and release the journal. May be called repeatedly."""
        with self._news:
            if not self._closed:
                self._closed = True
                self._asked.put(None)
        self._thread.join()
        self._open.close()

    # Methods of the writing thread

    def _work(self) -> None:
        over = False
        while not over:
            batch = [self._asked.get()]
            with suppress(queue.Empty):
                while len(batch) < _MOST_AT_ONCE:
                    batch.append(self._asked.get_nowait())
            over = None in batch
            # A cancelled future is not written.
            begun = [each for each in batch if each and each.done.set_running_or_notify_cancel()]
            self._write_all([each for each in begun if isinstance(each, _Row)])
            for each in begun:
                if isinstance(each, _Forget):
                    self._forget(each)

    def _write_all(self, rows: list[_Row]) -> None:
        if not rows:
            return
        began = time.perf_counter()
        try:
            events = self._committed(rows)
        except Exception as error:
            self._failed(error)
            for row in rows:
                row.done.set_exception(self._refusal(error))
            return
        with self._news:
            self.last = events[-1].seq
            self._news.notify_all()
        self.synced(time.perf_counter() - began)
        for row, event in zip(rows, events, strict=True):
            row.done.set_result(event)

    def _committed(self, rows: list[_Row]) -> list[Event]:
        """Commit the rows in a single transaction."""
        if self._broken is not None:
            raise RunFolderWriteError(self._broken)
        events = [
            Event(seq, self._clock.now(), row.kind, row.client, row.ticket, row.body)
            for seq, row in enumerate(rows, self.last + 1)
        ]
        with _transaction(self._writer):
            self._writer.executemany(
                f"INSERT INTO events ({_COLUMNS}) VALUES (?, ?, ?, ?, ?, ?, ?)",
                [(*event, _sum(event)) for event in events],
            )
        return events

    def _forget(self, forget: _Forget) -> None:
        try:
            with _transaction(self._writer):
                self._writer.execute(
                    "DELETE FROM events WHERE seq < ?", (min(forget.seq, self.last),)
                )
        except Exception as error:
            self._failed(error)
            forget.done.set_exception(self._refusal(error))
        else:
            forget.done.set_result(None)

    def _failed(self, error: Exception) -> None:
        if _passes(error):
            return
        with self._news:
            if self._broken is None:
                self._broken = _told(self.path, error)
            self._news.notify_all()

    def _refusal(self, error: Exception | None = None) -> RunFolderWriteError:
        """Return a new exception for each caller: raising an exception modifies it."""
        if self._broken is not None:
            return RunFolderWriteError(self._broken)
        if error is not None:
            return RunFolderWriteError(_told(self.path, error))
        return RunFolderWriteError(f"{self.path} is closed")


def backup(folder: Path, to: Path) -> None:
    """Write a consistent copy of the journal in `folder` to `to`, also while a server writes it.

    Raises RunFolderError if there is no journal, and RunFolderWriteError if the copy cannot be
    written.
    """
    path = folder / NAME
    if not path.is_file():
        raise RunFolderError(f"there is no {path}")
    try:
        with disk_errors(to):
            os.close(os.open(to, os.O_WRONLY | os.O_CREAT, 0o600))
        with closing(sqlite3.connect(path)) as source, closing(sqlite3.connect(to)) as copy:
            copy.execute("PRAGMA synchronous=FULL")
            # All pages in one step: concurrent writes of the server would restart a copy in several
            # steps.
            source.backup(copy)
    except sqlite3.OperationalError as error:
        raise RunFolderWriteError(f"cannot copy {path} to {to}: {error}") from error
    except sqlite3.Error as error:
        raise _damaged(path, error) from error
    sync_folder(to.parent)


def events_in(folder: Path) -> Iterator[Event]:
    """Yield the rows of a journal that no server uses, such as a copy.

    Raises RunFolderError for a missing or damaged row.
    """
    path = folder / NAME
    try:
        with closing(sqlite3.connect(path)) as connection:
            before = None
            rows = connection.execute(f"SELECT {_COLUMNS} FROM events ORDER BY seq")
            for *fields, found in rows:
                event = Event(*fields)
                if not _is_whole(event, found) or before not in (None, event.seq - 1):
                    raise _damaged(path, f"row {event.seq} has changed, or is the last")
                before = event.seq
                yield event
    except sqlite3.Error as error:
        raise _damaged(path, error) from error


def _is_missing(path: Path) -> bool:
    """Return whether there is no journal.

    Raises RunFolderError for an incomplete journal or a link.
    """
    if path.is_symlink():
        raise RunFolderError(f"{path} is a link: the journal has to be in the run folder itself")
    log = path.with_name(f"{path.name}-wal")
    if not path.exists() and log.exists():
        raise RunFolderError(f"{path} is missing, but its log {log.name} is there: restore it")
    if path.exists() and path.stat().st_size == 0:
        raise RunFolderError(f"{path} is damaged: it is empty: restore it from a copy")
    return not path.exists()


def _make(path: Path, run: str) -> None:
    """Create an empty journal atomically: a file without tables is therefore a damaged file."""
    beside = path.with_name(f"{path.name}.new")
    beside.unlink(missing_ok=True)
    # The journal names clients. SQLite gives its additional files the same permissions.
    os.close(os.open(beside, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600))
    with closing(sqlite3.connect(beside)) as connection:
        # No additional file: nothing needs a rollback.
        connection.execute("PRAGMA journal_mode=MEMORY")
        connection.execute("PRAGMA synchronous=FULL")
        connection.executescript(_TABLES)
        with connection:
            about = [("version", str(VERSION)), ("run", run)]
            connection.executemany("INSERT INTO about VALUES (?, ?)", about)
    # SQLite syncs the folder with the first sync of the log.
    beside.replace(path)


def _connected(path: Path) -> sqlite3.Connection:
    # Each connection is used by one thread at a time: one writes, the other reads.
    for file in (path, path.with_name(f"{path.name}-wal"), path.with_name(f"{path.name}-shm")):
        # Files of an earlier version may be readable by others.
        if file.exists():
            file.chmod(0o600)
    connection = sqlite3.connect(path, isolation_level=None, check_same_thread=False)
    (mode,) = connection.execute("PRAGMA journal_mode=WAL").fetchone()
    if mode != "wal":
        raise RunFolderError(f"{path} has no write-ahead log here: choose a folder on a local disk")
    connection.execute("PRAGMA synchronous=FULL")
    return connection


def _check(connection: sqlite3.Connection, path: Path, run: str) -> None:
    """Check version, run and integrity of a journal. Raises RunFolderError."""
    tables = {name for (name,) in connection.execute("SELECT name FROM sqlite_master")}
    if not {"about", "events"} <= tables:
        raise RunFolderError(f"{path} is not a journal of dure: restore the journal of this run")
    about = dict(connection.execute("SELECT name, value FROM about"))
    if about.get("version") != str(VERSION):
        raise RunFolderError(
            f"{path} has version {about.get('version')} of the format, but this dure reads "
            f"version {VERSION}: use the dure that wrote it"
        )
    if about.get("run") != run:
        raise RunFolderError(
            f"{path} belongs to another run ({about.get('run')}) than this folder ({run}): "
            "restore the journal of this run"
        )
    # The rows of a larger journal are checked when they are read.
    if path.stat().st_size <= _CHECKED_WHOLE:
        (found,) = connection.execute("PRAGMA quick_check(1)").fetchone()
        if found != "ok":
            raise _damaged(path, found)


def _check_log(log: Path) -> None:
    """Check SQLite's log for damage before its end; call this before SQLite opens the log.

    SQLite reads a log up to its first damaged frame, and later deletes the rest: the log normally
    ends at the transaction that a power failure has cut off. A transaction starts only after the
    sync of the previous transaction. If another transaction follows the damaged frame, the damaged
    transaction was acknowledged, and its loss is an error: raises RunFolderError.

    Source: https://sqlite.org/fileformat2.html#the_write_ahead_log.
    """
    if not log.exists():
        return
    with opened(log) as file:
        header = file.read(_LOG_HEADER.size)
        # An empty log, or the remains of a first use that a power failure has cut off.
        if len(header) < _LOG_HEADER.size or not any(header):
            return
        magic, _, page, _, salts, known = _LOG_HEADER.unpack(header)
        words = struct.Struct("<II" if magic == _LITTLE else ">II")
        damaged = _log_sum(words, header[:24], bytes(8)) != known
        whole = True
        ended = False
        while not damaged:
            frame = file.read(_FRAME.size + page)
            # Frames of an earlier use of the file have other salts.
            if len(frame) < _FRAME.size + page or frame[8:16] != salts:
                return
            damaged = ended
            _, pages, _, stated = _FRAME.unpack_from(frame)
            # Starts from the checksum stated by the previous frame, so each frame is checked alone.
            whole = whole and _log_sum(words, frame[:8] + frame[_FRAME.size :], known) == stated
            known = stated
            # End of a damaged transaction, or of a transaction after it.
            ended = not whole and pages > 0
    raise RunFolderError(
        f"{log} is damaged: it contains rows that have changed: restore the journal from a copy"
    )


def _log_sum(words: struct.Struct, content: bytes, before: bytes) -> bytes:
    one, two = struct.unpack(">II", before)
    for first, second in words.iter_unpack(content):
        one = (one + first + two) & 0xFFFFFFFF
        two = (two + second + one) & 0xFFFFFFFF
    return struct.pack(">II", one, two)


def _damaged(path: Path, why: object) -> RunFolderError:
    return RunFolderError(f"{path} is damaged ({why}): restore it from a copy")


@contextmanager
def _named(path: Path) -> Iterator[None]:
    """Context manager: add the file's name to errors of SQLite and of the disk."""
    try:
        yield
    except sqlite3.OperationalError as error:
        raise RunFolderWriteError(_told(path, error)) from error
    except sqlite3.Error as error:
        raise _damaged(path, error) from error
    except OSError as error:
        raise RunFolderWriteError(_told(path, error)) from error


@contextmanager
def _transaction(connection: sqlite3.Connection) -> Iterator[None]:
    connection.execute("BEGIN IMMEDIATE")
    try:
        yield
        connection.execute("COMMIT")
    except BaseException:
        # SQLite may have rolled back itself.
        with suppress(sqlite3.Error):
            connection.execute("ROLLBACK")
        raise


def _sum(event: Event) -> int:
    numbers = struct.pack("<qdqq", event.seq, event.at, event.client, event.ticket)
    return zlib.crc32(event.body, zlib.crc32(event.kind.encode(), zlib.crc32(numbers)))


def _is_whole(event: Event, found: int) -> bool:
    """Return whether the row has its checksum. An SQLite column has values of any type."""
    try:
        return found == _sum(event)
    except (AttributeError, TypeError, struct.error):
        return False


def _told(path: Path, error: Exception) -> str:
    return str(error) if isinstance(error, RunFolderWriteError) else f"cannot write {path}: {error}"


def _passes(error: Exception) -> bool:
    """Return whether the error is transient and left no partial data."""
    # Compared by text, because Python 3.10 has no error codes. The lock may be a tool of the user.
    return isinstance(error, sqlite3.OperationalError) and (
        "disk is full" in str(error) or "is locked" in str(error)
    )
