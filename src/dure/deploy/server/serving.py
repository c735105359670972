"""HTTP server of an ASGI application: uvicorn in its own thread, with timeouts and TLS.

The server closes a connection whose first header is not complete after `HEADER_SECONDS`, so that
thousands of idle strangers take no resources, a connection whose header is longer than
`MOST_HEADER`, and a connection whose body arrives more slowly than `LEAST_RATE`. At the end the
server first answers waiting requests, then closes the connections.
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

from dure.deploy.server.log_lines import SERVER
from dure.deploy.server.log_rate_limit import LogRateLimit, log_mistake
from dure.deploy.server.websocket import LimitedWebSocket
from dure.errors import ServeError

HEADER_SECONDS = 15.0
"""Seconds within which the header of a request must be complete."""

SILENT_SECONDS = 20
"""Seconds after which a client that stops sending or receiving is disconnected."""

KEEP_SECONDS = 90
"""Seconds for which an idle connection stays open: longer than clients reuse theirs."""

UNSENT = 64 << 10
"""Maximum unsent bytes per connection in this process; the system's own buffers keep links busy."""

MOST_FRAME = 1 << 32
"""Maximum bytes of a WebSocket message, whatever its state allows (`LimitedWebSocket`)."""

BACKLOG = 4096
"""Maximum number of connections that wait for acceptance."""

GRACEFUL_SECONDS = 5
"""Seconds for answers in progress when the server stops."""


MOST_HEADER = 64 << 10
"""Maximum bytes of the header of a request, and of everything else around its body."""

LEAST_RATE = 1 << 10
"""Minimum bytes per second of a body, over `SILENT_SECONDS`; slower clients are disconnected."""


_TOO_LONG = (
    b"HTTP/1.1 431 Request Header Fields Too Large\r\n"
    b"connection: close\r\ncontent-length: 0\r\n\r\n"
)


class HeaderTimeoutProtocol(HttpToolsProtocol):
    """uvicorn's HTTP/1.1, with timeouts for headers and bodies, and a limit on headers."""

    _timer: asyncio.TimerHandle | None = None
    _since = 0
    """Bytes of the body received in the current period of `SILENT_SECONDS`."""
    _around = 0
    """Bytes of this request outside the body."""

    def connection_made(self, transport: Any) -> None:
        super().connection_made(transport)
        transport.set_write_buffer_limits(UNSENT)
        self._hurry()

    def data_received(self, data: bytes) -> None:
        # The parser stores headers, trailers and chunk ends without a limit of its own.
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
        # A chunk of a body may have as many bytes around it as inside.
        self._around = max(0, self._around - 2 * len(body))
        super().on_body(body)

    def on_message_complete(self) -> None:
        self._relax()
        self._around = 0
        super().on_message_complete()

    def handle_websocket_upgrade(self) -> None:
        # From here on, pings detect a disconnected client.
        self._relax()
        super().handle_websocket_upgrade()

    def _listen(self) -> None:
        """Disconnect a client whose body arrives more slowly than `LEAST_RATE`."""
        # Reading is paused while the disk is slow, which is not the client's fault.
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
    """uvloop's loop with a timeout of the TLS handshake, whose default is a minute."""

    async def create_server(self, *arguments: Any, **named: Any) -> Any:
        if named.get("ssl") is not None:
            named.setdefault("ssl_handshake_timeout", HEADER_SECONDS)
        return await super().create_server(*arguments, **named)


class _Guarded:
    """ASGI application whose errors are logged, at a limited rate, and do not end the server."""

    def __init__(self, app: Any) -> None:
        self._app = app
        self._sparing = LogRateLimit()

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


class HttpServer:
    """Running server of an application.

    Args:
        app: ASGI application.
        host: Address to listen at.
        port: Port to listen at; 0 for any.
        context: TLS context; None for plain HTTP.
        began: Function called in the server's thread with the event loop, before serving.
        heartbeat: Seconds between two pings of a WebSocket; None for no WebSockets.

    Raises:
        ServeError: The server cannot listen at this address and port.
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
        # Accepted connections inherit these options: a client that stops receiving is disconnected.
        self.socket.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        self.socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, 1000 * SILENT_SECONDS)
        try:
            self.socket.bind((host, port))
            # From here on, clients wait for an answer instead of being refused.
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
            http=HeaderTimeoutProtocol,
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
        # uvicorn's own log is meant for operators of web sites.
        logging.getLogger("uvicorn").setLevel(logging.CRITICAL)
        # uvicorn would log a line for each refused WebSocket of a stranger (`_Guarded`).
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
        """Finish the requests in progress, and close all connections."""
        self._server.should_exit = True
        self._thread.join(GRACEFUL_SECONDS + 5)
        self.socket.close()
