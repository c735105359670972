"""The key for which others seal what only one client is to read, and who vouches for it.

A client has two keys. With its identity (Ed25519, `dure.wire.signatures.Key`) it signs; it is known
by it from its enrolment on. With its box key (X25519) it opens what others have sealed for it. The
identity signs the box key, with the run, the client's number and its name: so a server, which hands
box keys around, cannot put another one in its place, nor an older one of another run.

Signed are a line and a JSON array:

    dure member 1
    ["RUN", 3, "ward 3", "BOX KEY, 64 DIGITS"]

Source: RFC 7748 for X25519, RFC 8032 for Ed25519.
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Annotated

import msgspec

from dure.peer_text import printable
from dure.wire.key_files import kept_in
from dure.wire.signatures import Key, is_signed

try:
    from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey
except ImportError as error:
    raise ImportError('a network needs the extra: pip install "dure[deploy]"') from error

MOST_NAME = 64
"""Characters of a name."""

Number = Annotated[int, msgspec.Meta(ge=0, lt=1 << 31)]
PublicKey = Annotated[str, msgspec.Meta(pattern=r"^[0-9a-f]{64}\Z")]
Signature = Annotated[str, msgspec.Meta(pattern=r"^[0-9a-f]{128}\Z")]
_RUN = re.compile(r"^\w[\w.-]{0,99}\Z")
Run = Annotated[str, msgspec.Meta(pattern=_RUN.pattern)]


def check_run(run: str) -> None:
    """Raises ValueError for what is no run's id."""
    if _RUN.match(run) is None:
        raise ValueError(f"{run[:100]!r} is no id of a run: 1 to 100 letters, digits, _ . -")


def check_name(name: str) -> None:
    """Raises ValueError for what is no client's name: others print it, as it is."""
    if not (0 < len(name) <= MOST_NAME and printable(name) == name):
        raise ValueError(f"a name has 1 to {MOST_NAME} characters that can be printed")


class Member(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A client as others know it: its number, its name and its two public keys.

    identity: Ed25519, 64 hexadecimal digits. box: X25519, likewise. signature: by the identity.
    """

    number: Number
    name: Annotated[str, msgspec.Meta(min_length=1, max_length=MOST_NAME)]
    identity: PublicKey
    box: PublicKey
    signature: Signature

    def is_true(self, run: str) -> bool:
        """Whether the identity has signed that this is its box key, number and name in the run; a
        box key with which nothing is secret is none."""
        if not is_secret(self.box):
            return False
        signed = _signed(run, self.number, self.name, self.box)
        return is_signed(self.identity, signed, bytes.fromhex(self.signature))

    def __str__(self) -> str:
        return f"client {self.number} ({self.name})"


class BoxKey:
    """A private key, which stays on its machine. `public` is the text by which others know it."""

    def __init__(self, private: X25519PrivateKey) -> None:
        self.private = private
        self.public = private.public_key().public_bytes_raw().hex()

    @classmethod
    def make(cls) -> BoxKey:
        return cls(X25519PrivateKey.generate())

    @classmethod
    def kept_in(cls, path: Path) -> BoxKey:
        """The key of a file, which only its owner may read; a new one where there is no file.

        Raises ValueError for a file that is no such key or that others may read, and
        RunFolderWriteError where a new one cannot be kept.
        """
        return cls(kept_in(path, X25519PrivateKey))  # type: ignore[type-abstract]

    def member(self, identity: Key, number: int, name: str, run: str) -> Member:
        """What the owner of both keys says of itself, to everybody in the run.

        Raises ValueError for what is no id of a run, no number or no name.
        """
        check_run(run)
        check_name(name)
        if not 0 <= number < 1 << 31:
            raise ValueError(f"{number} is no number of a client")
        signature = identity.sign(_signed(run, number, name, self.public))
        return Member(number, name, identity.public, self.public, signature.hex())

    def __repr__(self) -> str:
        return f"BoxKey({self.public})"


_FIELD = 2**255 - 19
_ORDER_8 = (
    0x00B8495F16056286FDB1329CEB8D09DA6AC49FF1FAE35616AEB8413B7C7AEBE0,
    0x57119FD0DD4E22D8868E1C58C45C44045BEF839C55B1D0B1248C50A3BC959C5F,
)
_SMALL = frozenset({0, 1, _FIELD - 1, *_ORDER_8})
"""The u of the points of small order, on the curve and on its twist."""


def is_secret(box: str) -> bool:
    """Whether a secret can be had with this public key of X25519, written in the one spelling.

    With a point of small order the secret is zero for everybody (RFC 7748, 6.1).
    """
    u = int.from_bytes(bytes.fromhex(box), "little")
    return u < _FIELD and u not in _SMALL


def _signed(run: str, number: int, name: str, box: str) -> bytes:
    # As JSON, so that no two different members have the same bytes.
    return b"dure member 1\n" + json.dumps([run, number, name, box]).encode("ascii")
