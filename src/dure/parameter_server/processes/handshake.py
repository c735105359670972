"""Handshake between two processes of a job: both prove knowledge of the job's token.

    listener -> caller    16 random bytes a
    caller -> listener    its name, 16 random bytes b, HMAC(token, "caller", a, name)
    listener -> caller    HMAC(token, "listener", b, the listener's name)
    caller -> listener    one byte: the answer arrived

The token never travels. The listener does not block: it stores partial messages and reads the rest
on arrival, so silent or wrong callers delay nobody else. A caller closes its connection after a
timeout and calls again. Without the last byte, the listener would take the abandoned connection for
the caller's current connection, and its end for the caller's end.

Source: Krawczyk et al. 1997, RFC 2104 (HMAC).
"""

from __future__ import annotations

import hmac
import os
import socket
import struct
import time

NONCE = 16
PROOF = 32
_HEARD = b"\x01"
_HELLO = struct.Struct("<H")
_MOST_NAME = 64


def call(
    address: tuple[str, int], name: str, other: str, token: bytes, seconds: float
) -> socket.socket:
    """Call a process and return the connection after the handshake, within `seconds`.

    Raises OSError if the process does not answer, or fails the handshake.
    """
    until = time.monotonic() + seconds
    there = socket.create_connection(address, timeout=seconds)
    try:
        nonce = _exactly(there, NONCE, until)
        own = os.urandom(NONCE)
        there.sendall(_said(name, own, nonce, token))
        if not hmac.compare_digest(_exactly(there, PROOF, until), _answer(token, own, other)):
            raise ConnectionError("it does not know the job's token")
        there.sendall(_HEARD)
        return there
    except BaseException:
        there.close()
        raise


class Caller:
    """Caller during the handshake. `until` is its deadline."""

    def __init__(self, there: socket.socket, until: float) -> None:
        self.socket = there
        self.until = until
        self._nonce = os.urandom(NONCE)
        self._said = b""
        self._name: str | None = None
        """Name of the caller, after its proof was checked and answered."""
        there.setblocking(False)
        there.send(self._nonce)  # a new connection has room for it

    def hear(self, token: bytes, name: str) -> str | None:
        """Return the caller's name after a complete handshake; None while it is incomplete.

        `name` is the listener's. Raises OSError for a failed handshake.
        """
        while self._name is None:
            missing = self._missing()
            if not missing:
                self._name = self._proved(token)
                self.socket.send(_answer(token, self._said[-PROOF - NONCE : -PROOF], name))
            elif not self._read(missing):
                return None
        return self._name if self._read(len(_HEARD)) else None

    def _read(self, count: int) -> bool:
        """Read up to `count` bytes; returns whether there were any."""
        try:
            more = self.socket.recv(count)
        except BlockingIOError:
            return False
        if not more:
            raise ConnectionError("it closed the connection")
        self._said += more
        return True

    def _proved(self, token: bytes) -> str:
        """Return the caller's name. Raises ConnectionError for a wrong proof."""
        (length,) = _HELLO.unpack_from(self._said)
        other = self._said[_HELLO.size : _HELLO.size + length]
        if not hmac.compare_digest(
            self._said[-PROOF:], _proof(token, b"caller", self._nonce, other)
        ):
            raise ConnectionError("it does not know the job's token")
        try:
            return other.decode()
        except UnicodeDecodeError as error:
            raise ConnectionError("its name is no text") from error

    def _missing(self) -> int:
        """Return the number of bytes still to read; never more, since frames may follow."""
        if len(self._said) < _HELLO.size:
            return _HELLO.size - len(self._said)
        length: int = _HELLO.unpack_from(self._said)[0]
        if length > _MOST_NAME:
            raise ConnectionError("its name is too long")
        return _HELLO.size + length + NONCE + PROOF - len(self._said)


def _said(name: str, own: bytes, nonce: bytes, token: bytes) -> bytes:
    """Return the caller's message."""
    text = name.encode()
    return _HELLO.pack(len(text)) + text + own + _proof(token, b"caller", nonce, text)


def _answer(token: bytes, nonce: bytes, name: str) -> bytes:
    return _proof(token, b"listener", nonce, name.encode())


def _proof(token: bytes, role: bytes, nonce: bytes, name: bytes) -> bytes:
    return hmac.digest(token, role + nonce + name, "sha256")


def _exactly(there: socket.socket, count: int, until: float) -> bytes:
    """Return exactly `count` bytes. Raises ConnectionError at the end, TimeoutError after `until`.

    The deadline covers all bytes, since a malicious peer may send a byte at a time forever.
    """
    found = b""
    while len(found) < count:
        there.settimeout(max(0.001, until - time.monotonic()))
        more = there.recv(count - len(found))
        if not more:
            raise ConnectionError("it closed the connection")
        found += more
    return found
