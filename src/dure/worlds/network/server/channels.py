"""Channels to clients: a WebSocket each, and one queue of all that happens.

    event loop, in a thread of its own     takes frames, and sends what lies in a client's outbox
    main thread                            takes events one by one (`next`), and answers (`say`)

    POST  /v1/enrol      as in a federation
    POST  /v1/check-in   likewise; a client that has checked in
    GET   /v1/channel    opens its channel, by a request that is signed as all are

A client has one channel: a newer one ends the one before. Frames travel as they are, without
compression: what crosses a cut does not shrink by it, and 1.6 MB would take twenty times as long.
The library answers pings while either side computes; who answers none is gone.

A client that sends before it is answered is read no further once so many frames of its wait
(`MOST_WAITING`), or more bytes than one of them may have. What a frame may have holds before it is
stored (`dure.worlds.network.server.websocket`): little before the first one, and then what the
system that trains can need (`allow`). A client has `HELLO_SECONDS` for its first frame, and no more
than `MOST_GREETING` channels without one.
"""

from __future__ import annotations

import asyncio
import logging
import queue
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send
from starlette.websockets import WebSocket, WebSocketDisconnect

from dure.contracts.channels import Came, Event, Gone, Said
from dure.errors import ServeError
from dure.wire import requests
from dure.wire.requests import CheckIn
from dure.wire.signatures import Key
from dure.worlds.network.server.access import NEW, Access, Admitted, Refused
from dure.worlds.network.server.answers import answer, refusal
from dure.worlds.network.server.attendance import Served
from dure.worlds.network.server.calls import address_of, body_of
from dure.worlds.network.server.cohort import differences
from dure.worlds.network.server.desk import Seat
from dure.worlds.network.server.gate import Gate
from dure.worlds.network.server.routes import Routes
from dure.worlds.network.server.serving import MOST_FRAME
from dure.worlds.network.server.watching import Metered, Watching
from dure.worlds.network.server.websocket import MOST_FIRST, allow_of, shortened

LOG = logging.getLogger("dure.server")

CHANNEL = "/v1/channel"

MOST_WAITING = 8
"""Frames of a client that wait to be dealt with."""

HELLO_SECONDS = 10.0
"""Seconds in which the first frame of a client has to be here as a whole."""

MOST_GREETING = 2
"""Channels of a client of which the first frame has not come: one that a process has left behind,
and that of the process which takes its place."""

CALM = 0.01
"""Seconds until a client is read again that has sent too many."""

OVER = 4000
"""Code by which a channel is closed since the run is over."""
TURNED_AWAY = 4001
"""Code by which it is closed since the server does not take what the client does."""


@dataclass
class _Channel:
    """Of one client. allow: sets what a frame may have. waiting, bytes: of frames that wait to be
    dealt with. ended: the code and the reason by which the server ends it."""

    seat: Seat
    key: str
    allow: Callable[[int], None]
    outbox: asyncio.Queue[bytes | None] = field(default_factory=asyncio.Queue)
    waiting: int = 0
    bytes: int = 0
    ended: tuple[int, str] | None = None


class NetworkChannels:
    """The application, and the channels that it keeps.

    lives_in: as `Serving` calls it. every_moment: called now and then, in the event loop.
    """

    def __init__(
        self,
        served: Served,
        access: Access,
        watching: Watching,
        folder: Path,
        key: Key,
        lasts: float,
        every_moment: Callable[[], None],
    ) -> None:
        self.run = served.run
        self.folder = folder
        self.key = key
        self.lasts = lasts
        self.served = served
        self.access = access
        self.watching = watching
        self.alive: Callable[[], bool] = lambda: True
        """Whether the thread of the event loop still runs."""
        self._every_moment = every_moment
        self._events: queue.SimpleQueue[Event] = queue.SimpleQueue()
        self._channels: dict[int, _Channel] = {}
        self._met: dict[int, tuple[str, str]] = {}
        self._over: str | None = None
        self._most = MOST_FIRST
        """Bytes that a frame may have after the first."""
        self._greeting: Counter[int] = Counter()
        """Channels of each client of which the first frame has not come."""
        self._arrivals: Counter[int] = Counter()
        """Of each client, how often it has come and the main thread has not heard so."""

    # What the main thread does

    def next(self, seconds: float) -> Event | None:
        try:
            event = self._events.get(timeout=seconds)
        except queue.Empty:
            if not self.alive():
                raise ServeError("the server's network has stopped; its log says why") from None
            return None
        channel = self._channels.get(event.client)
        if isinstance(event, Said) and channel is not None:
            channel.waiting -= 1
            channel.bytes -= len(event.frame)
        elif isinstance(event, Came):
            self._arrivals[event.client] -= 1
        return event

    def allow(self, most: int) -> None:
        self._most = min(most, MOST_FRAME)
        # Before whatever is said from now on, to which such a frame may be the answer.
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

    def turn_away(self, client: int, reason: str) -> None:
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
        """Whether somebody has not heard yet that the run is over."""
        return bool(self._channels)

    def _post(self, channel: _Channel, frame: bytes | None) -> None:
        self._loop.call_soon_threadsafe(channel.outbox.put_nowait, frame)

    def _end(self, channel: _Channel, code: int, reason: str) -> None:
        channel.ended = code, shortened(reason)
        self._post(channel, None)

    # The application

    def lives_in(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._moments = loop.create_task(self._look())

    async def _look(self) -> None:
        while True:
            await asyncio.sleep(0.5)
            self._every_moment()

    def asgi(self) -> Any:
        """The application."""
        gate = Gate(self.access, self.watching, lambda: True)
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

        return Metered(application, self.watching)

    async def enrol(self, request: Request) -> Response:
        body = await body_of(request, None, requests.Enrol)
        return answer(await asyncio.to_thread(self.access.enrol, body, address_of(request)))

    async def check_in(self, request: Request, admitted: Admitted) -> Response:
        said = await body_of(request, admitted, CheckIn)
        served = self.served
        served.check(said, admitted, self.access)
        if not said.looks and (admitted.client == NEW or said.name or said.wants is not None):
            admitted = await asyncio.to_thread(
                self.access.check_in, admitted, said.name, said.wants
            )
        return answer(served.welcome(admitted.client, differences(said.machine, served.machine)))

    async def _opened(self, socket: WebSocket) -> None:
        """A client's channel, from the first request to its end."""
        # Whoever hangs up before it is answered is gone, and that is no mistake of ours.
        with suppress(WebSocketDisconnect):
            admitted = await self._admitted(socket)
            if admitted is None:
                return
            await socket.accept()
            if self._over is not None:
                await socket.close(OVER, self._over)
                return
            name = admitted.name or f"client {admitted.client}"
            channel = _Channel(Seat(admitted.client, name), admitted.key, allow_of(socket.scope))
            sender = asyncio.ensure_future(self._sends(socket, channel))
            try:
                await self._hears(socket, channel)
            finally:
                sender.cancel()

    async def _admitted(self, socket: WebSocket) -> Admitted | None:
        """Who opens a channel; None where it was refused, and has been told why."""
        try:
            # As for HTTP: who has not signed does not learn which routes there are.
            admitted = self.access.admit(
                socket.headers, "GET", _target_of(socket), _address_of(socket)
            )
            if socket.scope["path"] != CHANNEL:
                raise Refused(404, "no such route", "nothing is served there")
            if admitted.client == NEW:
                raise Refused(409, "check in first", "the server wants to know who calls: check in")
            self._check_few(admitted.client)
        except Refused as refused:
            about = "a channel"
            address = _address_of(socket)
            self.watching.refused(None, address, about, refused.kind, refused.reason)
            said = refusal(refused.status, refused.reason, refused.headers)
            await socket.send_denial_response(said)
            return None
        return admitted

    def _check_few(self, client: int) -> None:
        """Raises Refused where a client opens channels, and says nothing, or faster than it is
        heard."""
        greeting = self._greeting[client] >= MOST_GREETING
        if greeting or self._arrivals[client] >= MOST_WAITING:
            raise Refused(
                429,
                "too many channels",
                f"client {client} opens channels faster than it says who it is: one is enough",
                {"retry-after": "1"},
            )

    async def _hello(self, socket: WebSocket, number: int) -> bytes:
        """The first frame of a channel. Raises as `receive_bytes`, and TimeoutError."""
        self._greeting[number] += 1
        try:
            return await asyncio.wait_for(socket.receive_bytes(), HELLO_SECONDS)
        finally:
            self._greeting[number] -= 1

    async def _hears(self, socket: WebSocket, channel: _Channel) -> None:
        number = channel.seat.number
        why = "the connection broke"
        try:
            hello = await self._hello(socket, number)
            self._takes_over(number, channel, hello)
            while True:
                frame = await socket.receive_bytes()
                channel.waiting += 1
                channel.bytes += len(frame)
                self.watching.received += len(frame)
                self._events.put(Said(number, frame))
                while channel.waiting > MOST_WAITING or channel.bytes > self._most:
                    await asyncio.sleep(CALM)
        except WebSocketDisconnect as ended:
            why = ended.reason or why
        except (asyncio.TimeoutError, TimeoutError):
            reason = f"it has not said who it is within {HELLO_SECONDS:g} s"
            await socket.close(TURNED_AWAY, reason)
        # A text, say, where bytes are awaited.
        except (KeyError, RuntimeError):
            why = "it sent what is no frame"
        finally:
            # A newer channel of the client's is not this one's to end.
            if self._channels.get(number) is channel:
                del self._channels[number]
                self._events.put(Gone(number, channel.ended[1] if channel.ended else why))
                self.watching.left(channel.seat)

    def _takes_over(self, number: int, channel: _Channel, hello: bytes) -> None:
        """A client has come: this is its channel, and no other."""
        before = self._channels.get(number)
        if before is not None:
            self._end(before, TURNED_AWAY, "another process of this client has come")
            self._events.put(Gone(number, "it has come anew"))
        channel.allow(self._most)
        self._met[number] = channel.key, channel.seat.name
        self._channels[number] = channel
        self._arrivals[number] += 1
        self._events.put(Came(number, hello))
        self.watching.arrived(channel.seat)

    async def _sends(self, socket: WebSocket, channel: _Channel) -> None:
        with suppress(WebSocketDisconnect, RuntimeError):
            while True:
                frame = await channel.outbox.get()
                if frame is None:
                    assert channel.ended is not None
                    await socket.close(*channel.ended)
                    return
                self.watching.sent += len(frame)
                await socket.send_bytes(frame)


def _target_of(socket: WebSocket) -> str:
    raw: str = socket.scope.get("raw_path", b"").decode("ascii", "replace")
    query = socket.scope.get("query_string", b"").decode("ascii", "replace")
    return raw + (f"?{query}" if query else "")


def _address_of(socket: WebSocket) -> str:
    return socket.client.host if socket.client is not None else ""
