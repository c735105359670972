"""Pairwise keys of clients, unknown to the server that relays their messages.

    secret(u, v) = X25519(private of u, public of v) = X25519(private of v, public of u)
    key(u, v)    = HKDF-SHA256(secret; salt: both public keys, the smaller first; info)

`info` names the use of the key: purpose, run, round, digest of the model. Keys with different
`info` are independent. The salt contains both public keys: two clients derive the same key only if
both received the same two public keys.

A public key may be a point of low order. The secret is then zero for every private key, and the
server, which distributes the public keys, would know the secret. Such a key raises an error.

Messages between clients are sealed by ChaCha20-Poly1305. The nonce is 0, because the cipher's key
is HMAC-SHA256(key; associated): **a key seals one message for each `associated`**, which therefore
names the sender, the receiver and the stage. A second message would reveal the difference of the
two. A client that repeats a message sends the same bytes.

Cost: an agreement is a multiplication on the curve; a sealed message has 16 additional bytes.

Sources: RFC 7748, 6.1 (X25519 and the check for zero); RFC 5869 (HKDF); RFC 8439 (the cipher).
"""

from __future__ import annotations

import hmac
from dataclasses import dataclass, field
from functools import cache
from typing import TYPE_CHECKING, Any

from dure.errors import AgreementError
from dure.randomness.secret import KEY

if TYPE_CHECKING:
    from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey

PUBLIC = 32
"""Length of a public key in bytes."""

TAG = 16
"""Additional bytes of a sealed message."""

_NONCE = bytes(12)
_SEALING = b"dure sealing 1\0"


@dataclass(frozen=True)
class KeyPair:
    """An X25519 key pair. `public` has 32 bytes; `private` never leaves its owner."""

    public: bytes
    private: X25519PrivateKey = field(repr=False)

    @classmethod
    def of(cls, secret: bytes) -> KeyPair:
        """Return the key pair of 32 random bytes. Raises ValueError for another length."""
        if len(secret) != KEY:
            raise ValueError(f"a key pair needs {KEY} bytes, not {len(secret)}")
        private = _library().X25519PrivateKey.from_private_bytes(secret)
        return cls(private.public_key().public_bytes_raw(), private)


def agree(own: KeyPair, their_public: bytes, info: bytes) -> bytes:
    """Return the shared key of two key pairs: 32 bytes, equal for both owners.

    Raises AgreementError for a public key of another length, for the own public key, and for a
    point of low order, which has no secret.
    """
    if len(their_public) != PUBLIC:
        raise AgreementError(
            f"a public key has {PUBLIC} bytes, but this one has {len(their_public)}"
        )
    if their_public == own.public:
        raise AgreementError("a client received its own public key as the key of another client")
    library = _library()
    try:
        theirs = library.X25519PublicKey.from_public_bytes(their_public)
        secret = own.private.exchange(theirs)
    except ValueError as error:
        raise AgreementError(
            "a client received a public key with which every shared secret is zero: the server "
            "or another client does not follow the protocol"
        ) from error
    salt = min(own.public, their_public) + max(own.public, their_public)
    derived: bytes = library.HKDF(library.SHA256(), KEY, salt, info).derive(secret)
    return derived


def seal(key: bytes, plaintext: bytes, associated: bytes) -> bytes:
    """Return the encrypted and authenticated message, `TAG` bytes longer.

    `key` has 32 bytes. `associated` is data that the receiver knows and that is not sent. Use each
    pair (key, associated) once: the nonce is fixed.
    """
    sealed: bytes = _sealing(key, associated).encrypt(_NONCE, plaintext, associated)
    return sealed


def open_sealed(key: bytes, sealed: bytes, associated: bytes) -> bytes:
    """Return the plaintext of a sealed message; the inverse of `seal`.

    Raises AgreementError for bytes that were not sealed with this key and this `associated`.
    """
    library = _library()
    try:
        opened: bytes = _sealing(key, associated).decrypt(_NONCE, sealed, associated)
    except library.InvalidTag as error:
        raise AgreementError(
            "a sealed message cannot be decrypted: it was changed in transit, or is meant for "
            "another client or another stage"
        ) from error
    return opened


def _sealing(key: bytes, associated: bytes) -> Any:
    if len(key) != KEY:
        raise ValueError(f"a key has {KEY} bytes, but this one has {len(key)}")
    own = hmac.digest(key, _SEALING + associated, "sha256")
    return _library().ChaCha20Poly1305(own)


class _Library:
    """Names from `cryptography`, an optional dependency that is imported at first use."""

    def __init__(self) -> None:
        from cryptography.exceptions import InvalidTag
        from cryptography.hazmat.primitives.asymmetric.x25519 import (
            X25519PrivateKey,
            X25519PublicKey,
        )
        from cryptography.hazmat.primitives.ciphers.aead import ChaCha20Poly1305
        from cryptography.hazmat.primitives.hashes import SHA256
        from cryptography.hazmat.primitives.kdf.hkdf import HKDF

        self.InvalidTag = InvalidTag
        self.X25519PrivateKey = X25519PrivateKey
        self.X25519PublicKey = X25519PublicKey
        self.ChaCha20Poly1305 = ChaCha20Poly1305
        self.SHA256 = SHA256
        self.HKDF = HKDF


@cache
def _library() -> _Library:
    try:
        return _Library()
    except ImportError as error:
        raise ImportError('secure aggregation needs: pip install "dure[privacy]"') from error
