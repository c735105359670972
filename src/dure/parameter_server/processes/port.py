"""The port of a process: connections to others of its job, and the frames that come over them.

Both sides of a connection prove that they know the job's token, which never travels:

    listener -> caller    16 random bytes a
    caller -> listener    its name, 16 random bytes b, HMAC(token, "caller", a, name)
    listener -> caller    HMAC(token, "listener", b)

Whoever has something to say to a process that it is not connected to calls it, if it may be there.
A connection that breaks is an event, `Gone`, and no error; what was on its way over it is lost, and
said again by those whose affair it is. Nothing here waits for a peer: what cannot leave at once
waits in memory, and leaves when the peer takes it.

Source: Krawczyk et al. 1997, RFC 2104 (HMAC).
"""

from __future__ import annotations

import contextlib
import hmac
import math
import os
import selectors
import socket
import struct
import time
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import msgspec
import torch
from torch import Tensor

from dure.parameter_server import messages
from dure.parameter_server.processes.frames import (
    HEAD,
    MOST_HEADER,
    FrameError,
    decode,
    encode,
)
from dure.parameter_server.processes.memory import Card, Memory
from dure.parameter_server.processes.said import Said, Shipped, landed, shipped

_NONCE = 16
_HELLO = struct.Struct("<H")
_MOST_NAME = 64
_CALL_SECONDS = 1.0
"""That a call may take, with both proofs: a process that is there answers at once."""
_AGAIN_SECONDS = 0.25
"""Until one that could not be reached is called again."""


class Gone(NamedTuple):
    """The connection to a process has ended."""

    reason: str


Heard = tuple[str, "Said | messages.Snapshot | Gone"]


@dataclass(eq=False)
class Line:
    """A connection: what waits to leave, and what has come of the next frame."""

    name: str
    socket: socket.socket
    leaving: deque[memoryview] = field(default_factory=deque)
    head: bytearray = field(default_factory=lambda: bytearray(HEAD.size))
    header: bytearray = field(default_factory=bytearray)
    data: Tensor = field(default_factory=lambda: torch.empty(0, dtype=torch.uint8))
    view: memoryview = field(init=False)
    """What the next bytes are written into."""
    part: int = 0
    """Which part of the frame comes: head, header, data."""

    def __post_init__(self) -> None:
        self.view = memoryview(self.head)


class Port:
    """The port of process `name`. Listens from the start; call `meet` before anything is said.

    token: the job's. most: bytes that a frame's data may have. host: where it listens.
    """

    def __init__(self, name: str, token: bytes, most: int, host: str = "127.0.0.1") -> None:
        self.name = name
        self.most = most
        self._token = token
        self._listener = socket.create_server((host, 0), backlog=128)
        self._listener.setblocking(False)
        self._selector = selectors.DefaultSelector()
        self._selector.register(self._listener, selectors.EVENT_READ, None)
        self._lines: dict[str, Line] = {}
        self._heard: deque[Heard] = deque()
        self._failed: dict[str, float] = {}
        self._calls: frozenset[str] = frozenset()
        # Written to by other threads, so that a wait ends.
        self._awake, self._waker = socket.socketpair()
        self._awake.setblocking(False)
        self._waker.setblocking(False)
        self._selector.register(self._awake, selectors.EVENT_READ, self._awake)
        self.memory: Memory | None = None
        self.sent = 0
        """Payload bytes that have left, those in shared memory among them."""
        self.received = 0

    @property
    def address(self) -> tuple[str, int]:
        """Where it listens."""
        host, port = self._listener.getsockname()[:2]
        return host, port

    def meet(self, cards: dict[str, Card], calls: Sequence[str]) -> None:
        """These are the processes of the job, this one among them.

        calls: those that this one calls, now and whenever it has something to say and no connection
        to them; the others call it.
        """
        self.memory = Memory(self.name, cards)
        self._calls = frozenset(calls)
        for other in calls:
            self._line(other)

    def beside(self, name: str) -> Port:
        """Another port of this process, which another thread may have, to those that it calls."""
        assert self.memory is not None
        port = Port(name, self._token, self.most, self.address[0])
        card = self.memory.cards[self.name]
        cards = {**self.memory.cards, name: msgspec.structs.replace(card, name=name)}
        port.memory = Memory(name, cards)
        port._calls = self._calls
        return port

    def reaches(self, other: str) -> bool:
        """Whether there is a connection to a process."""
        return other in self._lines

    def wake(self) -> None:
        """Has `hear` return at once; any thread may call it."""
        with contextlib.suppress(BlockingIOError):
            self._waker.send(b"!")

    def close(self) -> None:
        """Ends all connections, after what waits has had a moment to leave."""
        until = time.monotonic() + _CALL_SECONDS
        while any(line.leaving for line in self._lines.values()) and time.monotonic() < until:
            self._look(0.01)
        for line in list(self._lines.values()):
            self._drop(line, "this end was closed")
        self._heard.clear()
        self._selector.close()
        for each in (self._listener, self._awake, self._waker):
            each.close()

    # Saying

    def say(self, to: str, message: Said | messages.Snapshot) -> None:
        """Says something to a process; to one that cannot be reached, nothing.

        What it says is taken as it is now: tensors outside of shared memory leave at once, or are
        copied.
        """
        line = self._line(to)
        if line is None:
            return
        assert self.memory is not None
        shared = self.memory.shares(to)
        if isinstance(message, messages.Snapshot):
            message = shipped(message)
        elif isinstance(message, messages.Pull) and message.into is not None and not shared:
            # Memory that the other does not see.
            message = msgspec.structs.replace(message, into=None)
        place_of = self.memory.place_of
        frame = encode(message, place_of if shared else lambda tensor: None)
        self.sent += _payload(message)
        self._leave(line, [memoryview(frame.head), *frame.data])

    def _leave(self, line: Line, pieces: list[memoryview]) -> None:
        if not line.leaving:
            pieces = self._push_out(line, pieces)
        if pieces:
            # The tensors may be changed by their owner before the rest has left.
            line.leaving.extend(memoryview(bytes(piece)) for piece in pieces)
            if line.name in self._lines:
                self._selector.modify(
                    line.socket, selectors.EVENT_READ | selectors.EVENT_WRITE, line
                )

    def _push_out(self, line: Line, pieces: list[memoryview]) -> list[memoryview]:
        """Sends what can be sent at once; what is left."""
        while pieces:
            try:
                count = line.socket.sendmsg(pieces[:16])
            except BlockingIOError:
                return pieces
            except OSError as error:
                self._drop(line, error.strerror or str(error))
                return []
            while pieces and count >= len(pieces[0]):
                count -= len(pieces[0])
                pieces = pieces[1:]
            if count:
                pieces = [pieces[0][count:], *pieces[1:]]
        return []

    # Hearing

    def hear(self, seconds: float) -> Iterator[Heard]:
        """What has come, and from whom; waits so long for the first, at the most."""
        if not self._heard:
            self._look(max(0.0, seconds))
        while self._heard:
            yield self._heard.popleft()

    def _look(self, seconds: float) -> None:
        for key, events in self._selector.select(min(seconds, 3600.0)):
            if key.data is None:
                self._answer_call()
                continue
            if key.data is self._awake:
                self._awake.recv(4096)
                continue
            line: Line = key.data
            if events & selectors.EVENT_WRITE:
                self._go_on(line)
            if events & selectors.EVENT_READ and line.name in self._lines:
                self._read(line)

    def _go_on(self, line: Line) -> None:
        line.leaving = deque(self._push_out(line, list(line.leaving)))
        if not line.leaving and line.name in self._lines:
            self._selector.modify(line.socket, selectors.EVENT_READ, line)

    def _read(self, line: Line) -> None:
        try:
            while True:
                # An empty part is complete at once.
                if len(line.view):
                    count = line.socket.recv_into(line.view)
                    if not count:
                        self._drop(line, "it closed the connection")
                        return
                    line.view = line.view[count:]
                if not len(line.view):
                    self._complete(line)
        except BlockingIOError:
            return
        except FrameError as error:
            self._drop(line, f"it sent what is no message: {error}")
        except OSError as error:
            self._drop(line, error.strerror or str(error))

    def _complete(self, line: Line) -> None:
        """A part of a frame is there: what comes next."""
        if line.part == 0:
            header, data = HEAD.unpack(line.head)
            if header > MOST_HEADER or data > self.most:
                raise FrameError(f"a frame of {header} and {data} bytes is longer than any here")
            line.header = bytearray(header)
            line.data = torch.empty(data, dtype=torch.uint8)
            line.view = memoryview(line.header)
            line.part = 1
            return
        if line.part == 1:
            inside: Any = line.data.numpy()
            line.view = memoryview(inside)
            line.part = 2
            if len(line.data):
                return
        assert self.memory is not None
        said = decode(bytes(line.header), line.data, self.memory.look)
        line.view = memoryview(line.head)
        line.part = 0
        self.received += _payload(said)
        self._heard.append((line.name, landed(said) if isinstance(said, Shipped) else said))

    # Connections

    def _line(self, to: str) -> Line | None:
        """The connection to a process, made now where there is none; None where it cannot be."""
        line = self._lines.get(to)
        if line is not None or self.memory is None:
            return line
        now = time.monotonic()
        card = self.memory.cards.get(to)
        if card is None or to not in self._calls:
            return None
        if now < self._failed.get(to, -math.inf) + _AGAIN_SECONDS:
            return None
        try:
            line = self._call(to, card.address)
        except OSError:
            self._failed[to] = now
            return None
        self._add(line)
        return line

    def _call(self, to: str, address: tuple[str, int]) -> Line:
        """Calls a process. Raises OSError if it is not there, or is another."""
        there = socket.create_connection(address, timeout=_CALL_SECONDS)
        try:
            nonce = _exactly(there, _NONCE)
            own = os.urandom(_NONCE)
            name = self.name.encode()
            proof = _proof(self._token, b"caller", nonce, name)
            there.sendall(_HELLO.pack(len(name)) + name + own + proof)
            if not hmac.compare_digest(
                _exactly(there, 32), _proof(self._token, b"listener", own, to.encode())
            ):
                raise ConnectionError("it does not know the job's token")
            return Line(to, there)
        except BaseException:
            there.close()
            raise

    def _answer_call(self) -> None:
        try:
            there, _ = self._listener.accept()
        except OSError:
            return
        try:
            there.settimeout(_CALL_SECONDS)
            nonce = os.urandom(_NONCE)
            there.sendall(nonce)
            (length,) = _HELLO.unpack(_exactly(there, _HELLO.size))
            if length > _MOST_NAME:
                raise ConnectionError("its name is too long")
            name = _exactly(there, length)
            own = _exactly(there, _NONCE)
            if not hmac.compare_digest(
                _exactly(there, 32), _proof(self._token, b"caller", nonce, name)
            ):
                raise ConnectionError("it does not know the job's token")
            there.sendall(_proof(self._token, b"listener", own, self.name.encode()))
            self._add(Line(name.decode(), there))
        except (OSError, UnicodeDecodeError):
            there.close()

    def _add(self, line: Line) -> None:
        line.socket.setblocking(False)
        line.socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        former = self._lines.get(line.name)
        if former is not None:
            # Both have called each other, or it has come back: the newer one is the one it uses.
            self._forget(former)
        self._lines[line.name] = line
        self._selector.register(line.socket, selectors.EVENT_READ, line)

    def _drop(self, line: Line, reason: str) -> None:
        if self._lines.get(line.name) is line:
            self._forget(line)
            self._heard.append((line.name, Gone(reason)))

    def _forget(self, line: Line) -> None:
        self._lines.pop(line.name, None)
        with contextlib.suppress(KeyError, ValueError):
            self._selector.unregister(line.socket)
        line.socket.close()


def _proof(token: bytes, role: bytes, nonce: bytes, name: bytes) -> bytes:
    return hmac.digest(token, role + nonce + name, "sha256")


def _exactly(there: socket.socket, count: int) -> bytes:
    """So many bytes. Raises ConnectionError at the end of the stream."""
    found = b""
    while len(found) < count:
        more = there.recv(count - len(found))
        if not more:
            raise ConnectionError("it closed the connection")
        found += more
    return found


def _payload(message: Said) -> int:
    """Bytes of weights, gradients and rows of tables in a message, wherever they lie."""
    if isinstance(message, messages.Push):
        return message.gradient.nbytes + _nbytes(message.rows, message.digest)
    if isinstance(message, messages.Pull):
        return _nbytes(message.rows, message.digest)
    if isinstance(message, messages.Values):
        return message.values.nbytes + _nbytes(message.rows)
    if isinstance(message, messages.Replicate):
        return message.step.gradient.nbytes + _nbytes(message.step.rows)
    return 0


def _nbytes(*tensors: Tensor | None) -> int:
    """Bytes of the tensors that are there."""
    return sum(tensor.nbytes for tensor in tensors if tensor is not None)
