"""Request signatures: every request of a client is signed with its Ed25519 key.

The signed text has six lines: a constant, the method, the path with its query, the SHA-256 of the
body, the server's nonce, and a serial that the client increments:

    dure request 1
    PATCH
    /v1/uploads/7?offset=1048576
    9f86d081884c7d659a2feaa0c55ad015a3bf4f1b2b0b822cd15d6c15b0f00a08
    1b4f0e9851971998e732078544c96b36
    42

Five headers carry the fields that the request itself does not contain:

    dure-client     the public key, 64 hexadecimal digits
    dure-nonce      the server's nonce, 32 digits; empty before the client knows a nonce
    dure-serial     a decimal number
    dure-digest     SHA-256 of the body, 64 digits
    dure-signature  128 digits

The server draws the nonce at random, so no clock has to be right. A client's first request has no
nonce; the server answers 401 with a nonce in the header `dure-nonce`. A request with a nonce that
the server has forgotten, as after a restart, gets the same answer. The client then signs the
request again. Each serial counts once per nonce. Requests of several connections overtake each
other, so the server stores the highest serial and, as bits, which of the `WINDOW` serials below it
have been seen. This is the anti-replay window of IPsec (RFC 4303, 3.4.3); its memory is constant.

A request has exactly one spelling: digits are lower case, numbers have no leading zero. A request
with any changed byte is therefore another request, without a valid signature.

`check_public` refuses weak public keys: with a point of small order, signatures that hold for
nearly every message can be made without a private key, and a point with two spellings would be two
clients.

Source: RFC 8032 for Ed25519; Cremers and Jackson 2019, "Prime, Order Please!", for keys of small
order.
"""

from __future__ import annotations

import hashlib
import json
import re
import secrets
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Mapping
from functools import lru_cache
from pathlib import Path
from typing import NamedTuple

from dure.wire.key_files import load_or_create_key

try:
    from cryptography.exceptions import InvalidSignature
    from cryptography.hazmat.primitives.asymmetric.ed25519 import (
        Ed25519PrivateKey,
        Ed25519PublicKey,
    )
except ImportError as error:
    raise ImportError('a network needs the extra: pip install "dure[deploy]"') from error

CLIENT = "dure-client"
NONCE = "dure-nonce"
SERIAL = "dure-serial"
DIGEST = "dure-digest"
SIGNATURE = "dure-signature"
"""Names of the headers, in lower case."""

WINDOW = 1024
"""Maximum serials by which later requests of the same client may overtake a request."""

SESSIONS = 4
"""Maximum valid nonces of a client at the same time: several processes may use the same key."""

_FORMS = {
    CLIENT: re.compile("[0-9a-f]{64}"),
    NONCE: re.compile("(?:[0-9a-f]{32})?"),
    SERIAL: re.compile("0|[1-9][0-9]{0,17}"),
    DIGEST: re.compile("[0-9a-f]{64}"),
    SIGNATURE: re.compile("[0-9a-f]{128}"),
}
_LINE = re.compile("[!-~]+")
"""Pattern of a method or a path: visible ASCII, as in HTTP, so without a line end."""


class SignatureError(ValueError):
    """The signature of a request is invalid, or not valid now.

    `kind` is a short category, for counters. `nonce` is a nonce with which the client may sign
    again; None if another signature would not help.
    """

    def __init__(self, kind: str, reason: str, nonce: str | None = None) -> None:
        super().__init__(reason)
        self.kind = kind
        self.nonce = nonce


def digest_of(body: bytes | bytearray | memoryview = b"") -> str:
    """Return the SHA-256 of a body, as hexadecimal digits."""
    return hashlib.sha256(body).hexdigest()


class Key:
    """Private Ed25519 key, which stays on its machine.

    `public` is the public key in hexadecimal.
    """

    def __init__(self, private: Ed25519PrivateKey) -> None:
        self._private = private
        self.public = private.public_key().public_bytes_raw().hex()

    @classmethod
    def make(cls) -> Key:
        return cls(Ed25519PrivateKey.generate())

    @classmethod
    def load_or_create(cls, path: Path) -> Key:
        """Load the key from a file that only its owner may read; create the file if it is missing.

        Raises ValueError for a file that is not such a key or that others may read, and
        RunFolderWriteError if a new key cannot be written.
        """
        return cls(load_or_create_key(path, Ed25519PrivateKey))  # type: ignore[type-abstract]

    def sign(self, message: bytes) -> bytes:
        """Return the signature of the message, 64 bytes."""
        return self._private.sign(message)

    def seed(self, purpose: str) -> int:
        """Return a secret random seed of 56 bits for this purpose, the same in every call."""
        signed = self.sign(b"dure seed 1\n" + purpose.encode())
        return int.from_bytes(hashlib.sha256(signed).digest()[:7], "little")

    def __repr__(self) -> str:
        return f"Key({self.public})"


_FIELD = 2**255 - 19
_ORDER_8 = 0x7A03AC9277FDC74EC6CC392CFA53202A0F67100D760B3CBA4FD84D3D706A17C7
_SMALL = frozenset({0, 1, _FIELD - 1, _ORDER_8, _FIELD - _ORDER_8})
"""y-coordinates of the eight points whose order divides the curve's cofactor."""


def check_public(text: str) -> None:
    """Check a public key. Raises ValueError for an invalid key and for a weak key.

    Weak keys, with which anybody could sign, are points of small order and values of y not below
    the field's prime.
    """
    if _FORMS[CLIENT].fullmatch(text) is None:
        raise ValueError("a public key has 64 hexadecimal digits")
    # Without the sign bit of x: points of small order exist with either sign.
    y = int.from_bytes(bytes.fromhex(text), "little") & (1 << 255) - 1
    if y >= _FIELD or y in _SMALL:
        raise ValueError(f"{text} is not a safe public key: anyone could sign for it")


@lru_cache(maxsize=8192)
def _public(text: str) -> Ed25519PublicKey:
    check_public(text)
    return Ed25519PublicKey.from_public_bytes(bytes.fromhex(text))


def is_signed(public: str, message: bytes, signature: bytes) -> bool:
    """Return whether the owner of a public key has signed the message.

    Raises ValueError for an invalid key (`check_public`).
    """
    try:
        _public(public).verify(signature, message)
    except InvalidSignature:
        return False
    return True


def prove(key: Key, token: str, name: str, wants: int | None) -> str:
    """Return the proof of an enrolment: a signature with the private key of the public key."""
    return key.sign(_enrolment(token, name, wants)).hex()


def is_proven(public: str, proof: str, token: str, name: str, wants: int | None) -> bool:
    """Return whether `prove` made the proof with the key and these arguments."""
    if _FORMS[SIGNATURE].fullmatch(proof) is None:
        return False
    try:
        check_public(public)
    except ValueError:
        return False
    return is_signed(public, _enrolment(token, name, wants), bytes.fromhex(proof))


def _enrolment(token: str, name: str, wants: int | None) -> bytes:
    # JSON, so that two different enrolments never have the same bytes.
    return b"dure enrol 1\n" + json.dumps([token, name, wants]).encode("ascii")


class Claim(NamedTuple):
    """Signature headers of a request."""

    client: str
    nonce: str
    serial: int
    digest: str
    signature: str

    def is_true(self, method: str, path: str) -> bool:
        """Return whether the client has signed exactly this request."""
        return is_signed(
            self.client,
            _lines(method, path, self.digest, self.nonce, self.serial),
            bytes.fromhex(self.signature),
        )


def claim_of(headers: Mapping[str, str]) -> Claim:
    """Parse the signature headers of a request; names are in lower case. Raises SignatureError."""
    texts = {name: headers.get(name) for name in _FORMS}
    if texts[SIGNATURE] is None:
        raise SignatureError("not signed", "the request is not signed")
    for name, form in _FORMS.items():
        text = texts[name]
        if text is None or form.fullmatch(text) is None:
            raise SignatureError("not signed", f"the header {name} is invalid")
    client, nonce, serial, digest, signature = (str(text) for text in texts.values())
    try:
        check_public(client)
    except ValueError as error:
        raise SignatureError("weak key", str(error)) from error
    return Claim(client, nonce, int(serial), digest, signature)


def _lines(method: str, path: str, digest: str, nonce: str, serial: int) -> bytes:
    for part in (method, path):
        if _LINE.fullmatch(part) is None:
            raise SignatureError("not signed", "method and path have to be visible ASCII")
    return "\n".join(["dure request 1", method, path, digest, nonce, str(serial)]).encode("ascii")


class Signer:
    """Client's side: signs the requests of several connections, each with the next serial."""

    def __init__(self, key: Key) -> None:
        self._key = key
        self._nonce = ""
        self._serial = 0
        self._lock = threading.Lock()

    def sign(self, method: str, path: str, digest: str) -> dict[str, str]:
        """Return the headers of a request.

        `path` includes its query; `digest` is from `digest_of`.
        """
        with self._lock:
            nonce = self._nonce
            serial = self._serial
            self._serial += 1
        signature = self._key.sign(_lines(method, path, digest, nonce, serial))
        return {
            CLIENT: self._key.public,
            NONCE: nonce,
            SERIAL: str(serial),
            DIGEST: digest,
            SIGNATURE: signature.hex(),
        }

    def again(self, signed: Mapping[str, str], status: int, answer: Mapping[str, str]) -> bool:
        """Return whether an answer demands that the client sign the request again.

        The next `sign` uses the nonce of the answer. `signed` are the headers of the request.
        `status` and `answer` are the status and the headers of the answer, names in lower case.
        """
        fresh = answer.get(NONCE, "")
        if status != 401 or not fresh or _FORMS[NONCE].fullmatch(fresh) is None:
            return False
        with self._lock:
            # Unless another connection has received a new nonce since this request was signed.
            if self._nonce == signed[NONCE] and self._nonce != fresh:
                self._nonce = fresh
                self._serial = 0
        return True


class _Session:
    """Nonce and its seen serials: bit i of `seen` is serial `highest` - i."""

    __slots__ = ("highest", "nonce", "seen", "used")

    def __init__(self, now: float) -> None:
        self.nonce = secrets.token_hex(16)
        self.highest = -1
        self.seen = 0
        self.used = now

    def takes(self, serial: int) -> bool:
        """Record the serial, and return whether it was new."""
        ahead = serial - self.highest
        if ahead > 0:
            # The shift is bounded by the window: a client may send an arbitrarily high serial.
            self.seen = (self.seen << min(ahead, WINDOW) | 1) & ((1 << WINDOW) - 1)
            self.highest = serial
            return True
        if -ahead >= WINDOW or self.seen >> -ahead & 1:
            return False
        self.seen |= 1 << -ahead
        return True


class Nonces:
    """Server's side: valid nonces, and the seen serials of each.

    `life` is the number of seconds without use after which a nonce is discarded. `most` is the
    number of clients to remember; the client silent for longest is discarded first. `clock` returns
    monotonic seconds.
    """

    def __init__(
        self,
        life: float = 3600.0,
        most: int = 100_000,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._life = life
        self._most = most
        self._clock = clock
        self._sessions: OrderedDict[str, list[_Session]] = OrderedDict()
        """Sessions of each client by key: at most `SESSIONS`, most recently used last."""
        self._lock = threading.Lock()

    def take(self, claim: Claim) -> None:
        """Accept a claim once. The caller must check `is_true` first.

        Otherwise any sender could use up a client's serials. Raises SignatureError with a nonce if
        the client has to sign again: its nonce is unknown, or the serial was seen or is too old.
        """
        now = self._clock()
        with self._lock:
            self._forget_silent(now)
            sessions = self._sessions.setdefault(claim.client, [])
            self._sessions.move_to_end(claim.client)
            sessions[:] = [one for one in sessions if now - one.used <= self._life]
            session = next((one for one in sessions if one.nonce == claim.nonce), None)
            if session is None:
                nonce = self._unused(sessions, now).nonce
                raise SignatureError("new nonce", "sign with the server's nonce", nonce)
            if not session.takes(claim.serial):
                reason = f"request {claim.serial} was answered before, or is too old"
                # The same nonce is safe to send: only the owner of the key can use it.
                raise SignatureError("replayed", reason, session.nonce)
            session.used = now
            sessions.remove(session)
            sessions.append(session)

    def __len__(self) -> int:
        """Number of remembered clients."""
        return len(self._sessions)

    def _unused(self, sessions: list[_Session], now: float) -> _Session:
        # An unused nonce is sent again: an attacker who replays an old request many times gets one
        # nonce, and evicts no nonce in use.
        for session in sessions:
            if session.highest < 0:
                session.used = now
                return session
        del sessions[: max(0, len(sessions) - SESSIONS + 1)]
        sessions.append(_Session(now))
        return sessions[-1]

    def _forget_silent(self, now: float) -> None:
        while self._sessions:
            sessions = next(iter(self._sessions.values()))
            silent = all(now - one.used > self._life for one in sessions)
            if not silent and len(self._sessions) <= self._most:
                return
            self._sessions.popitem(last=False)
