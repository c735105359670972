"""A client's end of a WebSocket, which the thread that computes reads and writes itself.

The protocol is the library's, which does no input and output (`websockets.client`). Its own
connections read in a thread of theirs, and every message waits until that thread has handed it
over: 0.1 ms, where a step of a small model computes for one.

While nobody waits here, another thread looks at the socket now and then, so that pings are answered
while the client computes. A long message leaves in fragments (`FRAGMENT`), and a ping that comes
meanwhile is answered between two of them. A server that says nothing for a heartbeat is pinged; one
from which nothing comes for `SILENT` of them is gone.

What the server sends is bounded before it is stored (`dure.worlds.network.frame_limits`): a server
that announces a message beyond what the owner allows is one that lies, and the connection is over.
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

from dure.worlds.network.client.connection import READ_AT_ONCE, SENT_AT_ONCE
from dure.worlds.network.frame_limits import FrameLimitError, FrameLimits

MOST_FIRST = 1 << 21
"""Bytes of a message, until the owner allows more: of the roster, with what goes with it."""

MOST_ANSWER = 1 << 16
"""Bytes of the head of the answer to the request for a connection."""

_END_OF_HEAD = b"\r\n\r\n"

FRAGMENT = 1 << 22
"""Bytes of a fragment. Smaller ones cost more: 1.6 MB take 0.5 ms longer in 25 pieces than in one.
"""

SILENT = 3
"""Heartbeats without a byte, after which the server is gone."""

LOOKS = 4
"""Times in a heartbeat that the socket is looked at while the client computes."""

CLOSE_SECONDS = 1.0
"""Seconds that the server has to say goodbye."""

Buffer = bytes | bytearray | memoryview


class ClosedError(Exception):
    """The connection is over. code and reason: as the server has closed it; None, "" where it
    broke."""

    def __init__(self, code: int | None = None, reason: str = "") -> None:
        super().__init__(reason or "the connection broke")
        self.code = code
        self.reason = reason


class WebSocket:
    """An open connection over a socket that is connected, and owned from here on.

    url: of ws://, whatever is beneath. Raises InvalidHandshake of `websockets` where the server
    does not open it, OSError where the connection breaks or so many seconds bring no answer.
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
        """Held by whoever reads or writes."""
        self._limits = FrameLimits(MOST_FIRST, masked=False)
        self._answer = bytearray()
        """The head of the answer to the request for a connection, as far as it has come."""
        self._answered = False
        """Whether it has come as a whole."""
        self._fragments: list[Buffer] = []
        """Of a message that has not come as a whole."""
        self._messages: deque[Buffer] = deque()
        self._closed: ClosedError | None = None
        self._heard = time.monotonic()
        self._asked = False
        """Whether it was pinged since it was heard."""
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
        """Set the bytes that a message of the server may have from now on."""
        self._limits.most = most

    def receive(self, seconds: float) -> Buffer | None:
        """The next message; None where none comes in so many seconds. Raises ClosedError."""
        until = time.monotonic() + seconds
        with self._lock:
            while not self._messages:
                if self._closed is not None:
                    raise self._closed
                left = until - time.monotonic()
                if left <= 0:
                    return None
                self._reads(left)
            return self._messages.popleft()

    def send(self, pieces: Sequence[Buffer]) -> None:
        """Sends a message. Raises ClosedError."""
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
            # What was sent last is lost where a socket is closed that has not been read to its end.
            while (left := until - time.monotonic()) > 0 and self._read(left):
                pass
        self._socket.close()

    # The socket, under the lock

    def _reads(self, seconds: float) -> None:
        """Takes in what comes within so many seconds, and notes where the connection is over."""
        try:
            came = self._read(seconds)
        except OSError:
            self._breaks()
            return
        if not came:
            self._asks()

    def _asks(self) -> None:
        """Pings a server that is silent, and takes it for gone where it stays so."""
        silent = time.monotonic() - self._heard
        if silent > SILENT * self._heartbeat:
            self._breaks()
        elif silent > self._heartbeat and not self._asked and self._protocol.state is OPEN:
            self._asked = True
            self._protocol.send_ping(b"")
            self._writes()

    def _writes(self) -> None:
        """Sends what the protocol has to say, after a look at pings where one is due."""
        if time.monotonic() - self._heard > self._heartbeat / LOOKS:
            self._look()
        try:
            self._write()
        except OSError:
            # The server may have said why.
            while self._closed is None and self._look():
                pass
            raise self._breaks() from None

    def _breaks(self) -> ClosedError:
        """The connection is over, unless it was already."""
        if self._closed is None:
            self._closed = ClosedError()
        return self._closed

    def _look(self) -> bool:
        """Whether something was there to be read."""
        try:
            return self._read(0.001)
        except OSError:
            self._breaks()
            return False

    def _read(self, seconds: float) -> bool:
        """Takes in what comes within so many seconds; whether something came."""
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
        # The server has closed it, or sent what is no frame.
        if self._protocol.close_expected():
            self._breaks()
        return True

    def _takes_in(self, data: bytes) -> None:
        """Give the protocol the next bytes, but for those that are beyond a limit."""
        if self._protocol.state is CONNECTING:
            data = self._handshake(data)
        try:
            self._limits.look(data)
        except FrameLimitError as error:
            if self._closed is None:
                self._closed = ClosedError(reason=f"the server breaks the protocol: {error}")
            return
        if data:
            self._protocol.receive_data(data)

    def _handshake(self, data: bytes) -> bytes:
        """Give the protocol the answer to the request for a connection; what comes after it."""
        if self._answered:
            # The body of a refusal, which the protocol bounds.
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
        """What the protocol has to say: pongs too."""
        self._socket.settimeout(SILENT * self._heartbeat)
        for data in self._protocol.data_to_send():
            for begin in range(0, len(data), SENT_AT_ONCE):
                self._socket.sendall(memoryview(data)[begin : begin + SENT_AT_ONCE])

    def _minds(self) -> None:
        """Answers pings while nobody waits here."""
        while not self._ends.wait(self._heartbeat / LOOKS):
            # Whoever holds it reads or writes, and sees them itself.
            if self._lock.acquire(blocking=False):
                try:
                    while self._closed is None and self._look():
                        pass
                    with suppress(ClosedError):
                        self._asks()
                finally:
                    self._lock.release()


def _fragments(pieces: Sequence[Buffer]) -> Iterator[bytes]:
    """The same bytes in pieces of `FRAGMENT`, but for the last one."""
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
