"""Owner's roster: the list of a federation's clients, signed by its owner and not by its server.

Clients of a secure sum exchange keys through the server. A malicious server could replace every
other client's keys by its own, and read the messages. For protection each client signs its keys
with its identity, and this list names the valid identities. The list therefore has to come from
another party than the server: the *owner* of the federation, a person with a private key, who gets
the public keys from the clients themselves and signs the list on a machine that is not a server.
The server distributes the list unchanged and need not be trusted: a client knows its owner by the
public key or its fingerprint, which it got over another channel, such as a telephone.

    {"federation": "heart study", "expires": "2027-11-26", "owner": KEY,
     "members": [{"number": 0, "name": "ward 3", "identity": KEY}, …], "signature": …}

The signed bytes are a line and a JSON array:

    dure owner's roster 1
    ["heart study", "2027-11-26", OWNER, [[0, "ward 3", IDENTITY], …]]

A roster is made before a run exists. It names no run and is valid for every run with this number of
clients, until it expires. Its members have all the numbers of the clients, 0 to n - 1: a client
that is in a run and not on the roster is not accepted. Clients pin the roster of a run
(`PinnedOwnersRoster`): within a run only the expiry may change, when the owner renews the roster.

Cost: 64 bytes of signature, about 120 bytes per client, and the check of one signature per
check-in.

Source: Bonawitz et al., Practical Secure Aggregation for Privacy-Preserving Machine Learning (CCS
2017), which requires a public key infrastructure if the server does not follow the protocol.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from datetime import date, datetime, timedelta, timezone
from pathlib import Path
from typing import Annotated

import msgspec

from dure.record.disk import write_atomically
from dure.wire.boxes import (
    MOST_NAME,
    Number,
    PublicKey,
    Signature,
    check_name,
    check_run,
)
from dure.wire.members import (
    RosterError,
    check_distinct,
    check_key,
    differences,
    fingerprint,
    lines_of,
    matches_key,
    parse_key,
    read_body,
)
from dure.wire.signatures import Key, is_signed

MOST = 1 << 19
"""Maximum bytes of a roster, which travels in the answer to a check-in.

Large enough for 4,000 clients with short names, and for 1,200 clients with any names.
"""

FILE = "owners-roster.json"
"""Name of the roster's file in a run folder."""

DAYS = 365.0
"""Default validity of a roster in days."""

Name = Annotated[str, msgspec.Meta(min_length=1, max_length=MOST_NAME)]
_FORM = "NUMBER NAME PUBLICKEY"


class Listed(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Client on a roster. `identity` is its Ed25519 public key, 64 hexadecimal digits."""

    number: Number
    name: Name
    identity: PublicKey

    def __str__(self) -> str:
        return f"client {self.number} ({self.name})"


class OwnersRoster(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """List of a federation's clients, signed by its owner.

    `federation` is the owner's name of the federation. `expires` is the last valid day, in UTC.
    `owner` is the public key of the signature. `members` are sorted by number.
    """

    federation: Name
    expires: date
    owner: PublicKey
    members: tuple[Listed, ...]
    signature: Signature

    @classmethod
    def signed(
        cls, federation: str, members: Iterable[Listed], key: Key, days: float = DAYS
    ) -> OwnersRoster:
        """Return a roster that is valid for `days` days, signed with the owner's key.

        Raises RosterError for a roster that every client would refuse: numbers with gaps, two
        clients with the same name or key, or more clients than `MOST` bytes hold.
        """
        if not 0 < days < 36500:
            raise RosterError(
                "no roster", f"the lifetime of a roster has to be more than 0 days, not {days:g}"
            )
        expires = (datetime.now(timezone.utc) + timedelta(days=days)).date()
        ordered = tuple(sorted(members, key=lambda member: member.number))
        signature = key.sign(_signed(federation, expires, key.public, ordered)).hex()
        roster = cls(federation, expires, key.public, ordered, signature)
        # Decoding the result finds every error that a client would find.
        return cls.from_json(roster.to_json())

    def to_json(self) -> bytes:
        return msgspec.json.encode(self) + b"\n"

    @classmethod
    def from_json(cls, body: bytes | bytearray) -> OwnersRoster:
        """Decode a roster from untrusted bytes, and check its signature.

        The signature is by the owner that the roster names; `check_owner` checks that this owner is
        the expected owner. Raises RosterError for an invalid roster.
        """
        roster = read_body(body, cls, MOST)
        check_key("the roster's owner", roster.owner)
        text = _signed(roster.federation, roster.expires, roster.owner, roster.members)
        if not is_signed(roster.owner, text, bytes.fromhex(roster.signature)):
            raise RosterError("not signed", "the roster is not signed by its owner, or was changed")
        _check_text(roster.federation)
        check_distinct(roster.members, "name", "identity")
        numbers = [member.number for member in roster.members]
        if not numbers or numbers[-1] != len(numbers) - 1:
            missing = min(set(range(len(numbers) + 1)) - set(numbers))
            reason = f"the roster has no client {missing}: it needs all clients from 0 to n - 1"
            raise RosterError("no roster", reason)
        return roster

    @classmethod
    def read(cls, path: Path) -> OwnersRoster:
        """Read and check the roster in a file. Raises RosterError, which names the file."""
        try:
            return cls.from_json(bytes_of(path))
        except RosterError as error:
            raise RosterError(error.kind, f"{path}: {error}") from error

    @property
    def identities(self) -> dict[int, str]:
        """Public keys by the clients' numbers."""
        return {member.number: member.identity for member in self.members}

    def number_of(self, identity: str) -> int | None:
        """Return the number of the client with this public key; None for an unlisted key."""
        for member in self.members:
            if member.identity == identity:
                return member.number
        return None

    def __str__(self) -> str:
        count = len(self.members)
        return (
            f"{self.federation!r}, {count} client{'' if count == 1 else 's'}, until "
            f"{self.expires}, signed by {fingerprint(self.owner)}"
        )


def bytes_of(path: Path) -> bytes:
    """Return at most `MOST` + 1 bytes of a roster's file.

    Raises RosterError if it is unreadable.
    """
    try:
        with path.open("rb") as file:
            return file.read(MOST + 1)
    except OSError as error:
        reason = f"cannot read the roster {path}: {error.strerror}"
        raise RosterError("no roster", reason) from error


def check_owner(roster: OwnersRoster, owner: str) -> None:
    """Check that this owner has signed the roster.

    `owner` is a public key or a fingerprint from `parse_key`. Raises RosterError otherwise.
    """
    if not matches_key(roster.owner, owner):
        raise RosterError(
            "other owner",
            f"the roster is signed by the owner {fingerprint(roster.owner)}, not by the given "
            f"owner, {_shown(owner)}",
        )


def check_date(roster: OwnersRoster, today: date | None = None) -> None:
    """Check that the roster has not expired. `today` is in UTC; None for the current day.

    Raises RosterError for an expired roster.
    """
    today = datetime.now(timezone.utc).date() if today is None else today
    if today > roster.expires:
        reason = f"the roster has expired on {roster.expires}: its owner has to sign a new one"
        raise RosterError("expired", reason)


def check_count(roster: OwnersRoster, clients: int) -> None:
    """Check that the roster has exactly as many clients as the run.

    Raises RosterError otherwise.
    """
    listed = len(roster.members)
    if listed != clients:
        reason = f"the roster has {listed} clients, but the run has {clients}"
        raise RosterError("other count", reason)


def check_own(roster: OwnersRoster, identity: str, number: int | None = None) -> None:
    """Check that the roster lists a client with this identity. Raises RosterError otherwise.

    `number` is the client's number by the server, which must be the listed number; None to skip
    this check.
    """
    listed = roster.number_of(identity)
    if listed is None:
        raise RosterError(
            "not listed",
            f"the roster does not have this client's key, {identity}: give the key to the "
            "roster's owner, and start the client with the --state folder that contains it (dure "
            "roster key)",
        )
    if number is not None and number != listed:
        reason = f"the server identifies this client as {number}, but the roster as {listed}"
        raise RosterError("other number", reason)


def read_members(path: Path) -> list[Listed]:
    """Read an owner's list of clients, a client per line: number, name, public key.

    The name may have spaces. A fingerprint is not sufficient, since a signature cannot be verified
    with a fingerprint. Empty lines and lines that begin with # are ignored. Raises ValueError for
    any other line.
    """
    found = []
    for line in lines_of(path, "list of clients", _FORM):
        name, _, key = line.rest.strip().rpartition(" ")
        try:
            identity = parse_key(key)
            check_name(name.strip())
        except ValueError as error:
            raise ValueError(f"{line.place}: a line has to be {_FORM}: {error}") from None
        if len(identity) != 64:
            raise ValueError(f"{line.place}: {key} is a fingerprint: give the whole public key")
        found.append(Listed(line.number, name.strip(), identity))
    return found


class PinnedOwnersRoster:
    """Roster pinned to a run in a folder, which refuses every other roster for that run.

    `path` is the file. `run` is the run's name in errors.
    """

    def __init__(self, path: Path, run: str) -> None:
        self._path = path
        self._run = run

    @classmethod
    def of_client(cls, folder: Path, run: str) -> PinnedOwnersRoster:
        """Return the pinned roster of a run in a client's folder, which may have several runs."""
        check_run(run)
        return cls(folder / f"owners-roster-{run}.json", run)

    def take(self, roster: OwnersRoster) -> None:
        """Pin the first roster of the run, or its renewal.

        Raises RosterError as `check` does, and RunFolderWriteError if the file cannot be written.
        """
        self.check(roster)
        if not self._path.exists() or OwnersRoster.read(self._path) != roster:
            write_atomically(self._path, roster.to_json())

    def check(self, roster: OwnersRoster) -> None:
        """Check a roster against the pinned roster. Raises RosterError, which names the changes."""
        if not self._path.exists():
            return
        changed = changes(OwnersRoster.read(self._path), roster)
        if changed:
            reason = (
                f"the roster differs from the one with which {self._run} was started: "
                f"{'; '.join(changed)}"
            )
            raise RosterError("other roster", reason)


def changes(old: OwnersRoster, new: OwnersRoster) -> list[str]:
    """Describe the differences of two rosters, a sentence each; ignores the expiry."""
    found = []
    if old.owner != new.owner:
        found.append(f"{fingerprint(new.owner)} has signed it, and {fingerprint(old.owner)} before")
    if old.federation != new.federation:
        found.append(f"it names the federation {new.federation!r}, but before {old.federation!r}")
    return found + differences(old.members, new.members)


def _check_text(federation: str) -> None:
    try:
        check_name(federation)
    except ValueError as error:
        raise RosterError("no roster", f"the federation's name is invalid: {error}") from error


def _signed(federation: str, expires: date, owner: str, members: Iterable[Listed]) -> bytes:
    listed = [[one.number, one.name, one.identity] for one in members]
    # JSON, so that two different rosters never have the same bytes.
    written = json.dumps([federation, expires.isoformat(), owner, listed])
    return b"dure owner's roster 1\n" + written.encode("ascii")


def _shown(owner: str) -> str:
    """Return the fingerprint of a key, or a fingerprint, in groups of four digits."""
    if len(owner) == 64:
        return fingerprint(owner)
    return " ".join(owner[at : at + 4] for at in range(0, len(owner), 4))
