"""The application behind a socket: uvicorn in a thread of its own, with deadlines and TLS.

A connection that is silent before its first header is complete is closed (`HEADER_SECONDS`), so
that thousands of idle strangers hold nothing; so is one whose header is longer than `MOST_HEADER`,
and one whose body comes more slowly than `LEAST_RATE`. At the end, calls that wait are answered
first, then connections are closed.
"""

from __future__ import annotations

import asyncio
import logging
import socket
import ssl
import threading
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import uvicorn
import uvloop
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from dure.errors import ServeError
from dure.worlds.network.server.log_lines import SERVER
from dure.worlds.network.server.sparing import Sparing, log_mistake
from dure.worlds.network.server.websocket import LimitedWebSocket

HEADER_SECONDS = 15.0
"""Seconds in which the header of a request has to be complete."""

SILENT_SECONDS = 20
"""Seconds after which a client that sends no more of a body, or takes no answer, is gone."""

KEEP_SECONDS = 90
"""Seconds for which an idle connection is kept: longer than clients keep theirs."""

UNSENT = 64 << 10
"""Bytes that wait here to be sent on a connection: the system's own buffers keep links busy."""

MOST_FRAME = 1 << 32
"""Bytes of a message over a WebSocket, whatever its state allows (`LimitedWebSocket`)."""

BACKLOG = 4096
"""Connections that wait until they are accepted."""

GRACEFUL_SECONDS = 5
"""Seconds that answers under way have when the server stops."""


MOST_HEADER = 64 << 10
"""Bytes of the header of a request, and of everything else around its body."""

LEAST_RATE = 1 << 10
"""Bytes a second of a body, over `SILENT_SECONDS`; who sends less is gone."""


_TOO_LONG = (
    b"HTTP/1.1 431 Request Header Fields Too Large\r\n"
    b"connection: close\r\ncontent-length: 0\r\n\r\n"
)


class Hurried(HttpToolsProtocol):
    """uvicorn's HTTP/1.1, with deadlines for headers and bodies, and a bound on headers."""

    _timer: asyncio.TimerHandle | None = None
    _since = 0
    """Bytes of the body that have come in this span of `SILENT_SECONDS`."""
    _around = 0
    """Bytes of this request that are no body."""

    def connection_made(self, transport: Any) -> None:
        super().connection_made(transport)
        transport.set_write_buffer_limits(UNSENT)
        self._hurry()

    def data_received(self, data: bytes) -> None:
        # Headers, trailers and the ends of chunks are kept by the parser, which knows no bound.
        self._around += len(data)
        super().data_received(data)
        if self._around > MOST_HEADER:
            if self.cycle is None or self.cycle.response_complete:
                self.transport.write(_TOO_LONG)
            self._around = 0
            self.transport.close()

    def on_message_begin(self) -> None:
        super().on_message_begin()
        self._hurry()

    def on_headers_complete(self) -> None:
        self._relax()
        self._since = 0
        self._timer = self.loop.call_later(SILENT_SECONDS, self._listen)
        super().on_headers_complete()

    def on_body(self, body: bytes) -> None:
        self._since += len(body)
        # A chunk of a body may have as much around it as is in it.
        self._around = max(0, self._around - 2 * len(body))
        super().on_body(body)

    def on_message_complete(self) -> None:
        self._relax()
        self._around = 0
        super().on_message_complete()

    def handle_websocket_upgrade(self) -> None:
        # From here on pings tell whether anybody is there.
        self._relax()
        super().handle_websocket_upgrade()

    def _listen(self) -> None:
        """While a body is awaited: is anybody still sending it, and not a byte now and then?"""
        # Nothing comes while the disk here is slow: that is nobody's fault.
        waits = self.flow.read_paused
        if not waits and self._since < LEAST_RATE * SILENT_SECONDS:
            self.transport.abort()
            return
        self._since = 0
        self._timer = self.loop.call_later(SILENT_SECONDS, self._listen)

    def connection_lost(self, exc: Exception | None) -> None:
        self._relax()
        super().connection_lost(exc)

    def _hurry(self) -> None:
        self._relax()
        self._timer = self.loop.call_later(HEADER_SECONDS, self.transport.close)

    def _relax(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None


class _Loop(uvloop.Loop):
    """uvloop's, with a deadline for the handshake of TLS too, which is a minute elsewhere."""

    async def create_server(self, *arguments: Any, **named: Any) -> Any:
        if named.get("ssl") is not None:
            named.setdefault("ssl_handshake_timeout", HEADER_SECONDS)
        return await super().create_server(*arguments, **named)


class _Guarded:
    """An ASGI application whose errors are logged, a few times a minute, and end no server."""

    def __init__(self, app: Any) -> None:
        self._app = app
        self._sparing = Sparing()

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        begun = False

        async def sending(message: Any) -> None:
            nonlocal begun
            begun = True
            await send(message)

        try:
            await self._app(scope, receive, sending)
        except Exception:
            log_mistake(SERVER, self._sparing, f"{scope.get('method', '')} {scope.get('path', '')}")
            if scope["type"] == "http" and not begun:
                await send({"type": "http.response.start", "status": 500, "headers": []})
                await send({"type": "http.response.body", "body": b""})
            elif scope["type"] == "websocket":
                with suppress(Exception):
                    await send({"type": "websocket.close", "code": 1011})


class Serving:
    """An application that is being served. app: ASGI. began: called in the event loop, with it.
    heartbeat: seconds between two pings of a WebSocket; None: there are none of these.

    Raises ServeError where the port is taken.
    """

    def __init__(
        self,
        app: Any,
        host: str,
        port: int,
        context: ssl.SSLContext | None,
        began: Callable[[asyncio.AbstractEventLoop], None] = lambda loop: None,
        heartbeat: float | None = None,
    ) -> None:
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        self.socket = socket.socket(family, socket.SOCK_STREAM)
        self.socket.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        # Connections that are accepted take these over: who does not take what is sent is gone.
        self.socket.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        self.socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, 1000 * SILENT_SECONDS)
        try:
            self.socket.bind((host, port))
            # From here on clients wait for an answer, and are not refused.
            self.socket.listen(BACKLOG)
        except OSError as error:
            self.socket.close()
            raise ServeError(
                f"cannot listen at {host}, port {port}: {error.strerror or error}: choose another "
                f"port or address"
            ) from error
        self.port: int = self.socket.getsockname()[1]
        config = uvicorn.Config(
            _Guarded(app),
            http=Hurried,
            ws="none" if heartbeat is None else LimitedWebSocket,
            ws_max_size=MOST_FRAME,
            ws_ping_interval=heartbeat,
            ws_ping_timeout=2 * (heartbeat or 0.0),
            ws_per_message_deflate=False,
            lifespan="off",
            log_config=None,
            access_log=False,
            server_header=False,
            timeout_keep_alive=KEEP_SECONDS,
            timeout_graceful_shutdown=GRACEFUL_SECONDS,
            backlog=BACKLOG,
        )
        config.load()
        config.ssl = context
        # Its own words are for people who serve web pages.
        logging.getLogger("uvicorn").setLevel(logging.CRITICAL)
        # It would say a line for each stranger who is refused a WebSocket (`_Guarded`).
        logging.getLogger("uvicorn.error").setLevel(logging.CRITICAL)
        self._server = uvicorn.Server(config)
        self._began = began
        self._error: BaseException | None = None
        self._thread = threading.Thread(target=self._serve, name="dure serves", daemon=True)
        self._thread.start()

    def _serve(self) -> None:
        loop = _Loop()
        try:
            self._began(loop)
            loop.run_until_complete(self._server.serve(sockets=[self.socket]))
        except BaseException as error:
            self._error = error
        finally:
            for task in asyncio.all_tasks(loop):
                task.cancel()
            loop.run_until_complete(asyncio.sleep(0))
            loop.close()

    @property
    def alive(self) -> bool:
        return self._thread.is_alive()

    def stop(self) -> None:
        """Answers what is under way, and closes all connections."""
        self._server.should_exit = True
        self._thread.join(GRACEFUL_SECONDS + 5)
        self.socket.close()
