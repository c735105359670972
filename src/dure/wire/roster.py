"""Roster of a run: the members and their keys, so that clients can seal messages to each other.

A roster lists the clients of a run: number, name, identity and box key. The identity signs the box
key (`dure.wire.boxes`), and the server signs the whole roster. A client pins the first roster of a
run on its disk (`PinnedRoster`), refuses any other roster, and reports the differences.

Attacks of a server that wants to read sealed messages:

- The server cannot replace the box key of a client: the client's identity has not signed the other
  key. Nor can the server present the client's box key of another run.
- The server can enrol a malicious client, and as that client reads every message sealed to it. In
  split learning with clients in turn, such a message is the head. Encryption cannot prevent this
  attack: the server is then a legitimate receiver.
- The server can send each client a different roster from the start, in which every other client is
  malicious, and so read and forward every message. A client that has no other channel cannot detect
  this attack.
- The server can do neither later in the run: a pinned roster does not change.

Two defences exist, and both need a channel that is not the server's, such as a telephone. Clients
can compare the fingerprint of the roster (`Roster.fingerprint`): if every listed client has
confirmed it, all clients have the same list without an additional client; a client that cannot be
reached may be malicious. Or every client has a list of the fingerprints that the others have read
out (`read_identities`): then only listed clients take part. Without either defence, a client trusts
its server not to have enrolled malicious clients. A client that has lost its folder trusts the
server once more, because it pins the next roster.

Source: trust on first use, with pinning, as in SSH (RFC 4251, 4.1).
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from pathlib import Path

import msgspec

from dure.record.disk import write_atomically
from dure.record.untrusted_files import contents
from dure.wire.boxes import Member, PublicKey, Run, Signature, check_run
from dure.wire.members import (
    RosterError,
    check_distinct,
    check_key,
    differences,
    fingerprint,
    grouped,
    lines_of,
    matches_key,
    parse_key,
    read_body,
)
from dure.wire.requests import MOST_BODY
from dure.wire.signatures import Key, is_signed


class Roster(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """List of the clients of a run, signed by the server.

    `server` is the server's public key. `members` are sorted by number.
    """

    run: Run
    server: PublicKey
    members: tuple[Member, ...]
    signature: Signature

    @classmethod
    def signed(cls, run: str, members: Iterable[Member], key: Key) -> Roster:
        """Return the roster of a run, signed by its server.

        Raises RosterError as `check` does, and for more clients than `MOST_BODY` bytes hold, which
        are at least 1700.
        """
        check_run(run)
        ordered = tuple(sorted(members, key=lambda member: member.number))
        signature = key.sign(_signed(run, key.public, ordered)).hex()
        roster = cls(run, key.public, ordered, signature)
        # Every client would refuse a larger roster.
        if len(roster.to_json()) > MOST_BODY:
            reason = f"{len(ordered)} clients are too many for one roster of {MOST_BODY} bytes"
            raise RosterError("no roster", reason)
        check(roster, key.public)
        return roster

    def to_json(self) -> bytes:
        return msgspec.json.encode(self)

    @classmethod
    def from_json(cls, body: bytes | bytearray) -> Roster:
        """Decode a roster from untrusted bytes, without checks of signatures.

        Raises RosterError.
        """
        return read_body(body, cls, MOST_BODY)

    def member(self, number: int) -> Member:
        """Return the member with this number. Raises RosterError for an unknown number."""
        for member in self.members:
            if member.number == number:
                return member
        raise RosterError("unknown client", f"there is no client {number} in the roster")

    @property
    def fingerprint(self) -> str:
        """Fingerprint of the roster: 64 digits, in groups of four.

        Twice the digits of a key's fingerprint: an attacker who may choose both rosters finds a
        collision with the square root of the work of a second preimage.
        """
        return grouped(_signed(self.run, self.server, self.members), 64)


def check(roster: Roster, server_key: str) -> None:
    """Check the signature of the server, and of each client on its box key.

    `server_key` is the server's public key, as the client knows it. Raises RosterError for an
    invalid roster.
    """
    if roster.server != server_key:
        reason = (
            f"the roster is signed by the server {fingerprint(roster.server)}, but this server is "
            f"{fingerprint(server_key)}"
        )
        raise RosterError("other server", reason)
    check_key("the server", server_key)
    signed = _signed(roster.run, roster.server, roster.members)
    if not is_signed(server_key, signed, bytes.fromhex(roster.signature)):
        raise RosterError("not signed", "the roster is not signed by its server, or was changed")
    check_distinct(roster.members, "name", "identity", "box")
    for member in roster.members:
        if not member.is_true(roster.run):
            reason = f"{member} has not signed the box key that the roster has for it in this run"
            raise RosterError("other box", reason)


def check_known(roster: Roster, known: Mapping[int, str]) -> None:
    """Check every member against a list of identities.

    `known` has public keys or fingerprints by number, from `read_identities`. Raises RosterError
    for an unlisted client, and for another identity than the listed identity.
    """
    for member in roster.members:
        said = known.get(member.number)
        if said is None:
            reason = f"{member} is in the roster, but not on your list of identities"
            raise RosterError("unknown client", reason)
        if not matches_key(member.identity, said):
            reason = (
                f"{member} has the fingerprint {fingerprint(member.identity)} in the roster, but "
                "another one on your list of identities"
            )
            raise RosterError("other identity", reason)


def read_identities(path: Path) -> dict[int, str]:
    """Read a list of identities that a person got from the clients themselves.

    Each line has a client's number, and its fingerprint or public key. Spaces and colons within a
    fingerprint, empty lines and lines that begin with # are ignored. Raises ValueError for any
    other line.
    """
    form = "NUMBER FINGERPRINT"
    found: dict[int, str] = {}
    for line in lines_of(path, "list of identities", form):
        try:
            found[line.number] = parse_key(line.rest)
        except ValueError:
            raise ValueError(f"{line.place}: a line has to be {form}") from None
    return found


class PinnedRoster:
    """Roster that a client has pinned for a run; the client refuses any other roster."""

    def __init__(self, path: Path, run: str, roster: Roster | None) -> None:
        self._path = path
        self._run = run
        self.roster = roster
        """Pinned roster; None before the first roster."""

    @classmethod
    def load(cls, folder: Path, run: str) -> PinnedRoster:
        """Load the pinned roster of a run from the file `roster-RUN.json` in a folder.

        Raises RosterError for a damaged file.
        """
        check_run(run)
        path = folder / f"roster-{run}.json"
        try:
            body = contents(path, most=MOST_BODY)
        except FileNotFoundError:
            return cls(path, run, None)
        except OSError as error:
            raise RosterError("damaged", f"cannot read {path}: {error.strerror}") from error
        try:
            roster = Roster.from_json(body)
            check(roster, roster.server)
        except RosterError as error:
            raise RosterError("damaged", f"{path} is damaged: {error}") from error
        if roster.run != run:
            raise RosterError("damaged", f"{path} is the roster of the run {roster.run}")
        return cls(path, run, roster)

    def take(
        self,
        roster: Roster,
        own: Member,
        server_key: str | None = None,
        known: Mapping[int, str] | None = None,
    ) -> Roster:
        """Check a roster and pin the first roster of the run.

        Args:
            roster: Roster to check.
            own: Description of this client, which must be on the roster.
            server_key: The server's public key; None for the key of the pinned roster, or at first
                the key that the roster names.
            known: Identities for `check_known`; this client's own entry is optional.

        Returns:
            The pinned roster.

        Raises:
            RosterError: The roster is not acceptable. Nothing is pinned.
            RunFolderWriteError: The file cannot be written.
        """
        if roster.run != self._run:
            reason = f"the roster is of the run {roster.run}, but this is the run {self._run}"
            raise RosterError("other run", reason)
        check(roster, roster.server if server_key is None else server_key)
        self._check_unchanged(roster)
        _check_own(roster, own)
        if known is not None:
            check_known(roster, {own.number: own.identity, **known})
        if self.roster is None:
            write_atomically(self._path, roster.to_json())
            self.roster = roster
        return self.roster

    def _check_unchanged(self, roster: Roster) -> None:
        if self.roster is None:
            return
        changed = changes(self.roster, roster)
        if changed:
            reason = (
                f"the roster of the run {self._run} differs from the first one: "
                f"{'; '.join(changed)}"
            )
            raise RosterError("other roster", reason)


def changes(old: Roster, new: Roster) -> list[str]:
    """Describe the differences of two rosters, a sentence each."""
    found = []
    if old.server != new.server:
        found.append(
            f"the server signs as {fingerprint(new.server)}, but was {fingerprint(old.server)} "
            "before"
        )
    return found + differences(old.members, new.members, {"box": "has another box key"})


def _check_own(roster: Roster, own: Member) -> None:
    said = roster.member(own.number)
    if said != own:
        reason = f"the keys or the name of {own} in the roster differ from this client's own"
        raise RosterError("not me", reason)


def _signed(run: str, server: str, members: Iterable[Member]) -> bytes:
    listed = [[one.number, one.name, one.identity, one.box, one.signature] for one in members]
    # JSON, so that two different rosters never have the same bytes.
    return b"dure roster 1\n" + json.dumps([run, server, listed]).encode("ascii")
