"""The server's end of a WebSocket: uvicorn's, with limits that hold before anything is stored.

A connection begins with room for a client's first message, `MOST_FIRST` bytes, and gets more when
the application says so (`allow_of`). What is beyond a limit closes the connection with the reason,
and neither the library nor the application sees it.
"""

from __future__ import annotations

from collections.abc import Callable, MutableMapping
from typing import Any

from uvicorn.protocols.websockets.websockets_sansio_impl import WebSocketsSansIOProtocol

from dure.worlds.network.frame_limits import FrameLimitError, FrameLimits

MOST_FIRST = 1 << 16
"""Bytes of a message, until the application allows more."""

_ALLOW = "dure.allow"
"""Where the application finds how to allow more."""

REASON_SECONDS = 2.0
"""Seconds that a client has to read why it was refused."""

MOST_REASON = 120
"""Bytes of a reason: a frame that closes a channel has room for no more."""


class LimitedWebSocket(WebSocketsSansIOProtocol):
    """A connection whose messages are bounded by its state."""

    def __init__(self, *arguments: Any, **named: Any) -> None:
        super().__init__(*arguments, **named)
        self._limits = FrameLimits(MOST_FIRST, masked=True)
        self._refused = False
        """Whether what comes is dropped."""

    def _allow(self, most: int) -> None:
        self._limits.most = most

    def handle_connect(self, event: Any) -> None:
        super().handle_connect(event)
        # Missing where the handshake was refused.
        scope: MutableMapping[str, Any] | None = getattr(self, "scope", None)
        if scope is not None:
            scope[_ALLOW] = self._allow

    def data_received(self, data: bytes) -> None:
        if self._refused:
            return
        # The first bytes are those of the request, which was read as one of HTTP.
        if self.handshake_initiated:
            try:
                self._limits.look(data)
            except FrameLimitError as error:
                self._refuse(error)
                return
        super().data_received(data)

    async def send(self, message: Any) -> None:
        await super().send(message)
        if message["type"] == "websocket.http.response.body" and not message.get("more_body"):
            # A refusal is an answer: else each one is an error in the log.
            self.handshake_complete = True

    def _refuse(self, error: FrameLimitError) -> None:
        """Tell both sides why, and close the connection."""
        self._refused = True
        if self.close_sent or self.transport.is_closing():
            return
        self.stop_keepalive()
        reason = shortened(error.reason)
        self.queue.put_nowait(
            {"type": "websocket.disconnect", "code": error.code, "reason": reason}
        )
        self.conn.fail(error.code, reason)
        self.transport.write(b"".join(self.conn.data_to_send()))
        self.close_sent = True
        # A client that is in the midst of a message reads the reason when it has sent it: a
        # connection that is closed at once takes the reason with it.
        if self.read_paused:
            self.read_paused = False
            self.transport.resume_reading()
        self.close_timer = self.loop.call_later(REASON_SECONDS, self.transport.close)


def allow_of(scope: MutableMapping[str, Any]) -> Callable[[int], None]:
    """Return what sets how many bytes a message of this connection may have, from now on."""
    found: Callable[[int], None] = scope[_ALLOW]
    return found


def shortened(reason: str) -> str:
    """A reason, as far as a frame that closes a connection has room for it."""
    return reason.encode()[:MOST_REASON].decode(errors="ignore")
