"""Port: connections of a process to others of its job, and the frames over them.

Before sending to an unconnected process, a port connects to it if possible; both prove knowledge of
the job's token (`handshake`). A broken connection is an event, `Disconnected`, not an error. Its
undelivered messages are lost, and their senders retry. Data that cannot be sent at once wait in
memory until the peer takes them: no operation waits for a peer, except a call for at most a second.

Messages are sent together, when the sender listens again: a push and the following pull cost a
single system call and wake their server once.
"""

from __future__ import annotations

import contextlib
import math
import selectors
import socket
import time
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import islice
from typing import NamedTuple

import msgspec
from torch import Tensor

from dure.parameter_server import messages
from dure.parameter_server.processes.frames import EndpointFrameError, FrameDecoder, FrameEncoder
from dure.parameter_server.processes.handshake import Caller, call
from dure.parameter_server.processes.incoming import Incoming, ReceivedFrame
from dure.parameter_server.processes.memory import RankInfo, RankMemory
from dure.parameter_server.processes.messages import (
    ProcessMessage,
    SerialisedSnapshot,
    deserialise_snapshot,
    serialise_snapshot,
)
from dure.tensors.block_allocator import BlockAllocator

_CALL_SECONDS = 1.0
"""Timeout of a call with both proofs, in seconds: a live process answers at once."""
_AGAIN_SECONDS = 0.25
"""Seconds before an unreachable process is called again."""
_MOST_CALLERS = 64
"""Largest number of callers in a handshake; beyond, the oldest caller is dropped."""
HEARTBEAT_SUFFIX = " heart"
"""Suffix of the name of a process's second port, for heartbeats."""
_LARGE = 1 << 16
"""Bytes of a payload that is sent without waiting for further messages."""
_PIECES = 16
"""Largest number of pieces in a system call."""

_KEPT_ALIVE = {"TCP_KEEPIDLE": 10, "TCP_KEEPINTVL": 5, "TCP_KEEPCNT": 4}
"""TCP keep-alive: a connection without any answer for 30 s has ended."""

_STAY = (messages.Push, messages.Values, messages.Replicate, SerialisedSnapshot)
"""Messages whose tensors stay unchanged until the answer: they are sent without a copy."""


class Disconnected(NamedTuple):
    """End of the connection to a process. `reason` describes the action of that process."""

    reason: str


Heard = tuple[str, "ProcessMessage | messages.Snapshot | Disconnected"]


@dataclass(eq=False)
class EndpointConnection:
    """Connection with its outgoing data and the incoming partial frame."""

    name: str
    socket: socket.socket
    incoming: Incoming
    leaving: deque[memoryview] = field(default_factory=deque)
    full: bool = False
    """Whether the peer must take data before more can be sent."""


class Endpoint:
    """Port of process `name`. The port listens from the start; call `meet` before sending.

    Args:
        name: name of the node.
        token: token of the job.
        most: largest length of a frame's data in bytes.
        host: address to listen at.
    """

    def __init__(self, name: str, token: bytes, most: int, host: str = "127.0.0.1") -> None:
        self.name = name
        self.most = most
        self.spin = 0.0
        """Seconds that `hear` polls before it sleeps, for a process with a core of its own."""
        self._token = token
        self._listener = socket.create_server((host, 0), backlog=128)
        self._listener.setblocking(False)
        self._selector = selectors.DefaultSelector()
        self._selector.register(self._listener, selectors.EVENT_READ, None)
        self._callers: deque[Caller] = deque()
        self._lines: dict[str, EndpointConnection] = {}
        self._unsent: list[EndpointConnection] = []
        self._heard: deque[Heard] = deque()
        self._failed: dict[str, float] = {}
        self._calls: frozenset[str] = frozenset()
        # Other threads write to this socket pair to end a wait.
        self._awake, self._waker = socket.socketpair()
        self._awake.setblocking(False)
        self._waker.setblocking(False)
        self._selector.register(self._awake, selectors.EVENT_READ, self._awake)
        self._blocks = BlockAllocator()
        self._encoder = FrameEncoder()
        self.memory: RankMemory | None = None
        self.sent = 0
        """Sent payload bytes, including those in shared memory."""
        self.received = 0

    @property
    def address(self) -> tuple[str, int]:
        """Host and port of the listener."""
        host, port = self._listener.getsockname()[:2]
        return host, port

    def meet(self, cards: dict[str, RankInfo], calls: Sequence[str]) -> None:
        """Set the processes of the job, this process included, and connect to `calls`.

        `calls` are the nodes that this process calls, now and when it sends without a connection;
        the others call this process.
        """
        self._see(RankMemory(self.name, cards))
        self._calls = frozenset(calls)
        for other in calls:
            self._line(other)

    def beside(self, name: str) -> Endpoint:
        """Return another port of this process, for another thread, to the nodes of `calls`."""
        assert self.memory is not None
        port = Endpoint(name, self._token, self.most, self.address[0])
        card = self.memory.cards[self.name]
        cards = {**self.memory.cards, name: msgspec.structs.replace(card, name=name)}
        port._see(RankMemory(name, cards))
        port._calls = self._calls
        return port

    def _see(self, memory: RankMemory) -> None:
        self.memory = memory
        self._decoder = FrameDecoder(memory.look)

    def reaches(self, other: str) -> bool:
        """Return whether a connection to a process exists."""
        return other in self._lines

    def reach(self, other: str) -> bool:
        """Return whether a connection to a process exists, after a call if needed."""
        return self._line(other) is not None

    def wake(self) -> None:
        """Let `hear` return at once. Any thread may call this, even after `close`."""
        with contextlib.suppress(OSError):
            self._waker.send(b"!")

    def close(self) -> None:
        """Close all connections, after a short time for outgoing data."""
        self.flush()
        until = time.monotonic() + _CALL_SECONDS
        while any(line.leaving for line in self._lines.values()) and time.monotonic() < until:
            self._look(0.01)
        for line in list(self._lines.values()):
            self._forget(line)
        for caller in self._callers:
            caller.socket.close()
        self._heard.clear()
        self._selector.close()
        for each in (self._listener, self._awake, self._waker):
            each.close()

    # Sending

    def say(self, to: str, message: ProcessMessage | messages.Snapshot) -> bool:
        """Send a message to a process; returns False without sending if it is unreachable.

        The message is sent by `flush` or `hear`, or at once if it is large. Tensors of pushes,
        values, replicated updates and snapshots must stay unchanged until then; others are copied.
        """
        line = self._line(to)
        if line is None:
            return False
        assert self.memory is not None
        shared = self.memory.shares(to)
        if isinstance(message, messages.Snapshot):
            message = serialise_snapshot(message)
        elif isinstance(message, messages.Pull) and message.into is not None and not shared:
            # The receiver does not share this memory.
            message = msgspec.structs.replace(message, into=None)
        frame = self._encoder.encode(message, self.memory.place_of if shared else None)
        payload = payload_of(message)
        self.sent += payload
        if not line.leaving:
            self._unsent.append(line)
        line.leaving.append(memoryview(frame.head))
        stay = isinstance(message, _STAY)
        line.leaving.extend(piece if stay else memoryview(bytes(piece)) for piece in frame.data)
        if payload >= _LARGE:
            self._send(line)
        return True

    def flush(self) -> None:
        """Send the queued messages."""
        lines = self._unsent
        self._unsent = []
        for line in lines:
            if not line.full:
                self._send(line)

    def _send(self, line: EndpointConnection) -> None:
        """Send without blocking; the rest follows when the peer has taken some."""
        try:
            while line.leaving:
                pieces = [*islice(line.leaving, _PIECES)]
                _take_away(line.leaving, line.socket.sendmsg(pieces))
        except BlockingIOError:
            pass
        except OSError as error:
            self._broke(line, error)
            return
        full = bool(line.leaving)
        if full != line.full:
            line.full = full
            events = selectors.EVENT_READ | (selectors.EVENT_WRITE if full else 0)
            self._selector.modify(line.socket, events, line)

    # Receiving

    def hear(self, seconds: float) -> Iterator[Heard]:
        """Yield received messages with their senders; waits for the first for at most `seconds`."""
        if not self._heard:
            self.flush()
        # A broken connection during the flush is itself an event.
        if not self._heard:
            self._look(max(0.0, seconds))
        while self._heard:
            yield self._heard.popleft()

    def listen(self, seconds: float) -> None:
        """Send the queued messages and receive messages for a later `hear`.

        Waits for at most `seconds`.
        """
        self.flush()
        self._look(max(0.0, seconds))

    def _look(self, seconds: float) -> None:
        while self._callers and self._callers[0].until < time.monotonic():
            self._hang_up(self._callers[0])
        for key, events in self._wait(min(seconds, 3600.0)):
            if key.data is None:
                self._answer_call()
            elif key.data is self._awake:
                self._awake.recv(4096)
            elif isinstance(key.data, Caller):
                self._greet(key.data)
            else:
                self._go_on(key.data, events)

    def _go_on(self, line: EndpointConnection, events: int) -> None:
        # The connection may have been dropped since the select.
        if events & selectors.EVENT_WRITE and self._lines.get(line.name) is line:
            self._send(line)
        if events & selectors.EVENT_READ and self._lines.get(line.name) is line:
            self._read(line)

    def _wait(self, seconds: float) -> list[tuple[selectors.SelectorKey, int]]:
        """Return ready sockets; polls for `spin` seconds before sleeping."""
        if self.spin > 0:
            until = time.perf_counter() + min(self.spin, seconds)
            while True:
                if found := self._selector.select(0):
                    return found
                if time.perf_counter() >= until:
                    break
        return self._selector.select(seconds)

    def _read(self, line: EndpointConnection) -> None:
        try:
            while True:
                room = line.incoming.room()
                count = line.socket.recv_into(room)
                if not count:
                    self._drop(line, "closed the connection")
                    return
                for frame in line.incoming.came(count):
                    self._take(line.name, frame)
                if count < len(room):
                    return
        except BlockingIOError:
            return
        except EndpointFrameError as error:
            self._drop(line, f"sent an invalid message: {error}")
        except OSError as error:
            self._broke(line, error)

    def _take(self, sender: str, frame: ReceivedFrame) -> None:
        """Decode a frame. Raises FrameError for a frame that is not of this job."""
        said = self._decoder.decode(frame.header, frame.data)
        self.received += payload_of(said)
        self._heard.append(
            (sender, _landed(said) if isinstance(said, SerialisedSnapshot) else said)
        )

    # Connections

    def _line(self, to: str) -> EndpointConnection | None:
        """Return the connection to a process, after a call if needed; None if unreachable."""
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
            there = call(card.address, self.name, to, self._token, _CALL_SECONDS)
        except OSError:
            self._failed[to] = now
            return None
        return self._add(to, there)

    def _answer_call(self) -> None:
        now = time.monotonic()
        try:
            there, _ = self._listener.accept()
            caller = Caller(there, now + _CALL_SECONDS)
        except OSError:
            return
        self._callers.append(caller)
        self._selector.register(there, selectors.EVENT_READ, caller)
        while len(self._callers) > _MOST_CALLERS:
            self._hang_up(self._callers[0])

    def _greet(self, caller: Caller) -> None:
        """Continue the handshake with a caller."""
        if caller not in self._callers:
            return  # the caller was dropped meanwhile
        try:
            name = caller.hear(self._token, self.name)
        except OSError:
            self._hang_up(caller)
            return
        if name is not None and not self._is_of_job(name):
            self._hang_up(caller)
        elif name is not None:
            self._callers.remove(caller)
            self._selector.unregister(caller.socket)
            self._add(name, caller.socket)

    def _is_of_job(self, name: str) -> bool:
        """Return whether a node may have this name; bounds the number of connections."""
        if self.memory is None:
            return True
        return name in self.memory.cards or name.removesuffix(HEARTBEAT_SUFFIX) in self.memory.cards

    def _hang_up(self, caller: Caller) -> None:
        self._callers.remove(caller)
        self._selector.unregister(caller.socket)
        caller.socket.close()

    def _add(self, name: str, there: socket.socket) -> EndpointConnection:
        there.setblocking(False)
        there.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        _look_after(there)
        line = EndpointConnection(name, there, Incoming(self.most, self._blocks))
        former = self._lines.get(name)
        if former is not None:
            # The peer has connected again: it uses the newer connection.
            self._forget(former)
        self._lines[name] = line
        self._selector.register(there, selectors.EVENT_READ, line)
        return line

    def _broke(self, line: EndpointConnection, error: OSError) -> None:
        self._drop(line, f"broke the connection ({error.strerror or error})")

    def _drop(self, line: EndpointConnection, reason: str) -> None:
        if self._lines.get(line.name) is line:
            self._forget(line)
            self._heard.append((line.name, Disconnected(reason)))

    def _forget(self, line: EndpointConnection) -> None:
        self._lines.pop(line.name, None)
        with contextlib.suppress(KeyError, ValueError):
            self._selector.unregister(line.socket)
        line.leaving.clear()
        line.socket.close()


def _look_after(there: socket.socket) -> None:
    """Enable TCP keep-alive: a host may disappear without closing its connections.

    A stopped process still answers; the manager drops it.
    """
    there.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for name, value in _KEPT_ALIVE.items():
        if hasattr(socket, name):
            there.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)


def _take_away(pieces: deque[memoryview], count: int) -> None:
    """Remove `count` bytes from the front."""
    while pieces and count >= len(pieces[0]):
        count -= len(pieces.popleft())
    if count:
        pieces[0] = pieces[0][count:]


def _landed(said: SerialisedSnapshot) -> messages.Snapshot:
    try:
        return deserialise_snapshot(said)
    except (ValueError, TypeError, LookupError, AttributeError, RecursionError) as error:
        raise EndpointFrameError(f"it is no snapshot: {error}") from error


def payload_of(message: ProcessMessage) -> int:
    """Return the bytes of weights, gradients and table rows in a message, in any memory."""
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
    """Return the bytes of the tensors that are not None."""
    return sum(tensor.nbytes for tensor in tensors if tensor is not None)
