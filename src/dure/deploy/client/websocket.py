"""Client's end of a WebSocket, which the computing thread itself reads and writes.

The protocol is the sans-I/O protocol of the library (`websockets.client`). The library's own
connections read in a separate thread, and every message waits for the hand-over between threads:
0.1 ms, while a step of a small model takes 1 ms.

While no thread waits for a message, another thread checks the socket periodically, so that pings
are answered while the client computes. A long message is sent in fragments (`FRAGMENT`), and a ping
is answered between two fragments. The client pings a server that is silent for a heartbeat; a
server that is silent for `SILENT` heartbeats counts as disconnected.

The size of the server's messages is checked before any buffering
(`dure.deploy.frame_limits`): a server that announces a message beyond the owner's limit is
malicious, and the client closes the connection.
"""

from __future__ import annotations

import socket
import threading
import time
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress

from websockets.client import ClientProtocol
from websockets.frames import BINARY, CLOSE, CONT, TEXT, Close, Frame
from websockets.protocol import CONNECTING, OPEN
from websockets.uri import parse_uri

from dure.deploy.client.connection import READ_AT_ONCE, SENT_AT_ONCE
from dure.deploy.frame_limits import FrameLimitError, FrameLimits

MOST_FIRST = 1 << 21
"""Maximum bytes of a message until the owner allows more: a roster, and its accompanying data."""

MOST_ANSWER = 1 << 16
"""Maximum bytes of the head of the answer to the opening request."""

_END_OF_HEAD = b"\r\n\r\n"

FRAGMENT = 1 << 22
"""Bytes of a fragment.

Smaller fragments cost more: 1.6 MB take 0.5 ms longer in 25 pieces than in one piece.
"""

SILENT = 3
"""Heartbeats without a byte after which the server counts as disconnected."""

LOOKS = 4
"""Checks of the socket per heartbeat while the client computes."""

CLOSE_SECONDS = 1.0
"""Maximum seconds to wait for the server's closing frame."""

Buffer = bytes | bytearray | memoryview


class ClosedError(Exception):
    """The connection is closed.

    `code` and `reason` are the server's; None and "" if the connection broke.
    """

    def __init__(self, code: int | None = None, reason: str = "") -> None:
        super().__init__(reason or "the connection broke")
        self.code = code
        self.reason = reason


class WebSocket:
    """Open WebSocket over a connected socket, which the WebSocket owns from now on.

    Args:
        sock: Connected socket, with or without TLS.
        url: URL with scheme ws, whatever the socket's transport.
        headers: Additional headers of the opening request.
        seconds: Timeout of the opening.
        heartbeat: Seconds between pings of a silent server.

    Raises:
        InvalidHandshake: The server refuses the WebSocket (`websockets`).
        OSError: The connection broke, or timed out.
    """

    def __init__(
        self,
        sock: socket.socket,
        url: str,
        headers: Mapping[str, str],
        seconds: float,
        heartbeat: float,
    ) -> None:
        self._socket = sock
        self._heartbeat = heartbeat
        self._protocol = ClientProtocol(parse_uri(url), max_size=None)
        self._lock = threading.Lock()
        """Lock of the thread that reads or writes."""
        self._limits = FrameLimits(MOST_FIRST, masked=False)
        self._answer = bytearray()
        """Received part of the head of the answer to the opening request."""
        self._answered = False
        """Whether the head is complete."""
        self._fragments: list[Buffer] = []
        """Fragments of an incomplete message."""
        self._messages: deque[Buffer] = deque()
        self._closed: ClosedError | None = None
        self._heard = time.monotonic()
        self._asked = False
        """Whether a ping has been sent since the last received byte."""
        self._ends = threading.Event()
        try:
            self._shakes_hands(headers, seconds)
        except BaseException:
            self._socket.close()
            raise
        threading.Thread(target=self._minds, name="dure minds a channel", daemon=True).start()

    def _shakes_hands(self, headers: Mapping[str, str], seconds: float) -> None:
        request = self._protocol.connect()
        request.headers.update(headers)
        self._protocol.send_request(request)
        self._write()
        until = time.monotonic() + seconds
        while self._protocol.state is CONNECTING:
            left = until - time.monotonic()
            if left <= 0 or not self._read(left):
                raise TimeoutError if self._closed is None else ConnectionResetError
            if self._protocol.handshake_exc is not None:
                raise self._protocol.handshake_exc

    def allow(self, most: int) -> None:
        """Set the maximum size in bytes of a message from the server, from now on."""
        self._limits.most = most

    def receive(self, seconds: float) -> Buffer | None:
        """Return the next message; None after `seconds` without a message. Raises ClosedError."""
        until = time.monotonic() + seconds
        with self._lock:
            while not self._messages:
                if self._closed is not None:
                    raise self._closed
                left = until - time.monotonic()
                if left <= 0:
                    return None
                # A silent server gets a ping after a heartbeat, however long the caller waits.
                self._reads(min(left, self._heartbeat))
            return self._messages.popleft()

    def send(self, pieces: Sequence[Buffer]) -> None:
        """Send a message, given in pieces. Raises ClosedError."""
        left = sum(memoryview(one).nbytes for one in pieces)
        first = True
        with self._lock:
            for fragment in _fragments(pieces) if left else [b""]:
                if self._closed is not None:
                    raise self._closed
                left -= len(fragment)
                if first:
                    self._protocol.send_binary(fragment, fin=not left)
                else:
                    self._protocol.send_continuation(fragment, fin=not left)
                first = False
                self._writes()

    def close(self) -> None:
        self._ends.set()
        with suppress(OSError, ClosedError), self._lock:
            if self._protocol.state is OPEN:
                self._protocol.send_close(1000)
                self._writes()
            until = time.monotonic() + CLOSE_SECONDS
            # Closing a socket with unread bytes would discard the message sent last.
            while (left := until - time.monotonic()) > 0 and self._read(left):
                pass
        self._socket.close()

    # Methods that use the socket; the caller has the lock

    def _reads(self, seconds: float) -> None:
        """Read bytes for up to `seconds`, and record a broken connection."""
        try:
            came = self._read(seconds)
        except OSError:
            self._breaks()
            return
        if not came:
            self._asks()

    def _asks(self) -> None:
        """Ping a silent server, and close the connection if the server stays silent."""
        silent = time.monotonic() - self._heard
        if silent > SILENT * self._heartbeat:
            self._breaks()
        elif silent > self._heartbeat and not self._asked and self._protocol.state is OPEN:
            self._asked = True
            self._protocol.send_ping(b"")
            self._writes()

    def _writes(self) -> None:
        """Send the protocol's pending bytes, after a check for pings if one is due."""
        if time.monotonic() - self._heard > self._heartbeat / LOOKS:
            self._look()
        try:
            self._write()
        except OSError:
            # The server may have sent the reason before it closed.
            while self._closed is None and self._look():
                pass
            raise self._breaks() from None

    def _breaks(self) -> ClosedError:
        """Mark the connection as broken, unless it is closed already."""
        if self._closed is None:
            self._closed = ClosedError()
        return self._closed

    def _look(self) -> bool:
        """Read without waiting, and return whether bytes were read."""
        try:
            return self._read(0.001)
        except OSError:
            self._breaks()
            return False

    def _read(self, seconds: float) -> bool:
        """Read bytes for up to `seconds`, process them, and return whether bytes were read."""
        self._socket.settimeout(seconds)
        try:
            data = self._socket.recv(READ_AT_ONCE)
        except TimeoutError:
            return False
        if not data:
            self._protocol.receive_eof()
            self._breaks()
            return False
        self._heard = time.monotonic()
        self._asked = False
        self._takes_in(data)
        for event in self._protocol.events_received():
            if isinstance(event, Frame):
                self._takes(event)
        self._write()
        # The server has closed the connection, or violated the protocol.
        if self._protocol.close_expected():
            self._breaks()
        return True

    def _takes_in(self, data: bytes) -> None:
        """Pass received bytes to the protocol, after the check of the limits."""
        if self._protocol.state is CONNECTING:
            data = self._handshake(data)
        try:
            self._limits.look(data)
        except FrameLimitError as error:
            if self._closed is None:
                self._closed = ClosedError(reason=f"the server violates the protocol: {error}")
            return
        if data:
            self._protocol.receive_data(data)

    def _handshake(self, data: bytes) -> bytes:
        """Pass the answer to the opening request to the protocol; return the bytes after it."""
        if self._answered:
            # Body of a refusal, which the protocol bounds.
            self._protocol.receive_data(data)
            return b""
        self._answer += data
        head, end, rest = bytes(self._answer).partition(_END_OF_HEAD)
        if not end:
            if len(self._answer) > MOST_ANSWER:
                raise ConnectionResetError("the answer to the request for a channel has no end")
            return b""
        self._answered = True
        self._answer.clear()
        self._protocol.receive_data(head + end)
        if self._protocol.state is not CONNECTING:
            return rest
        if rest:
            self._protocol.receive_data(rest)
        return b""

    def _takes(self, frame: Frame) -> None:
        if frame.opcode in (BINARY, TEXT, CONT):
            self._fragments.append(frame.data)
            if frame.fin:
                parts = self._fragments
                self._fragments = []
                self._messages.append(parts[0] if len(parts) == 1 else bytearray().join(parts))
        elif frame.opcode is CLOSE:
            said = Close.parse(frame.data)
            self._closed = ClosedError(int(said.code), said.reason)

    def _write(self) -> None:
        """Send the protocol's pending bytes, pongs included."""
        self._socket.settimeout(SILENT * self._heartbeat)
        for data in self._protocol.data_to_send():
            for begin in range(0, len(data), SENT_AT_ONCE):
                self._socket.sendall(memoryview(data)[begin : begin + SENT_AT_ONCE])

    def _minds(self) -> None:
        """Thread: answer pings while no other thread reads or writes."""
        while not self._ends.wait(self._heartbeat / LOOKS):
            # A thread that has the lock reads or writes, and handles pings itself.
            if self._lock.acquire(blocking=False):
                try:
                    while self._closed is None and self._look():
                        pass
                    with suppress(ClosedError):
                        self._asks()
                finally:
                    self._lock.release()


def _fragments(pieces: Sequence[Buffer]) -> Iterator[bytes]:
    """Yield the same bytes in pieces of `FRAGMENT` bytes; the last piece may be smaller."""
    parts: list[memoryview] = []
    size = 0
    for piece in pieces:
        left = memoryview(piece).cast("B")
        while left:
            part = left[: FRAGMENT - size]
            left = left[len(part) :]
            parts.append(part)
            size += len(part)
            if size == FRAGMENT:
                yield b"".join(parts)
                parts, size = [], 0
    if parts:
        yield b"".join(parts)
