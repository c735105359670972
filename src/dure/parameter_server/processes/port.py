"""The port of a process: connections to others of its job, and the frames that come over them.

Whoever has something to say to a process that it is not connected to calls it, if it may be there;
both prove that they know the job's token (`greeting`). A connection that breaks is an event,
`Gone`, and no error; what was on its way over it is lost, and said again by those whose affair it
is. What cannot leave at once waits in memory, and leaves when the peer takes it: nothing here waits
for a peer, but a call for a second at most.

What is said leaves together, when its speaker listens again: a push, and the pull after it, cost
one system call and wake their server once.
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
from dure.parameter_server.processes.frames import Decoder, Encoder, FrameError
from dure.parameter_server.processes.greeting import Caller, call
from dure.parameter_server.processes.incoming import Came, Incoming
from dure.parameter_server.processes.memory import Card, Memory
from dure.parameter_server.processes.said import Said, Shipped, landed, shipped
from dure.tensors.blocks import Blocks

_CALL_SECONDS = 1.0
"""That a call may take, with both proofs: a process that is there answers at once."""
_AGAIN_SECONDS = 0.25
"""Until one that could not be reached is called again."""
_MOST_CALLERS = 64
"""Who have proved nothing yet; of more, the one that has waited longest goes."""
BESIDE = " heart"
"""Ends the name of the second port of a process, by which it says that it lives."""
_LARGE = 1 << 16
"""Bytes of a payload that is not kept for what may be said after it."""
_PIECES = 16
"""That leave in one system call."""

_KEPT_ALIVE = {"TCP_KEEPIDLE": 10, "TCP_KEEPINTVL": 5, "TCP_KEEPCNT": 4}
"""A connection over which nothing comes for 30 s has ended."""

_STAY = (messages.Push, messages.Values, messages.Replicate, Shipped)
"""Messages whose tensors nobody changes until they have been answered: they leave uncopied."""


class Gone(NamedTuple):
    """The connection to a process has ended. reason: what that process did."""

    reason: str


Heard = tuple[str, "Said | messages.Snapshot | Gone"]


@dataclass(eq=False)
class Line:
    """A connection: what waits to leave, and what has come of the next frame."""

    name: str
    socket: socket.socket
    incoming: Incoming
    leaving: deque[memoryview] = field(default_factory=deque)
    full: bool = False
    """Whether the peer has to take something before more can leave."""


class Port:
    """The port of process `name`. Listens from the start; call `meet` before anything is said.

    token: the job's. most: bytes that a frame's data may have. host: where it listens.
    """

    def __init__(self, name: str, token: bytes, most: int, host: str = "127.0.0.1") -> None:
        self.name = name
        self.most = most
        self.spin = 0.0
        """Seconds that `hear` looks again and again before it sleeps: for a core of its own."""
        self._token = token
        self._listener = socket.create_server((host, 0), backlog=128)
        self._listener.setblocking(False)
        self._selector = selectors.DefaultSelector()
        self._selector.register(self._listener, selectors.EVENT_READ, None)
        self._callers: deque[Caller] = deque()
        self._lines: dict[str, Line] = {}
        self._unsent: list[Line] = []
        self._heard: deque[Heard] = deque()
        self._failed: dict[str, float] = {}
        self._calls: frozenset[str] = frozenset()
        # Written to by other threads, so that a wait ends.
        self._awake, self._waker = socket.socketpair()
        self._awake.setblocking(False)
        self._waker.setblocking(False)
        self._selector.register(self._awake, selectors.EVENT_READ, self._awake)
        self._blocks = Blocks()
        self._encoder = Encoder()
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
        self._see(Memory(self.name, cards))
        self._calls = frozenset(calls)
        for other in calls:
            self._line(other)

    def beside(self, name: str) -> Port:
        """Another port of this process, which another thread may have, to those that it calls."""
        assert self.memory is not None
        port = Port(name, self._token, self.most, self.address[0])
        card = self.memory.cards[self.name]
        cards = {**self.memory.cards, name: msgspec.structs.replace(card, name=name)}
        port._see(Memory(name, cards))
        port._calls = self._calls
        return port

    def _see(self, memory: Memory) -> None:
        self.memory = memory
        self._decoder = Decoder(memory.look)

    def reaches(self, other: str) -> bool:
        """Whether there is a connection to a process."""
        return other in self._lines

    def reach(self, other: str) -> bool:
        """Whether there is a connection to a process, which is called where there is none."""
        return self._line(other) is not None

    def wake(self) -> None:
        """Has `hear` return at once; any thread may call it, and after the port was closed too."""
        with contextlib.suppress(OSError):
            self._waker.send(b"!")

    def close(self) -> None:
        """Ends all connections, after what waits has had a moment to leave."""
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

    # Saying

    def say(self, to: str, message: Said | messages.Snapshot) -> bool:
        """Says something to a process; False where it cannot be reached, and nothing is said.

        It leaves with `flush` or `hear`, or at once if it is large. Tensors of pushes, values,
        replicated updates and snapshots stay as they are until then; others are copied.
        """
        line = self._line(to)
        if line is None:
            return False
        assert self.memory is not None
        shared = self.memory.shares(to)
        if isinstance(message, messages.Snapshot):
            message = shipped(message)
        elif isinstance(message, messages.Pull) and message.into is not None and not shared:
            # Memory that the other does not see.
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
        """Lets leave what was said."""
        lines = self._unsent
        self._unsent = []
        for line in lines:
            if not line.full:
                self._send(line)

    def _send(self, line: Line) -> None:
        """Sends what can be sent at once; the rest leaves when the peer has taken some."""
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

    # Hearing

    def hear(self, seconds: float) -> Iterator[Heard]:
        """What has come, and from whom; waits so long for the first, at the most."""
        if not self._heard:
            self.flush()
        # A line that broke is heard of.
        if not self._heard:
            self._look(max(0.0, seconds))
        while self._heard:
            yield self._heard.popleft()

    def listen(self, seconds: float) -> None:
        """Lets leave what was said, and takes what comes, which `hear` gives later.

        It waits so long for something, at the most.
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

    def _go_on(self, line: Line, events: int) -> None:
        # What was ready may have been dropped since.
        if events & selectors.EVENT_WRITE and self._lines.get(line.name) is line:
            self._send(line)
        if events & selectors.EVENT_READ and self._lines.get(line.name) is line:
            self._read(line)

    def _wait(self, seconds: float) -> list[tuple[selectors.SelectorKey, int]]:
        """What can be done; looks for a while before it sleeps, where cores allow it."""
        if self.spin > 0:
            until = time.perf_counter() + min(self.spin, seconds)
            while True:
                if found := self._selector.select(0):
                    return found
                if time.perf_counter() >= until:
                    break
        return self._selector.select(seconds)

    def _read(self, line: Line) -> None:
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
        except FrameError as error:
            self._drop(line, f"sent what is no message: {error}")
        except OSError as error:
            self._broke(line, error)

    def _take(self, sender: str, frame: Came) -> None:
        """A frame has come. Raises FrameError if it is none of this job."""
        said = self._decoder.decode(frame.header, frame.data)
        self.received += payload_of(said)
        self._heard.append((sender, _landed(said) if isinstance(said, Shipped) else said))

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
        """Hears what one who has called says to prove that it is of this job."""
        if caller not in self._callers:
            return  # it was hung up on since
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
        """Whether a process of the job may be called this: so there are no more lines than that."""
        if self.memory is None:
            return True
        return name in self.memory.cards or name.removesuffix(BESIDE) in self.memory.cards

    def _hang_up(self, caller: Caller) -> None:
        self._callers.remove(caller)
        self._selector.unregister(caller.socket)
        caller.socket.close()

    def _add(self, name: str, there: socket.socket) -> Line:
        there.setblocking(False)
        there.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        _look_after(there)
        line = Line(name, there, Incoming(self.most, self._blocks))
        former = self._lines.get(name)
        if former is not None:
            # Both have called each other, or it has come back: the newer one is the one it uses.
            self._forget(former)
        self._lines[name] = line
        self._selector.register(there, selectors.EVENT_READ, line)
        return line

    def _broke(self, line: Line, error: OSError) -> None:
        self._drop(line, f"broke the connection ({error.strerror or error})")

    def _drop(self, line: Line, reason: str) -> None:
        if self._lines.get(line.name) is line:
            self._forget(line)
            self._heard.append((line.name, Gone(reason)))

    def _forget(self, line: Line) -> None:
        self._lines.pop(line.name, None)
        with contextlib.suppress(KeyError, ValueError):
            self._selector.unregister(line.socket)
        line.leaving.clear()
        line.socket.close()


def _look_after(there: socket.socket) -> None:
    """Has the system ask a silent peer whether it is there: a host may go without a word.

    One that is stopped is there; it is the manager that gives it up.
    """
    there.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for name, value in _KEPT_ALIVE.items():
        if hasattr(socket, name):
            there.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)


def _take_away(pieces: deque[memoryview], count: int) -> None:
    """Takes so many bytes from the front."""
    while pieces and count >= len(pieces[0]):
        count -= len(pieces.popleft())
    if count:
        pieces[0] = pieces[0][count:]


def _landed(said: Shipped) -> messages.Snapshot:
    try:
        return landed(said)
    except (ValueError, TypeError, LookupError, AttributeError, RecursionError) as error:
        raise FrameError(f"it is no snapshot: {error}") from error


def payload_of(message: Said) -> int:
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
