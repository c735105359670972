"""Encryption to a public key, HPKE in base mode: DHKEM(X25519), HKDF-SHA256, AES-256-GCM.

    secret      of an X25519 key made for this message alone, with the receiver's
    key, nonce  HKDF-SHA256 of the secret, of both public keys, and of `info`
    message     AES-256-GCM with this key and nonce

The first of these public keys travels with the message and is all that the receiver needs besides
its private key and `info`, of which it has its own copy: a message with another one cannot be
opened. Base mode says nothing about who encrypted; `dure.wire.sealing` does.

Newer versions of `cryptography` have the same, as a function of one piece of memory that makes
another. Here a message may lie in many pieces and is encrypted from them straight into the memory
that is given for it, with `cryptography` 42 or newer; the tests hold the two against each other.

A message has at most `MOST` bytes, so that one nonce is enough (NIST SP 800-38D, 5.2.1.1).

Source: RFC 9180, sections 4.1, 5.1 and 6.1; RFC 7748 for X25519.
"""

from __future__ import annotations

from collections.abc import Iterable

try:
    from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey, X25519PublicKey
    from cryptography.hazmat.primitives.ciphers import Cipher
    from cryptography.hazmat.primitives.ciphers.algorithms import AES
    from cryptography.hazmat.primitives.ciphers.modes import GCM
    from cryptography.hazmat.primitives.hashes import SHA256
    from cryptography.hazmat.primitives.hmac import HMAC
    from cryptography.hazmat.primitives.kdf.hkdf import HKDFExpand
except ImportError as error:
    raise ImportError('a network needs the extra: pip install "dure[deploy]"') from error

PUBLIC = 32
"""Bytes of a public key."""

TAG = 16
"""Bytes by which a message is longer when it is encrypted."""

SLACK = 15
"""Bytes that `decrypt` wants behind the message: a block of AES less one, as `update_into` does."""

MOST = (1 << 36) - 32
"""Bytes of a message."""

_KEM = b"KEM" + bytes([0x00, 0x20])
_SUITE = b"HPKE" + bytes([0x00, 0x20, 0x00, 0x01, 0x00, 0x02])
"""The numbers of DHKEM(X25519, HKDF-SHA256), of HKDF-SHA256 and of AES-256-GCM."""

STRIDE = 16 << 20
"""Bytes that are encrypted at once: between two of them, other threads have their turn."""


def encrypt(
    receiver: bytes, info: bytes, parts: Iterable[memoryview], encrypted: memoryview
) -> bytes:
    """Encrypts a message for whoever has the private key of `receiver`.

    parts: the message, in views of bytes. encrypted: is filled, `TAG` bytes longer than the
    message. Returns the public key that has to travel with it. Raises ValueError for a `receiver`
    with which no secret can be had.
    """
    public = X25519PublicKey.from_public_bytes(receiver)
    once = X25519PrivateKey.generate()
    travels = once.public_key().public_bytes_raw()
    secret = _shared(once.exchange(public), travels, receiver)
    encryptor = Cipher(*_cipher(secret, info)).encryptor()
    at = 0
    for piece in _strides(parts):
        # The room of the tag is what `update_into` wants to have behind the last piece.
        encryptor.update_into(piece, encrypted[at : at + len(piece) + SLACK])
        at += len(piece)
    encryptor.finalize()
    encrypted[at:] = encryptor.tag
    return travels


def decrypt(
    private: X25519PrivateKey,
    travels: bytes,
    info: bytes,
    encrypted: memoryview,
    message: memoryview,
) -> None:
    """The inverse of `encrypt`.

    message: is filled; as long as the message, and `SLACK` bytes. Raises ValueError or
    cryptography's InvalidTag for what was not encrypted for this key and with this `info`; then
    what `message` holds is nobody's, and must not be looked at.
    """
    secret = _shared(
        private.exchange(X25519PublicKey.from_public_bytes(travels)),
        travels,
        private.public_key().public_bytes_raw(),
    )
    decryptor = Cipher(*_cipher(secret, info)).decryptor()
    at = 0
    for piece in _strides([encrypted[:-TAG]]):
        decryptor.update_into(piece, message[at : at + len(piece) + SLACK])
        at += len(piece)
    decryptor.finalize_with_tag(bytes(encrypted[-TAG:]))


def _strides(parts: Iterable[memoryview]) -> Iterable[memoryview]:
    for part in parts:
        for at in range(0, len(part), STRIDE):
            yield part[at : at + STRIDE]


def _shared(dh: bytes, travels: bytes, receiver: bytes) -> bytes:
    # RFC 9180, 4.1: ExtractAndExpand.
    prk = _extract(_KEM, b"", b"eae_prk", dh)
    return _expand(_KEM, prk, b"shared_secret", travels + receiver, 32)


def _cipher(shared: bytes, info: bytes) -> tuple[AES, GCM]:
    # RFC 9180, 5.1: KeySchedule in mode 0, without a key that both had before; 5.2: the nonce of
    # the first message is the base nonce.
    context = b"\0" + _extract(_SUITE, b"", b"psk_id_hash", b"")
    context += _extract(_SUITE, b"", b"info_hash", info)
    secret = _extract(_SUITE, shared, b"secret", b"")
    key = _expand(_SUITE, secret, b"key", context, 32)
    return AES(key), GCM(_expand(_SUITE, secret, b"base_nonce", context, 12))


def _extract(suite: bytes, salt: bytes, label: bytes, content: bytes) -> bytes:
    # HMAC fills a short key up with zeros, so an empty salt is this one.
    extract = HMAC(salt or bytes(32), SHA256())
    extract.update(b"HPKE-v1" + suite + label + content)
    return extract.finalize()


def _expand(suite: bytes, prk: bytes, label: bytes, info: bytes, length: int) -> bytes:
    labelled = length.to_bytes(2, "big") + b"HPKE-v1" + suite + label + info
    return HKDFExpand(SHA256(), length, labelled).derive(prk)
