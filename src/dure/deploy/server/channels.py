"""WebSocket channels to clients, and a single queue of their events.

    event loop, in its own thread          receives frames, and sends the frames of outboxes
    main thread                            takes events in order (`next`), and answers (`say`)

    POST  /v1/enrol      as in a federation
    POST  /v1/check-in   likewise; a client that has checked in
    GET   /v1/channel    opens its channel, by a signed request

A client has at most one channel: a newer channel closes the previous channel. Frames are not
compressed: smashed data hardly shrink, and compressing 1.6 MB would take twenty times as long. The
library answers pings while either side computes; a peer that answers no ping counts as
disconnected.

The server stops reading from a client that has `MOST_WAITING` unprocessed frames, or more
unprocessed bytes than the limit of a frame. The limit of a frame applies before buffering
(`dure.deploy.server.websocket`): it is small for the first frame, and then the maximum that
the trained system needs (`allow`). A client has `HELLO_SECONDS` for its first frame, and at most
`MOST_GREETING` channels without a first frame.
"""

from __future__ import annotations

import asyncio
import queue
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from msgspec.structs import replace
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send
from starlette.websockets import WebSocket, WebSocketDisconnect

from dure.deploy.server.access import NEW, AccessControl, Admitted, RequestRefused
from dure.deploy.server.answers import answer, refusal
from dure.deploy.server.client_requests import address_of, body_of
from dure.deploy.server.cohort import differences
from dure.deploy.server.outbox import ClientSession
from dure.deploy.server.request_authentication import RequestAuthenticator
from dure.deploy.server.routes import Routes
from dure.deploy.server.server_metrics import MeteredApp, ServerMetrics
from dure.deploy.server.serving import MOST_FRAME
from dure.deploy.server.sessions import ServedRun
from dure.deploy.server.websocket import MOST_FIRST, limit_setter_of, shortened
from dure.errors import ServeError
from dure.protocol.channels import ClientConnected, ClientDisconnected, ClientFrame, Event
from dure.wire import requests
from dure.wire.requests import CheckIn
from dure.wire.signatures import Key

CHANNEL = "/v1/channel"

MOST_WAITING = 8
"""Maximum number of unprocessed frames of a client."""

HELLO_SECONDS = 10.0
"""Seconds within which the complete first frame of a channel must arrive."""

MOST_GREETING = 2
"""Maximum channels of a client without a first frame, such as those of a killed process."""

CALM = 0.01
"""Seconds between two checks of a client whose frames are not read."""

OVER = 4000
"""Close code of a channel after the run has ended."""
TURNED_AWAY = 4001
"""Close code of a channel whose client sent an unacceptable message."""


@dataclass
class _Channel:
    """Channel of a client.

    `allow` sets the limit of a frame. `waiting` and `bytes` count the unprocessed frames and their
    bytes. `ended` is the code and reason with which the server closes the channel.
    """

    session: ClientSession
    key: str
    allow: Callable[[int], None]
    outbox: asyncio.Queue[bytes | None] = field(default_factory=asyncio.Queue)
    waiting: int = 0
    bytes: int = 0
    ended: tuple[int, str] | None = None


class NetworkChannels:
    """Application with its channels to clients.

    `HttpServer` calls `lives_in`. `every_moment` is called periodically in the event loop.
    """

    def __init__(
        self,
        served: ServedRun,
        access: AccessControl,
        server_metrics: ServerMetrics,
        folder: Path,
        key: Key,
        answer_timeout: float,
        every_moment: Callable[[], None],
    ) -> None:
        self.run = served.run
        self.folder = folder
        self.key = key
        self.answer_timeout = answer_timeout
        self.served = served
        self.access = access
        self.server_metrics = server_metrics
        self.alive: Callable[[], bool] = lambda: True
        """Whether the thread of the event loop still runs."""
        self._every_moment = every_moment
        self._events: queue.SimpleQueue[Event] = queue.SimpleQueue()
        self._channels: dict[int, _Channel] = {}
        self._met: dict[int, tuple[str, str]] = {}
        self._over: str | None = None
        self._most = MOST_FIRST
        """Maximum bytes of a frame after the first."""
        self._greeting: Counter[int] = Counter()
        """Number of channels without a first frame, by client."""
        self._arrivals: Counter[int] = Counter()
        """Number of arrivals of each client that the main thread has not processed."""

    # Methods of the main thread

    def next(self, seconds: float) -> Event | None:
        try:
            event = self._events.get(timeout=seconds)
        except queue.Empty:
            if not self.alive():
                raise ServeError("the server's network has stopped; its log says why") from None
            return None
        channel = self._channels.get(event.client)
        if isinstance(event, ClientFrame) and channel is not None:
            channel.waiting -= 1
            channel.bytes -= len(event.frame)
        elif isinstance(event, ClientConnected):
            self._arrivals[event.client] -= 1
        return event

    def allow(self, most: int) -> None:
        self._most = min(most, MOST_FRAME)
        # Applies before the next message to a client, whose answer may be so large.
        self._loop.call_soon_threadsafe(self._allow_all)

    def _allow_all(self) -> None:
        for channel in self._channels.values():
            channel.allow(self._most)

    def say(self, client: int, frame: Sequence[bytes | bytearray | memoryview]) -> None:
        channel = self._channels.get(client)
        if channel is not None:
            self._post(channel, b"".join(frame))

    def identity(self, client: int) -> tuple[str, str]:
        return self._met[client]

    def reject(self, client: int, reason: str) -> None:
        channel = self._channels.get(client)
        if channel is not None:
            self._end(channel, TURNED_AWAY, reason)

    def over(self, reason: str) -> None:
        self._over = reason
        for channel in list(self._channels.values()):
            self._end(channel, OVER, reason)

    @property
    def is_over(self) -> bool:
        return self._over is not None

    def has_to_tell(self) -> bool:
        """Whether a client has not yet received the end of the run."""
        return bool(self._channels)

    def _post(self, channel: _Channel, frame: bytes | None) -> None:
        self._loop.call_soon_threadsafe(channel.outbox.put_nowait, frame)

    def _end(self, channel: _Channel, code: int, reason: str) -> None:
        channel.ended = code, shortened(reason)
        self._post(channel, None)

    # Application

    def lives_in(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._moments = loop.create_task(self._look())

    async def _look(self) -> None:
        while True:
            await asyncio.sleep(0.5)
            self._every_moment()

    def asgi(self) -> Any:
        """Return the ASGI application."""
        gate = RequestAuthenticator(self.access, self.server_metrics, lambda: True)
        routed = Routes(
            [
                gate.route("/v1/enrol", "POST", self.enrol, known=False),
                gate.route("/v1/check-in", "POST", self.check_in),
                gate.rest(),
            ]
        )

        async def application(scope: Scope, receive: Receive, send: Send) -> None:
            if scope["type"] == "websocket":
                await self._opened(WebSocket(scope, receive, send))
            else:
                await routed(scope, receive, send)

        return MeteredApp(application, self.server_metrics)

    async def enrol(self, request: Request) -> Response:
        body = await body_of(request, None, requests.Enrol)
        return answer(await asyncio.to_thread(self.access.enrol, body, address_of(request)))

    async def check_in(self, request: Request, admitted: Admitted) -> Response:
        said = await body_of(request, admitted, CheckIn)
        served = self.served
        served.check(said, admitted, self.access)
        if not said.looks:
            served.check_cohort(said, admitted, self.access)
        if not said.looks and (admitted.client == NEW or said.name or said.wants is not None):
            admitted = await asyncio.to_thread(
                self.access.check_in, admitted, said.name, said.wants
            )
        differs = differences(said.machine, served.machine)
        welcome = served.welcome(admitted.client, differs)
        return answer(replace(welcome, smallest_cohort=served.smallest_cohort_with(said, 1)))

    async def _opened(self, socket: WebSocket) -> None:
        """Serve a client's channel from its opening to its end."""
        # A client that disconnects early is not an error of the server.
        with suppress(WebSocketDisconnect):
            admitted = await self._admitted(socket)
            if admitted is None:
                return
            await socket.accept()
            if self._over is not None:
                await socket.close(OVER, self._over)
                return
            name = admitted.name or f"client {admitted.client}"
            channel = _Channel(
                ClientSession(admitted.client, name), admitted.key, limit_setter_of(socket.scope)
            )
            sender = asyncio.ensure_future(self._sends(socket, channel))
            try:
                await self._hears(socket, channel)
            finally:
                sender.cancel()

    async def _admitted(self, socket: WebSocket) -> Admitted | None:
        """Return the sender of a request for a channel; None after a refusal."""
        try:
            # As for HTTP: an unsigned request does not learn which routes exist.
            admitted = self.access.admit(
                socket.headers, "GET", _target_of(socket), _address_of(socket)
            )
            if socket.scope["path"] != CHANNEL:
                raise RequestRefused(404, "no such route", "nothing is served there")
            if admitted.client == NEW:
                raise RequestRefused(409, "check in first", "the server requires a check-in")
            self._check_few(admitted.client)
        except RequestRefused as refused:
            about = "a channel"
            address = _address_of(socket)
            self.server_metrics.refused(None, address, about, refused.kind, refused.reason)
            said = refusal(refused.status, refused.reason, refused.headers)
            await socket.send_denial_response(said)
            return None
        return admitted

    def _check_few(self, client: int) -> None:
        """Check the number of a client's new channels. Raises Refused above the limits."""
        greeting = self._greeting[client] >= MOST_GREETING
        if greeting or self._arrivals[client] >= MOST_WAITING:
            raise RequestRefused(
                429,
                "too many channels",
                f"client {client} opens channels faster than it authenticates them: open only one",
                {"retry-after": "1"},
            )

    async def _hello(self, socket: WebSocket, number: int) -> bytes:
        """Return the first frame of a channel. Raises as `receive_bytes`, and TimeoutError."""
        self._greeting[number] += 1
        try:
            return await asyncio.wait_for(socket.receive_bytes(), HELLO_SECONDS)
        finally:
            self._greeting[number] -= 1

    async def _hears(self, socket: WebSocket, channel: _Channel) -> None:
        number = channel.session.number
        why = "the connection broke"
        try:
            hello = await self._hello(socket, number)
            self._takes_over(number, channel, hello)
            while True:
                frame = await socket.receive_bytes()
                channel.waiting += 1
                channel.bytes += len(frame)
                self.server_metrics.received += len(frame)
                self._events.put(ClientFrame(number, frame))
                while channel.waiting > MOST_WAITING or channel.bytes > self._most:
                    await asyncio.sleep(CALM)
        except WebSocketDisconnect as ended:
            why = ended.reason or why
        except (asyncio.TimeoutError, TimeoutError):
            reason = f"it has not identified itself within {HELLO_SECONDS:g} s"
            await socket.close(TURNED_AWAY, reason)
        # For example a text frame instead of bytes.
        except (KeyError, RuntimeError):
            why = "it sent an invalid frame"
        finally:
            # The client may have a newer channel, which must stay.
            if self._channels.get(number) is channel:
                del self._channels[number]
                self._events.put(
                    ClientDisconnected(number, channel.ended[1] if channel.ended else why)
                )
                self.server_metrics.left(channel.session)

    def _takes_over(self, number: int, channel: _Channel, hello: bytes) -> None:
        """Make this the client's only channel."""
        before = self._channels.get(number)
        if before is not None:
            self._end(before, TURNED_AWAY, "another process of this client has connected")
            self._events.put(ClientDisconnected(number, "it has reconnected"))
        channel.allow(self._most)
        self._met[number] = channel.key, channel.session.name
        self._channels[number] = channel
        self._arrivals[number] += 1
        self._events.put(ClientConnected(number, hello))
        self.server_metrics.arrived(channel.session)

    async def _sends(self, socket: WebSocket, channel: _Channel) -> None:
        with suppress(WebSocketDisconnect, RuntimeError):
            while True:
                frame = await channel.outbox.get()
                if frame is None:
                    assert channel.ended is not None
                    await socket.close(*channel.ended)
                    return
                self.server_metrics.sent += len(frame)
                await socket.send_bytes(frame)


def _target_of(socket: WebSocket) -> str:
    raw: str = socket.scope.get("raw_path", b"").decode("ascii", "replace")
    query = socket.scope.get("query_string", b"").decode("ascii", "replace")
    return raw + (f"?{query}" if query else "")


def _address_of(socket: WebSocket) -> str:
    return socket.client.host if socket.client is not None else ""
