"""Who takes part in a run, so that clients can seal messages for each other.

A roster lists the clients of a run: number, name, identity and box key. The identity signs the box
key (`dure.wire.boxes`), and the server signs the whole. A client pins the first roster of a run on
its disk (`Pinned`), and refuses any other by saying what has changed.

What a server that wants to read what clients seal can do, and what not:

- It cannot put a box key of its own beside the identity of a client: the identity has not signed
  it. Nor can it take the box key that the client had in another run.
- It can enrol a client of its own, and as that client it reads whatever is sealed for it. In split
  learning with clients in turn, that is the head. No encryption can help: the server is then one of
  those for whom it is meant.
- It can tell each client another roster from the beginning, in which every other client is one of
  its own, and so pass everything on and read it. Nobody who has only this server to ask can notice.
- It cannot do either later in the run: a roster that was pinned does not change.

Two things help, and both need a way that is not the server's, such as a telephone. Clients compare
the fingerprint of the roster (`Roster.fingerprint`): if every client on it has confirmed it, then
all have the same list and nobody else is on it; one that nobody can reach may be the server's. Or
every client has a list of the fingerprints that the others read out to it (`read_identities`): then
nobody takes part who is not on it. Without either, a client trusts its server not to have enrolled
clients of its own. So does a client that has lost its folder: it pins anew.

Source: the first use of a key is trusted and then pinned, as in SSH (RFC 4251, 4.1).
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from pathlib import Path

import msgspec

from dure.record.disk import write_atomically
from dure.record.inside import contents
from dure.wire.boxes import Member, PublicKey, Run, Signature, check_run
from dure.wire.members import (
    RosterError,
    check_apart,
    check_key,
    differences,
    fingerprint,
    grouped,
    is_said,
    key_said,
    lines_of,
    read_body,
)
from dure.wire.requests import MOST_BODY
from dure.wire.signatures import Key, is_signed


class Roster(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """run: its id. server: the public key by which it signs. members: by their numbers. signature:
    by the server."""

    run: Run
    server: PublicKey
    members: tuple[Member, ...]
    signature: Signature

    @classmethod
    def signed(cls, run: str, members: Iterable[Member], key: Key) -> Roster:
        """The roster of a run, signed by its server.

        Raises RosterError as `check` does, and for more clients than `MOST_BODY` bytes hold, which
        are 1700 at least.
        """
        check_run(run)
        ordered = tuple(sorted(members, key=lambda member: member.number))
        signature = key.sign(_signed(run, key.public, ordered)).hex()
        roster = cls(run, key.public, ordered, signature)
        # What every client would refuse.
        if len(roster.to_json()) > MOST_BODY:
            reason = f"{len(ordered)} clients are too many for one roster of {MOST_BODY} bytes"
            raise RosterError("no roster", reason)
        check(roster, key.public)
        return roster

    def to_json(self) -> bytes:
        return msgspec.json.encode(self)

    @classmethod
    def from_json(cls, body: bytes | bytearray) -> Roster:
        """The inverse of `to_json`, of bytes from anybody; not checked yet. Raises RosterError."""
        return read_body(body, cls, MOST_BODY)

    def member(self, number: int) -> Member:
        """Raises RosterError where there is none."""
        for member in self.members:
            if member.number == number:
                return member
        raise RosterError("unknown client", f"there is no client {number} in the roster")

    @property
    def fingerprint(self) -> str:
        """The same where the roster is the same: 64 digits, in groups of four.

        Twice as many as of a key: whoever may choose two rosters finds two whose first digits agree
        with the square root of the work that another key for given digits takes.
        """
        return grouped(_signed(self.run, self.server, self.members), 64)


def check(roster: Roster, server_key: str) -> None:
    """Raises RosterError unless the server has signed the roster, and each client its box key.

    server_key: the public key of the server, as the client knows it.
    """
    if roster.server != server_key:
        reason = (
            f"the roster is signed by the server {fingerprint(roster.server)}, "
            f"and this one is {fingerprint(server_key)}"
        )
        raise RosterError("other server", reason)
    check_key("the server", server_key)
    signed = _signed(roster.run, roster.server, roster.members)
    if not is_signed(server_key, signed, bytes.fromhex(roster.signature)):
        raise RosterError("not signed", "the roster is not signed by its server, or was changed")
    check_apart(roster.members, "name", "identity", "box")
    for member in roster.members:
        if not member.is_true(roster.run):
            reason = f"{member} has not signed the box key that the roster has for it in this run"
            raise RosterError("other box", reason)


def check_known(roster: Roster, known: Mapping[int, str]) -> None:
    """Raises RosterError for a client that is not on a list, or is not who the list says.

    known: by number, public keys or their fingerprints, as `read_identities` reads them.
    """
    for member in roster.members:
        said = known.get(member.number)
        if said is None:
            reason = f"{member} is in the roster, and not on your list of identities"
            raise RosterError("unknown client", reason)
        if not is_said(member.identity, said):
            reason = (
                f"{member} has the fingerprint {fingerprint(member.identity)} in the roster, "
                "and another one on your list of identities"
            )
            raise RosterError("other identity", reason)


def read_identities(path: Path) -> dict[int, str]:
    """A list of identities that its owner got from the clients themselves.

    A client a line: its number, and its fingerprint or its whole public key. Spaces and colons
    within a fingerprint do not count, nor do lines that are empty or begin with #. Raises
    ValueError for anything else.
    """
    form = "NUMBER FINGERPRINT"
    found: dict[int, str] = {}
    for line in lines_of(path, "list of identities", form):
        try:
            found[line.number] = key_said(line.rest)
        except ValueError:
            raise ValueError(f"{line.place}: a line is {form}") from None
    return found


class Pinned:
    """The first roster that a client took in a run; it takes no other one."""

    def __init__(self, path: Path, run: str, roster: Roster | None) -> None:
        self._path = path
        self._run = run
        self.roster = roster
        """None before the first."""

    @classmethod
    def kept_in(cls, folder: Path, run: str) -> Pinned:
        """The roster of the run that is pinned in a folder, `roster-RUN.json`.

        Raises RosterError for a file that is damaged.
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
        """Checks a roster and pins it if it is the first.

        own: what this client says of itself. server_key: None takes the one that is pinned, or at
        first the one that the roster names. known: see `check_known`; the client itself need not be
        on it. Raises RosterError for a roster that is not to be used, which pins nothing, and
        RunFolderWriteError where it cannot be kept.
        """
        if roster.run != self._run:
            reason = f"the roster is of the run {roster.run}, and this is the run {self._run}"
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
            reason = f"the roster of the run {self._run} is not the first one: {'; '.join(changed)}"
            raise RosterError("other roster", reason)


def changes(old: Roster, new: Roster) -> list[str]:
    """In what two rosters differ, in words."""
    found = []
    if old.server != new.server:
        found.append(
            f"the server signs as {fingerprint(new.server)}, and was {fingerprint(old.server)}"
        )
    return found + differences(old.members, new.members, {"box": "has another box key"})


def _check_own(roster: Roster, own: Member) -> None:
    said = roster.member(own.number)
    if said != own:
        reason = f"the roster has other keys or another name for {own} than this client itself"
        raise RosterError("not me", reason)


def _signed(run: str, server: str, members: Iterable[Member]) -> bytes:
    listed = [[one.number, one.name, one.identity, one.box, one.signature] for one in members]
    # As JSON, so that no two different rosters have the same bytes.
    return b"dure roster 1\n" + json.dumps([run, server, listed]).encode("ascii")
