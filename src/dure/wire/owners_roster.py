"""Who the clients of a federation are, as its owner says and signs, and not its server.

Clients of a secure sum agree on keys through the server. One that lies could put keys of its own in
the place of every other client's, and read what it is sent. Against that each client signs its keys
with its identity, and this list says whose identities count. So it has to come from somebody else
than the server: the *owner* of the federation, a person with a key of their own, who has the public
keys from the clients themselves and signs the list on a machine that serves nothing. The server
hands the list to clients as it is, and need not be trusted for that: a client knows its owner by
the public key or its fingerprint, which it got on another way, such as a telephone.

    {"federation": "heart study", "expires": "2027-11-26", "owner": KEY,
     "members": [{"number": 0, "name": "ward 3", "identity": KEY}, …], "signature": …}

Signed are a line and a JSON array:

    dure owner's roster 1
    ["heart study", "2027-11-26", OWNER, [[0, "ward 3", IDENTITY], …]]

A roster is made before a run exists. It names no run and is good for every run of so many clients,
until it expires. The numbers of its members are those of the clients, 0 to n - 1, all of them: who
is in a run and not on the roster is nobody. Which run takes which roster is pinned by clients
(`Pinned`): within a run it does not change, but that its owner may renew it until a later day.

Cost: 64 bytes of signature, about 120 bytes a client, one signature to check at a check-in.

Source: Bonawitz et al., Practical Secure Aggregation for Privacy-Preserving Machine Learning (CCS
2017), which asks for a public key infrastructure where the server does not follow the protocol.
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
    check_apart,
    check_key,
    differences,
    fingerprint,
    is_said,
    key_said,
    lines_of,
    read_body,
)
from dure.wire.signatures import Key, is_signed

MOST = 1 << 19
"""Bytes of a roster, at most: it travels in the answer to a check-in. 4,000 clients with short
names fit, and 1,200 with any."""

FILE = "owners-roster.json"
"""Its name in a run folder."""

DAYS = 365.0
"""For which a roster is good, where nobody says otherwise."""

Name = Annotated[str, msgspec.Meta(min_length=1, max_length=MOST_NAME)]
_FORM = "NUMBER NAME PUBLICKEY"


class Listed(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A client. identity: its public key, Ed25519, 64 hexadecimal digits."""

    number: Number
    name: Name
    identity: PublicKey

    def __str__(self) -> str:
        return f"client {self.number} ({self.name})"


class OwnersRoster(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """federation: as its owner calls it. expires: the last day on which it is good, in UTC. owner:
    the public key by which it is signed. members: by their numbers."""

    federation: Name
    expires: date
    owner: PublicKey
    members: tuple[Listed, ...]
    signature: Signature

    @classmethod
    def signed(
        cls, federation: str, members: Iterable[Listed], key: Key, days: float = DAYS
    ) -> OwnersRoster:
        """A roster that is good for so many days. key: its owner's.

        Raises RosterError for what every client would refuse: numbers with gaps, two of one name or
        one key, or more clients than `MOST` bytes hold.
        """
        if not 0 < days < 36500:
            raise RosterError("no roster", f"a roster is good for some days, not {days:g}")
        expires = (datetime.now(timezone.utc) + timedelta(days=days)).date()
        ordered = tuple(sorted(members, key=lambda member: member.number))
        signature = key.sign(_signed(federation, expires, key.public, ordered)).hex()
        roster = cls(federation, expires, key.public, ordered, signature)
        # What cannot be read again is found by reading it.
        return cls.from_json(roster.to_json())

    def to_json(self) -> bytes:
        return msgspec.json.encode(self) + b"\n"

    @classmethod
    def from_json(cls, body: bytes | bytearray) -> OwnersRoster:
        """The inverse of `to_json`, of bytes from anybody.

        The owner that it names has signed it; whether that is the right one, `check` tells. Raises
        RosterError.
        """
        roster = read_body(body, cls, MOST)
        check_key("the roster's owner", roster.owner)
        text = _signed(roster.federation, roster.expires, roster.owner, roster.members)
        if not is_signed(roster.owner, text, bytes.fromhex(roster.signature)):
            raise RosterError("not signed", "the roster is not signed by its owner, or was changed")
        _check_text(roster.federation)
        check_apart(roster.members, "name", "identity")
        numbers = [member.number for member in roster.members]
        if not numbers or numbers[-1] != len(numbers) - 1:
            missing = min(set(range(len(numbers) + 1)) - set(numbers))
            reason = f"the roster has no client {missing}: its clients are 0 to n - 1, all of them"
            raise RosterError("no roster", reason)
        return roster

    @classmethod
    def read(cls, path: Path) -> OwnersRoster:
        """The roster of a file, as `from_json`. Raises RosterError, which names the file."""
        try:
            return cls.from_json(bytes_of(path))
        except RosterError as error:
            raise RosterError(error.kind, f"{path}: {error}") from error

    @property
    def identities(self) -> dict[int, str]:
        """Public keys by the clients' numbers."""
        return {member.number: member.identity for member in self.members}

    def number_of(self, identity: str) -> int | None:
        """The number of the client with this public key; None where it is not listed."""
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
    """What a file of a roster holds, and no more than is taken. Raises RosterError."""
    try:
        with path.open("rb") as file:
            return file.read(MOST + 1)
    except OSError as error:
        reason = f"cannot read the roster {path}: {error.strerror}"
        raise RosterError("no roster", reason) from error


def check_owner(roster: OwnersRoster, owner: str) -> None:
    """Raises RosterError unless this owner has signed it. owner: key or fingerprint, `key_said`."""
    if not is_said(roster.owner, owner):
        raise RosterError(
            "other owner",
            f"the roster is signed by the owner {fingerprint(roster.owner)}, and not by the one "
            f"that was given, {_shown(owner)}",
        )


def check_date(roster: OwnersRoster, today: date | None = None) -> None:
    """Raises RosterError where it has expired. today: in UTC; by default now."""
    today = datetime.now(timezone.utc).date() if today is None else today
    if today > roster.expires:
        reason = f"the roster has expired on {roster.expires}: its owner signs a new one"
        raise RosterError("expired", reason)


def check_count(roster: OwnersRoster, clients: int) -> None:
    """Raises RosterError unless it has all clients of a run, and no others."""
    listed = len(roster.members)
    if listed != clients:
        reason = f"the roster has {listed} clients, and the run {clients}"
        raise RosterError("other count", reason)


def check_own(roster: OwnersRoster, identity: str, number: int | None = None) -> None:
    """Raises RosterError unless a client is on it. number: that the server gave it; None: none."""
    listed = roster.number_of(identity)
    if listed is None:
        raise RosterError(
            "not listed",
            f"the roster does not have this client's key, {identity}: its owner needs it, and the "
            f"client the --state in which it lies (dure roster key)",
        )
    if number is not None and number != listed:
        reason = f"this client is {number} for the server, and {listed} on the roster"
        raise RosterError("other number", reason)


def read_members(path: Path) -> list[Listed]:
    """A list of clients that an owner has written, a client a line: number, name, public key.

    The name may have spaces. A fingerprint is not enough: nothing can be checked with it alone.
    Lines that are empty or begin with # do not count. Raises ValueError for anything else.
    """
    found = []
    for line in lines_of(path, "list of clients", _FORM):
        name, _, key = line.rest.strip().rpartition(" ")
        try:
            identity = key_said(key)
            check_name(name.strip())
        except ValueError as error:
            raise ValueError(f"{line.place}: a line is {_FORM}: {error}") from None
        if len(identity) != 64:
            raise ValueError(f"{line.place}: {key} is a fingerprint: give the whole public key")
        found.append(Listed(line.number, name.strip(), identity))
    return found


class Pinned:
    """The roster with which a run was begun, in a folder; it takes no other one there.

    path: the file. run: how the run is called, for errors.
    """

    def __init__(self, path: Path, run: str) -> None:
        self._path = path
        self._run = run

    @classmethod
    def of_client(cls, folder: Path, run: str) -> Pinned:
        """In the folder of a client, which may have several runs."""
        check_run(run)
        return cls(folder / f"owners-roster-{run}.json", run)

    def take(self, roster: OwnersRoster) -> None:
        """Pins the first one, and one that was renewed. Raises as `check`, and RunFolderWriteError
        where it cannot be."""
        self.check(roster)
        if not self._path.exists() or OwnersRoster.read(self._path) != roster:
            write_atomically(self._path, roster.to_json())

    def check(self, roster: OwnersRoster) -> None:
        """Raises RosterError for another one than the first, by what has changed."""
        if not self._path.exists():
            return
        changed = changes(OwnersRoster.read(self._path), roster)
        if changed:
            reason = (
                f"the roster is not the one with which {self._run} was begun: {'; '.join(changed)}"
            )
            raise RosterError("other roster", reason)


def changes(old: OwnersRoster, new: OwnersRoster) -> list[str]:
    """In what two rosters differ, in words, but for the day until which they are good."""
    found = []
    if old.owner != new.owner:
        found.append(f"{fingerprint(new.owner)} has signed it, and {fingerprint(old.owner)} before")
    if old.federation != new.federation:
        found.append(f"it is of the federation {new.federation!r}, and was of {old.federation!r}")
    return found + differences(old.members, new.members)


def _check_text(federation: str) -> None:
    try:
        check_name(federation)
    except ValueError as error:
        raise RosterError("no roster", f"the federation's name is none: {error}") from error


def _signed(federation: str, expires: date, owner: str, members: Iterable[Listed]) -> bytes:
    listed = [[one.number, one.name, one.identity] for one in members]
    # As JSON, so that no two different rosters have the same bytes.
    written = json.dumps([federation, expires.isoformat(), owner, listed])
    return b"dure owner's roster 1\n" + written.encode("ascii")


def _shown(owner: str) -> str:
    """A fingerprint in groups of four, of a key or a fingerprint."""
    if len(owner) == 64:
        return fingerprint(owner)
    return " ".join(owner[at : at + 4] for at in range(0, len(owner), 4))
