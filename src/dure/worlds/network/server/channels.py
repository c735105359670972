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
(`MOST_WAITING`).
"""

from __future__ import annotations

import asyncio
import logging
import queue
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
from dure.worlds.network.server.watching import Metered, Watching

LOG = logging.getLogger("dure.server")

CHANNEL = "/v1/channel"

MOST_WAITING = 8
"""Frames of a client that wait to be dealt with."""

CALM = 0.01
"""Seconds until a client is read again that has sent too many."""

OVER = 4000
"""Code by which a channel is closed since the run is over."""
TURNED_AWAY = 4001
"""Code by which it is closed since the server does not take what the client does."""

MOST_REASON = 120
"""Bytes of a reason: a frame that closes a channel has room for no more."""


@dataclass
class _Channel:
    """Of one client. ended: the code and the reason by which the server ends it."""

    seat: Seat
    key: str
    outbox: asyncio.Queue[bytes | None] = field(default_factory=asyncio.Queue)
    waiting: int = 0
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
        return event

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
        channel.ended = code, reason.encode()[:MOST_REASON].decode(errors="ignore")
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
        if not said.looks:
            served.check_cohort(said, admitted, self.access)
        if not said.looks and (admitted.client == NEW or said.name or said.wants is not None):
            admitted = await asyncio.to_thread(
                self.access.check_in, admitted, said.name, said.wants
            )
        differs = differences(said.machine, served.machine)
        welcome = served.welcome(admitted.client, differs)
        return answer(replace(welcome, smallest_cohort=served.keeps_to(said, 1)))

    async def _opened(self, socket: WebSocket) -> None:
        """A client's channel, from the first request to its end."""
        try:
            if socket.url.path != CHANNEL:
                raise Refused(404, "no such route", "nothing is served there")
            admitted = self.access.admit(
                socket.headers, "GET", _target_of(socket), _address_of(socket)
            )
            if admitted.client == NEW:
                raise Refused(409, "check in first", "the server wants to know who calls: check in")
        except Refused as refused:
            about = f"GET {CHANNEL}"
            address = _address_of(socket)
            self.watching.refused(None, address, about, refused.kind, refused.reason)
            said = refusal(refused.status, refused.reason, refused.headers)
            await socket.send_denial_response(said)
            return
        if self._over is not None:
            await socket.accept()
            await socket.close(OVER, self._over)
            return
        await socket.accept()
        name = admitted.name or f"client {admitted.client}"
        channel = _Channel(Seat(admitted.client, name), admitted.key)
        sender = asyncio.ensure_future(self._sends(socket, channel))
        try:
            await self._hears(socket, channel)
        finally:
            sender.cancel()

    async def _hears(self, socket: WebSocket, channel: _Channel) -> None:
        number = channel.seat.number
        why = "the connection broke"
        try:
            hello = await socket.receive_bytes()
            before = self._channels.get(number)
            if before is not None:
                self._end(before, TURNED_AWAY, "another process of this client has come")
                self._events.put(Gone(number, "it has come anew"))
            self._met[number] = channel.key, channel.seat.name
            self._channels[number] = channel
            self._events.put(Came(number, hello))
            self.watching.arrived(channel.seat)
            while True:
                frame = await socket.receive_bytes()
                channel.waiting += 1
                self.watching.received += len(frame)
                self._events.put(Said(number, frame))
                while channel.waiting > MOST_WAITING:
                    await asyncio.sleep(CALM)
        except WebSocketDisconnect as ended:
            why = ended.reason or why
        # A text, say, where bytes are awaited.
        except (KeyError, RuntimeError):
            why = "it sent what is no frame"
        finally:
            # A newer channel of the client's is not this one's to end.
            if self._channels.get(number) is channel:
                del self._channels[number]
                self._events.put(Gone(number, channel.ended[1] if channel.ended else why))
                self.watching.left(channel.seat)

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
