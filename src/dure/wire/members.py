"""Common parts of every list of clients: numbers, names, identities, and differences of two lists.

A client is identified by the public key of its identity (Ed25519, `dure.wire.signatures`). People
compare its *fingerprint* instead: 32 digits of the key's SHA-256, in groups of four.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple, Protocol, TypeVar

import msgspec

from dure.wire.boxes import check_name
from dure.wire.signatures import check_public

MOST_LIST = 1 << 20
"""Maximum bytes of a list of clients written by a person."""

_FORM = re.compile("[0-9a-f]{64}|[0-9a-f]{32}")

Body = TypeVar("Body", bound=msgspec.Struct)


class RosterError(ValueError):
    """A roster is invalid, or differs from the pinned roster. `kind` is a short category."""

    def __init__(self, kind: str, reason: str) -> None:
        super().__init__(reason)
        self.kind = kind


class IdentifiedClient(Protocol):
    """A client in a list. As text: "client 3 (ward 3)"."""

    @property
    def number(self) -> int: ...

    @property
    def name(self) -> str: ...

    @property
    def identity(self) -> str: ...


# Keys, as people write them


def fingerprint(public: str) -> str:
    """Return the fingerprint of a public key: 32 digits of its SHA-256, in groups of four."""
    return grouped(bytes.fromhex(public), 32)


def grouped(content: bytes, count: int) -> str:
    """Return the first `count` hexadecimal digits of the SHA-256, in groups of four."""
    digits = hashlib.sha256(content).hexdigest()
    return " ".join(digits[at : at + 4] for at in range(0, count, 4))


def parse_key(text: str) -> str:
    """Return a public key or a fingerprint, as typed by a person, as plain lower-case digits.

    Ignores spaces and colons. Raises ValueError for any other text, and for a weak public key, with
    which anybody could sign.
    """
    plain = _plain(text)
    if _FORM.fullmatch(plain) is None:
        raise ValueError(
            f"{text[:80]!r} is not a key: a public key has 64 hexadecimal digits, a fingerprint 32"
        )
    if len(plain) == 64:
        check_public(plain)
    return plain


def matches_key(public: str, said: str) -> bool:
    """Return whether a public key matches a key or fingerprint from `parse_key`."""
    return said in (public, _plain(fingerprint(public)))


def _plain(text: str) -> str:
    return re.sub("[ \t:]", "", text).lower()


# Lists that a person has written


class ClientListLine(NamedTuple):
    """Line of a client. `place` names the line in errors; `rest` is the text after the number."""

    place: str
    number: int
    rest: str


def lines_of(path: Path, what: str, form: str) -> Iterator[ClientListLine]:
    """Yield the lines of a file that begin with a client's number; each number occurs once.

    Skips empty lines and lines that begin with #. `what` names the file and `form` describes a
    valid line, for errors. Raises ValueError for an unreadable file and an invalid line.
    """
    try:
        with path.open("rb") as file:
            text = file.read(MOST_LIST + 1).decode("utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ValueError(f"cannot read the {what} {path}: {error}") from error
    if len(text) > MOST_LIST:
        raise ValueError(f"the {what} {path} is too long")
    found: set[int] = set()
    for at, line in enumerate(text.splitlines(), start=1):
        words = line.split(maxsplit=1)
        if not words or words[0].startswith("#"):
            continue
        place = f"{path}, line {at}"
        if re.fullmatch("[0-9]{1,9}", words[0]) is None or len(words) < 2:
            raise ValueError(f"{place}: a line has to be {form}")
        number = int(words[0])
        if number in found:
            raise ValueError(f"{place}: client {number} occurs twice")
        found.add(number)
        yield ClientListLine(place, number, words[1])


# Lists received from elsewhere


def read_body(body: bytes | bytearray, kind: type[Body], most: int) -> Body:
    """Decode untrusted JSON into `kind`. Checks types only.

    Raises RosterError for invalid JSON, and for more than `most` bytes.
    """
    if len(body) > most:
        reason = f"the roster has {len(body)} bytes, but may have at most {most}"
        raise RosterError("no roster", reason)
    try:
        return msgspec.json.decode(body, type=kind)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        # The text may quote the received bytes, which are untrusted.
        said = ascii(str(error))[1:-1]
        raise RosterError("no roster", f"the received data are not a roster: {said}") from error


def check_key(whose: str, public: str) -> None:
    """Check a public key. Raises RosterError for a weak key, with which anybody could sign."""
    try:
        check_public(public)
    except ValueError as error:
        raise RosterError("weak key", f"the public key of {whose} is invalid: {error}") from error


def check_distinct(members: Sequence[IdentifiedClient], *fields: str) -> None:
    """Check that the clients are sorted, have valid names and keys, and differ in each field.

    Raises RosterError otherwise.
    """
    numbers = [member.number for member in members]
    if numbers != sorted(set(numbers)):
        raise RosterError("no roster", "the clients of the roster are not in order, or occur twice")
    for member in members:
        try:
            check_name(member.name)
        except ValueError as error:
            reason = f"the name of client {member.number} is invalid: {error}"
            raise RosterError("no roster", reason) from error
        check_key(f"client {member.number}", member.identity)
    for what in fields:
        owners: dict[str, IdentifiedClient] = {}
        for member in members:
            other = owners.setdefault(getattr(member, what), member)
            if other is not member:
                reason = f"clients {other.number} and {member.number} have the same {what}"
                raise RosterError("no roster", reason)


def differences(
    old: Sequence[IdentifiedClient],
    new: Sequence[IdentifiedClient],
    others: Mapping[str, str] | None = None,
) -> list[str]:
    """Describe the differences of two lists, a sentence each.

    `others` has additional fields to compare, and the words for a change of each.
    """
    before = {member.number: member for member in old}
    after = {member.number: member for member in new}
    found = []
    for number in sorted(before.keys() | after.keys()):
        found += _changed(before.get(number), after.get(number), others or {})
    return found


def _changed(
    old: IdentifiedClient | None, new: IdentifiedClient | None, others: Mapping[str, str]
) -> list[str]:
    if new is None:
        return [f"{old} was removed"]
    if old is None:
        return [f"{new} was added"]
    found = []
    if new.identity != old.identity:
        found.append(
            f"{old} has the identity {fingerprint(new.identity)}, but had "
            f"{fingerprint(old.identity)}"
        )
    for field, said in others.items():
        if getattr(new, field) != getattr(old, field):
            found.append(f"{old} {said}")
    if new.name != old.name:
        found.append(f"{old} is now named {new.name}")
    return found
