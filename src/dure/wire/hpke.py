"""Encryption to a public key, HPKE in base mode: DHKEM(X25519), HKDF-SHA256, AES-256-GCM.

    secret      X25519 of an ephemeral key, made for this message, with the receiver's key
    key, nonce  HKDF-SHA256 of the secret, of both public keys, and of `info`
    message     AES-256-GCM with this key and nonce

The ephemeral public key travels with the message. The receiver needs besides only its private key
and its own copy of `info`: a message made with another `info` cannot be decrypted. Base mode does
not authenticate the sender; `dure.wire.sealing` does.

Newer versions of `cryptography` offer HPKE as a function from a buffer to a new buffer. This
module encrypts a message in many pieces directly into a given buffer, and runs with `cryptography`
42 or newer. The tests compare both implementations.

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
"""Bytes that encryption adds to a message: the authentication tag."""

SLACK = 15
"""Bytes that `decrypt` needs after the message: an AES block less 1, as `update_into` requires."""

MOST = (1 << 36) - 32
"""Maximum bytes of a message."""

_KEM = b"KEM" + bytes([0x00, 0x20])
_SUITE = b"HPKE" + bytes([0x00, 0x20, 0x00, 0x01, 0x00, 0x02])
"""Suite ids of DHKEM(X25519, HKDF-SHA256), HKDF-SHA256 and AES-256-GCM."""

STRIDE = 16 << 20
"""Bytes encrypted per call; other threads can run between two calls."""


def encrypt(
    receiver: bytes, info: bytes, parts: Iterable[memoryview], encrypted: memoryview
) -> bytes:
    """Encrypt a message to the owner of the private key of `receiver`.

    `parts` are byte views of the message. `encrypted` is the output buffer, `TAG` bytes longer than
    the message. Returns the ephemeral public key, which must travel with the message. Raises
    ValueError for a weak `receiver` key.
    """
    public = X25519PublicKey.from_public_bytes(receiver)
    once = X25519PrivateKey.generate()
    travels = once.public_key().public_bytes_raw()
    secret = _shared(once.exchange(public), travels, receiver)
    encryptor = Cipher(*_cipher(secret, info)).encryptor()
    at = 0
    for piece in _strides(parts):
        # The space of the tag serves as the slack that `update_into` requires after the last piece.
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
    """Decrypt a message that `encrypt` has encrypted.

    Args:
        private: Private key of the receiver.
        travels: Ephemeral public key that came with the message.
        info: The same bytes as in `encrypt`.
        encrypted: Encrypted message, with its tag.
        message: Output buffer, as long as the message plus `SLACK` bytes.

    Raises:
        ValueError, InvalidTag: The message was not encrypted to this key with this `info`. The
            content of the output buffer is then unauthenticated, and must not be used.
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
    # RFC 9180, 5.1: KeySchedule in mode 0, without a pre-shared key; 5.2: the nonce of the first
    # message is the base nonce.
    context = b"\0" + _extract(_SUITE, b"", b"psk_id_hash", b"")
    context += _extract(_SUITE, b"", b"info_hash", info)
    secret = _extract(_SUITE, shared, b"secret", b"")
    key = _expand(_SUITE, secret, b"key", context, 32)
    return AES(key), GCM(_expand(_SUITE, secret, b"base_nonce", context, 12))


def _extract(suite: bytes, salt: bytes, label: bytes, content: bytes) -> bytes:
    # HMAC pads a short key with zeros, so an empty salt equals 32 zeros.
    extract = HMAC(salt or bytes(32), SHA256())
    extract.update(b"HPKE-v1" + suite + label + content)
    return extract.finalize()


def _expand(suite: bytes, prk: bytes, label: bytes, info: bytes, length: int) -> bytes:
    labelled = length.to_bytes(2, "big") + b"HPKE-v1" + suite + label + info
    return HKDFExpand(SHA256(), length, labelled).derive(prk)
