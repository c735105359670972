"""Register of enrolled and invited clients: an SQLite file, `RUN/clients.db`.

A client is a public key with a number and a name. Numbers are 0 … K-1, in the order of enrolment or
as requested, and are never reused. An invitation is a random token; the register stores its SHA-256
and its expiry.

Several processes may open the file: the server, and `dure clients`. Each change is a synced
transaction, and each change of a client has a number, so that other processes read only newer
changes. Each client's row has a checksum (`seals`), which is compared when the file is opened.
"""

from __future__ import annotations

import hashlib
import json
import os
import secrets
import sqlite3
import threading
import time
import unicodedata
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Literal, NamedTuple, TypeVar

from dure.errors import RunFolderError, RunFolderWriteError
from dure.peer_text import printable
from dure.record.disk import sync_folder
from dure.record.seal import checksum
from dure.record.untrusted_files import check_file

FILE = "clients.db"
"""Name of the file in a run folder."""

MOST_NAME = 64
DAY = 86400.0
WEEK = 7 * DAY

_VERSION = 1
_PATIENCE = 5.0
"""Seconds that a change waits for a change by another process."""

_SCHEMA = """
CREATE TABLE run (clients INTEGER NOT NULL);
CREATE TABLE clients (
    number INTEGER PRIMARY KEY,
    key TEXT UNIQUE,
    name TEXT,
    enrolled REAL,
    state TEXT NOT NULL,
    change INTEGER NOT NULL
);
CREATE UNIQUE INDEX names ON clients (name) WHERE state = 'enrolled';
CREATE INDEX changes ON clients (change);
CREATE TABLE invitations (
    hash TEXT PRIMARY KEY,
    name TEXT,
    number INTEGER,
    expires REAL NOT NULL,
    used INTEGER
);
"""

_SEALS = "CREATE TABLE IF NOT EXISTS seals (number INTEGER PRIMARY KEY, sum TEXT NOT NULL);"
"""Table of the checksums of the clients' rows; opening a register of dure up to 0.1 adds it."""

State = Literal["enrolled", "revoked", "forgotten"]


class RegisteredClient(NamedTuple):
    """Client in the register.

    `enrolled` is a time in seconds since 1970. A forgotten client has only its number.
    """

    number: int
    key: str | None
    name: str | None
    enrolled: float | None
    state: State


class Invitation(NamedTuple):
    """Invitation. `expires` is in seconds since 1970.

    `name` and `number` are reserved for the client; None for any.
    """

    name: str | None
    number: int | None
    expires: float


class EnrolError(ValueError):
    """An enrolment is refused. `kind` is a short category, for counters."""

    def __init__(self, kind: str, reason: str) -> None:
        super().__init__(reason)
        self.kind = kind


class Register:
    """Open register. `wall` returns the seconds since 1970, for the expiry of invitations."""

    def __init__(
        self, path: Path, clients: int | None = None, wall: Callable[[], float] = time.time
    ) -> None:
        """Open the register of a run.

        `clients` is K, if a server starts or resumes the run; a missing file is then created.
        Raises RunFolderError if the file is missing otherwise, or has another K.
        """
        self.path = path
        self._wall = wall
        self._lock = threading.Lock()
        if clients is not None and not path.exists():
            _make(path, clients)
        if not path.exists():
            raise RunFolderError(f"no run was served from this folder: {path} is missing")
        self._db = _opened(path)
        # A separate connection, so that readers never wait for a write.
        self._reader = _opened(path)
        self._reading = threading.Lock()
        with _told(path):
            [version] = self._db.execute("PRAGMA user_version").fetchone()
            if version != _VERSION:
                raise RunFolderError(
                    f"{path} was written by another version of dure, or is incomplete"
                )
            self._seal()
            [self.places] = self._db.execute("SELECT clients FROM run").fetchone()
        if clients is not None and clients != self.places:
            raise RunFolderError(
                f"{path} belongs to a run with {self.places} clients, not {clients}"
            )

    def _seal(self) -> None:
        """Compare every client's row with its checksum; add checksums to an older register."""
        names = "SELECT count(*) FROM sqlite_master WHERE name = 'seals'"
        if not self._db.execute(names).fetchone()[0]:
            with self._change() as db:
                db.execute(_SEALS)
                rows = db.execute(f"SELECT {_COLUMNS} FROM clients").fetchall()
                sums = [(row[0], _sum(row)) for row in rows]
                db.executemany("INSERT OR REPLACE INTO seals VALUES (?, ?)", sums)
        # A transaction, so that both reads see the same version of the file.
        self._db.execute("BEGIN")
        try:
            rows = self._db.execute(f"SELECT {_COLUMNS} FROM clients").fetchall()
            seals = dict(self._db.execute("SELECT number, sum FROM seals").fetchall())
        finally:
            self._db.execute("COMMIT")
        found = {row[0]: _sum(row) for row in rows}
        wrong = [one for one in {*found, *seals} if found.get(one) != seals.get(one)]
        if wrong:
            raise RunFolderError(
                f"{self.path} is damaged: client {min(map(str, wrong))} has changed since its "
                "enrolment: restore it from a copy"
            )

    def close(self) -> None:
        self._db.close()
        self._reader.close()

    def __enter__(self) -> Register:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def invite(
        self, name: str | None = None, number: int | None = None, lasts: float = WEEK
    ) -> str:
        """Create an invitation, and return its token, which is valid once, for `lasts` seconds.

        The token is not stored and cannot be shown again. Raises ValueError for a name or number
        that is taken.
        """
        if not 0 < lasts < float("inf"):
            raise ValueError(
                f"the lifetime of an invitation has to be more than 0 s, not {lasts} s"
            )
        name = None if name is None else clean_name(name)
        token = secrets.token_hex(16)
        with self._change() as db:
            self._check_free(db, name, number)
            row = (_hash(token), name, number, self._wall() + lasts)
            db.execute("INSERT INTO invitations VALUES (?, ?, ?, ?, NULL)", row)
        return token

    def withdraw(self) -> int:
        """Invalidate all open invitations, and return their number."""
        with self._change() as db:
            return db.execute("DELETE FROM invitations WHERE used IS NULL").rowcount

    def enrol(
        self, key: str, name: str = "", wants: int | None = None, token: str | None = None
    ) -> RegisteredClient:
        """Enrol a client with this key; return the same client for a known key.

        The caller has checked the key by `is_proven`. `token` is that of an invitation; None admits
        any client. Raises EnrolError without any change: a token stays valid after a refusal.
        """
        with self._change() as db:
            known = _client(db, "key", key)
            if known is not None:
                check_same(known, name, wants)
                return known
            invitation = None if token is None else self._invitation(db, token)
            if invitation is not None:
                name = _agreed("name", invitation.name, name or None) or ""
                wants = _agreed("number", invitation.number, wants)
            name = clean_name(name) if name else ""
            self._check_free(db, name or None, wants)
            number = self._next(db) if wants is None else wants
            if not name:
                name = f"client {number}"
                self._check_free(db, name, None)
            row = (number, key, name, self._wall(), "enrolled")
            db.execute(f"INSERT INTO clients VALUES (?, ?, ?, ?, ?, {_NEXT_CHANGE})", row)
            db.execute("INSERT OR REPLACE INTO seals VALUES (?, ?)", (number, _sum(row)))
            if token is not None:
                used = (number, _hash(token))
                db.execute("UPDATE invitations SET used = ? WHERE hash = ?", used)
            return RegisteredClient(number, key, name, row[3], "enrolled")

    def revoke(self, who: str) -> RegisteredClient:
        """Revoke a client: its key becomes invalid, number and key stay taken, the name is free.

        `who` is a number or a name. Raises ValueError for an unknown client.
        """
        with self._change() as db:
            client = self._named(db, who)
            self._set(db, client._replace(state="revoked"))
        return client

    def forget(self, who: str) -> RegisteredClient:
        """Revoke a client, and delete all its data except its number."""
        with self._change() as db:
            client = self._named(db, who)
            self._set(db, RegisteredClient(client.number, None, None, None, "forgotten"))
            db.execute("DELETE FROM invitations WHERE used = ?", (client.number,))
        with self._lock, _told(self.path):
            # Truncates the write-ahead log, which still contains the old row.
            self._db.execute("PRAGMA wal_checkpoint(TRUNCATE)").fetchone()
        return client

    def clients(self) -> list[RegisteredClient]:
        """Return all clients by number."""
        with self._reading, _told(self.path):
            rows = self._reader.execute(f"SELECT {_COLUMNS} FROM clients ORDER BY number")
            return [RegisteredClient(*row) for row in rows]

    def invitations(self) -> list[Invitation]:
        """Return the valid invitations by expiry."""
        with self._reading, _told(self.path):
            rows = self._reader.execute(
                "SELECT name, number, expires FROM invitations "
                "WHERE used IS NULL AND expires > ? ORDER BY expires",
                (self._wall(),),
            )
            return [Invitation(*row) for row in rows]

    def version(self) -> int:
        """Return a number that changes with every change by any process.

        Takes some microseconds.
        """
        with self._reading, _told(self.path):
            return int(self._reader.execute("PRAGMA data_version").fetchone()[0])

    def changes(self, since: int) -> tuple[int, list[RegisteredClient]]:
        """Return the number of the last change, and the clients changed after change `since`."""
        with self._reading, _told(self.path):
            rows = self._reader.execute(
                f"SELECT change, {_COLUMNS} FROM clients WHERE change > ? ORDER BY change", (since,)
            ).fetchall()
        return (rows[-1][0] if rows else since), [RegisteredClient(*row[1:]) for row in rows]

    @contextmanager
    def _change(self) -> Iterator[sqlite3.Connection]:
        """Context manager: a transaction."""
        with self._lock, _told(self.path):
            self._db.execute("BEGIN IMMEDIATE")
            try:
                yield self._db
                self._db.execute("COMMIT")
            finally:
                # Unless SQLite has rolled back itself, as for a full disk.
                if self._db.in_transaction:
                    self._db.execute("ROLLBACK")

    def _invitation(self, db: sqlite3.Connection, token: str) -> Invitation:
        row = db.execute(
            "SELECT name, number, expires, used FROM invitations WHERE hash = ?", (_hash(token),)
        ).fetchone()
        if row is None:
            raise EnrolError("wrong token", "the token is not one of this server's invitations")
        *said, used = row
        invitation = Invitation(*said)
        if used is not None:
            raise EnrolError("used token", "the token was used already: ask for a new one")
        if invitation.expires <= self._wall():
            raise EnrolError("expired token", "the token has expired: ask for a new one")
        return invitation

    def _check_free(self, db: sqlite3.Connection, name: str | None, number: int | None) -> None:
        """Check that the name and the number are free. Raises EnrolError otherwise."""
        if number is not None and not 0 <= number < self.places:
            reason = f"there is no client {number}: client numbers are 0 to {self.places - 1}"
            raise EnrolError("wrong number", reason)
        if number is not None and _client(db, "number", number) is not None:
            raise EnrolError("number taken", f"the number {number} is taken: choose another")
        other = None if name is None else _client(db, "name", name, "AND state = 'enrolled'")
        if other is not None:
            reason = f"client {other.number} is called {name!r} already: choose another name"
            raise EnrolError("name taken", reason)

    def _next(self, db: sqlite3.Connection) -> int:
        """Return the smallest free number."""
        # A fast path: numbers mostly have no gaps, and thousands of clients may enrol in a row.
        (count,) = db.execute("SELECT count(*) FROM clients").fetchone()
        (highest,) = db.execute("SELECT max(number) FROM clients").fetchone()
        if count < self.places and highest in (None, count - 1):
            return int(count)
        taken = {number for (number,) in db.execute("SELECT number FROM clients")}
        free = next((number for number in range(self.places) if number not in taken), None)
        if free is None:
            raise EnrolError("full", f"all {self.places} clients of this run are enrolled")
        return free

    def _named(self, db: sqlite3.Connection, who: str) -> RegisteredClient:
        """Return the client with this number or name. Raises ValueError if unknown or forgotten."""
        if who in map(str, range(self.places)):
            client = _client(db, "number", int(who))
        else:
            # Of the clients with this name over time, the enrolled client comes first.
            name = unicodedata.normalize("NFC", who)
            client = _client(db, "name", name, "ORDER BY state = 'enrolled' DESC, enrolled DESC")
        if client is None:
            raise ValueError(f"no client has the name {who!r}: dure clients list shows the clients")
        if client.state == "forgotten":
            raise ValueError(f"client {who} is forgotten already")
        return client

    def _set(self, db: sqlite3.Connection, client: RegisteredClient) -> None:
        db.execute(
            "UPDATE clients SET key = ?, name = ?, enrolled = ?, state = ?, "
            f"change = {_NEXT_CHANGE} WHERE number = ?",
            (*client[1:], client.number),
        )
        row = (client.number, _sum(client))
        db.execute("INSERT OR REPLACE INTO seals VALUES (?, ?)", row)


_COLUMNS = "number, key, name, enrolled, state"
_NEXT_CHANGE = "(SELECT COALESCE(MAX(change), 0) + 1 FROM clients)"


def _sum(row: Sequence[object]) -> str:
    """Return the checksum of a client: number, key, name, time of enrolment, state."""
    number, key, name, enrolled, state = row
    # SQLite returns an integer in a REAL column as a float.
    when = float(enrolled) if isinstance(enrolled, int) else enrolled
    return checksum(json.dumps([number, key, name, when, state], default=repr).encode())


def clean_name(name: str) -> str:
    """Normalise a name. Raises EnrolError for an invalid name."""
    name = unicodedata.normalize("NFC", name)
    fit = printable(name) == name == name.strip() and 0 < len(name) <= MOST_NAME
    # A name of digits only could be confused with a number.
    if not fit or name.isdecimal():
        reason = f"a name needs 1 to {MOST_NAME} printable characters, not only digits"
        raise EnrolError("wrong name", reason)
    return name


def check_same(client: RegisteredClient, name: str, wants: int | None) -> None:
    """Check that a known client requests its own number and name. Raises EnrolError otherwise."""
    if client.state != "enrolled":
        raise EnrolError("revoked", f"client {client.number} and its key were revoked")
    if wants is not None and wants != client.number:
        reason = f"this key is client {client.number}, and cannot be client {wants} too"
        raise EnrolError("number taken", reason)
    if name and unicodedata.normalize("NFC", name) != client.name:
        reason = f"this key is enrolled as {client.name!r}, and cannot be {name!r} too"
        raise EnrolError("name taken", reason)


Wish = TypeVar("Wish", int, str)


def _agreed(what: str, invited: Wish | None, wished: Wish | None) -> Wish | None:
    """Return the invitation's value, or else the client's. Raises EnrolError if they differ."""
    if invited is not None and wished is not None and invited != wished:
        raise EnrolError(f"wrong {what}", f"the invitation is for the {what} {invited!r}")
    return wished if invited is None else invited


def _hash(token: str) -> str:
    # Tokens have 128 random bits, which cannot be guessed, so a plain hash is sufficient.
    return hashlib.sha256(token.encode()).hexdigest()


def _client(
    db: sqlite3.Connection, column: str, value: object, more: str = ""
) -> RegisteredClient | None:
    row = db.execute(
        f"SELECT {_COLUMNS} FROM clients WHERE {column} = ? {more}", (value,)
    ).fetchone()
    return None if row is None else RegisteredClient(*row)


def _make(path: Path, clients: int) -> None:
    """Create the file atomically, empty except for K."""
    beside = path.with_name(f".{path.name}.{os.getpid()}")
    with _told(path):
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            # Left by a killed process: the next process may get its process id, as in a container.
            beside.unlink(missing_ok=True)
            # Names of people and places are private.
            os.close(os.open(beside, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600))
        except OSError as error:
            raise RunFolderWriteError(f"cannot write {path}: {error.strerror}") from error
        db = sqlite3.connect(beside, isolation_level=None)
        try:
            db.executescript(f"BEGIN; {_SCHEMA} {_SEALS} PRAGMA user_version = {_VERSION}; COMMIT;")
            db.execute("INSERT INTO run VALUES (?)", (clients,))
        finally:
            db.close()
        os.replace(beside, path)
        sync_folder(path.parent)


def _opened(path: Path) -> sqlite3.Connection:
    try:
        # SQLite follows links, and opens pipes and devices.
        check_file(path)
    except OSError as error:
        raise RunFolderError(f"{path} cannot be used: {error.strerror}") from error
    with _told(path):
        db = sqlite3.connect(path, timeout=_PATIENCE, isolation_level=None, check_same_thread=False)
        db.execute("PRAGMA journal_mode = WAL").fetchone()
        db.execute("PRAGMA synchronous = FULL")
        # Deleted data are overwritten.
        db.execute("PRAGMA secure_delete = ON").fetchone()
        return db


@contextmanager
def _told(path: Path) -> Iterator[None]:
    try:
        yield
    except sqlite3.Error as error:
        # For example a full disk. A file that is not a database raises another error class.
        passing = isinstance(error, sqlite3.OperationalError)
        kind = RunFolderWriteError if passing else RunFolderError
        raise kind(f"{path} cannot be used: {error}") from error
