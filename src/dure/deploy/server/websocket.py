"""Server's end of a WebSocket: uvicorn's, with limits checked before anything is buffered.

A connection begins with a limit of `MOST_FIRST` bytes for the first message; the application raises
the limit later (`limit_setter_of`). A message beyond the limit closes the connection with a reason;
neither the library nor the application sees the message.
"""

from __future__ import annotations

from collections.abc import Callable, MutableMapping
from typing import Any

from uvicorn.protocols.websockets.websockets_sansio_impl import WebSocketsSansIOProtocol

from dure.deploy.frame_limits import FrameLimitError, FrameLimits

MOST_FIRST = 1 << 16
"""Maximum bytes of a message until the application raises the limit."""

_ALLOW = "dure.allow"
"""Key of the function that raises the limit, in the connection's scope."""

REASON_SECONDS = 2.0
"""Seconds that a client has to read the reason of a closed connection."""

MOST_REASON = 120
"""Maximum bytes of a reason in a closing frame."""


class LimitedWebSocket(WebSocketsSansIOProtocol):
    """WebSocket whose messages have a limit that depends on its state."""

    def __init__(self, *arguments: Any, **named: Any) -> None:
        super().__init__(*arguments, **named)
        self._limits = FrameLimits(MOST_FIRST, masked=True)
        self._refused = False
        """Whether received bytes are dropped."""

    def _allow(self, most: int) -> None:
        self._limits.most = most

    def handle_connect(self, event: Any) -> None:
        super().handle_connect(event)
        # Missing if the handshake was refused.
        scope: MutableMapping[str, Any] | None = getattr(self, "scope", None)
        if scope is not None:
            scope[_ALLOW] = self._allow

    def data_received(self, data: bytes) -> None:
        if self._refused:
            return
        # The first bytes are those of the opening request, which is parsed as HTTP.
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
            # A refusal is a complete answer; otherwise each refusal would be an error in the log.
            self.handshake_complete = True

    def _refuse(self, error: FrameLimitError) -> None:
        """Report the reason to both sides, and close the connection."""
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
        # A client in the middle of a message reads the reason only after it has sent the message;
        # closing the connection at once would lose the reason.
        if self.read_paused:
            self.read_paused = False
            self.transport.resume_reading()
        self.close_timer = self.loop.call_later(REASON_SECONDS, self.transport.close)


def limit_setter_of(scope: MutableMapping[str, Any]) -> Callable[[int], None]:
    """Return a function that sets the maximum size in bytes of a message on this connection."""
    found: Callable[[int], None] = scope[_ALLOW]
    return found


def shortened(reason: str) -> str:
    """Return the reason, truncated to the space in a closing frame."""
    return reason.encode()[:MOST_REASON].decode(errors="ignore")
