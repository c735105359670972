"""Box keys: the public keys to which other clients encrypt, signed by their owners.

A client has two keys. With its identity key (Ed25519, `dure.wire.signatures.Key`) the client signs;
the server knows the client by this key from enrolment on. With its box key (X25519) the client
decrypts messages that others have sealed to it. The identity signs the box key together with the
run, the client's number and its name. A server, which distributes box keys, can therefore neither
replace a box key nor present an older key of another run.

The signed bytes are a line and a JSON array:

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
from dure.wire.key_files import load_or_create_key
from dure.wire.signatures import Key, is_signed

try:
    from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey
except ImportError as error:
    raise ImportError('a network needs the extra: pip install "dure[deploy]"') from error

MOST_NAME = 64
"""Maximum characters of a client's name."""

Number = Annotated[int, msgspec.Meta(ge=0, lt=1 << 31)]
PublicKey = Annotated[str, msgspec.Meta(pattern=r"^[0-9a-f]{64}\Z")]
Signature = Annotated[str, msgspec.Meta(pattern=r"^[0-9a-f]{128}\Z")]
_RUN = re.compile(r"^\w[\w.-]{0,99}\Z")
Run = Annotated[str, msgspec.Meta(pattern=_RUN.pattern)]


def check_run(run: str) -> None:
    """Check the id of a run. Raises ValueError if the text is not a valid id."""
    if _RUN.match(run) is None:
        raise ValueError(
            f"{run[:100]!r} is not an id of a run: use 1 to 100 letters, digits, _ . -"
        )


def check_name(name: str) -> None:
    """Check a client's name. Raises ValueError unless the name is printable as it is."""
    if not (0 < len(name) <= MOST_NAME and printable(name) == name):
        raise ValueError(f"a name needs 1 to {MOST_NAME} printable characters")


class Member(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Public description of a client: its number, its name and its two public keys.

    `identity` is an Ed25519 key and `box` an X25519 key, both in 64 hexadecimal digits. `signature`
    is made with the identity key.
    """

    number: Number
    name: Annotated[str, msgspec.Meta(min_length=1, max_length=MOST_NAME)]
    identity: PublicKey
    box: PublicKey
    signature: Signature

    def is_true(self, run: str) -> bool:
        """Return whether the identity has signed this box key, number and name for the run.

        Returns False for a weak box key, with which a shared secret would be public.
        """
        if not is_secret(self.box):
            return False
        signed = _signed(run, self.number, self.name, self.box)
        return is_signed(self.identity, signed, bytes.fromhex(self.signature))

    def __str__(self) -> str:
        return f"client {self.number} ({self.name})"


class BoxKey:
    """Private X25519 key, which stays on its machine. `public` is its public key in hexadecimal."""

    def __init__(self, private: X25519PrivateKey) -> None:
        self.private = private
        self.public = private.public_key().public_bytes_raw().hex()

    @classmethod
    def make(cls) -> BoxKey:
        return cls(X25519PrivateKey.generate())

    @classmethod
    def load_or_create(cls, path: Path) -> BoxKey:
        """Load the key from a file that only its owner may read; create the file if it is missing.

        Raises ValueError for a file that is not such a key or that others may read, and
        RunFolderWriteError if a new key cannot be written.
        """
        return cls(load_or_create_key(path, X25519PrivateKey))  # type: ignore[type-abstract]

    def member(self, identity: Key, number: int, name: str, run: str) -> Member:
        """Return the signed description of the owner of both keys, for all members of the run.

        Raises ValueError for an invalid id of a run, number or name.
        """
        check_run(run)
        check_name(name)
        if not 0 <= number < 1 << 31:
            raise ValueError(f"{number} is not a number of a client")
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
"""u-coordinates of the points of small order, on the curve and on its twist."""


def is_secret(box: str) -> bool:
    """Return whether this X25519 public key is canonical and gives a secret shared key.

    With a point of small order the shared secret is zero, and so known to everybody (RFC 7748,
    6.1).
    """
    u = int.from_bytes(bytes.fromhex(box), "little")
    return u < _FIELD and u not in _SMALL


def _signed(run: str, number: int, name: str, box: str) -> bytes:
    # JSON, so that two different members never have the same bytes.
    return b"dure member 1\n" + json.dumps([run, number, name, box]).encode("ascii")
