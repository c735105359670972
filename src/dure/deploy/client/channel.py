"""WebSocket channel of a client to its server, opened by a signed request.

The channel connects as a `HttpLink` does, over TLS and through the proxy of the environment, and
raises the same errors: LinkLostError or BusyError for transient failures, RefusedError for a server
that refuses. The channel answers pings while the client computes. The channel writes a line of the
audit log before each message (`audit`).
"""

from __future__ import annotations

import ssl
import threading
from collections.abc import Sequence
from contextlib import suppress

from dure.deploy.client.audit_log import AuditLog, Kind
from dure.deploy.client.connection import (
    Connection,
    ConnectionLimits,
    LinkLostError,
    connection_error_of,
    proxy_for,
    server_address_of,
)
from dure.deploy.client.link import BusyError, RefusedError, StoppedError, refusal_reason
from dure.deploy.frame_limits import FLOOD, PROTOCOL_ERROR, TOO_BIG, UNSUPPORTED
from dure.wire.signatures import NONCE, Signer, digest_of

try:
    from websockets.exceptions import InvalidHandshake, InvalidStatus

    from dure.deploy.client.websocket import Buffer, ClosedError, WebSocket
except ImportError as error:
    raise ImportError('a network needs the extra: pip install "dure[deploy]"') from error

PATH = "/v1/channel"

CONNECT_SECONDS = 10.0
MOMENT = 0.2

OVER = 4000
"""Close code of a server whose run has ended."""
TURNED_AWAY = 4001
"""Close code of a server that does not accept this client's message."""

_REFUSALS = (PROTOCOL_ERROR, UNSUPPORTED, FLOOD, TOO_BIG)
"""Close codes for a message beyond a limit: a retry would fail too."""


class RunEndedError(Exception):
    """The run has ended; the message is the reason."""


class Channel:
    """Ordered frames between client and server.

    `stop` ends every wait. `audit` is the audit log; None for no log. Raises as `HttpLink` does if
    the channel cannot be opened.
    """

    def __init__(
        self,
        url: str,
        context: ssl.SSLContext | None,
        signer: Signer,
        stop: threading.Event,
        heartbeat: float,
        audit: AuditLog | None = None,
    ) -> None:
        self._audit = audit
        self._place = server_address_of(url)
        self._context = (context or ssl.create_default_context()) if self._place.secure else None
        self._signer = signer
        self._stop = stop
        self._heartbeat = heartbeat
        self._socket = self._opened(again=True)

    def _opened(self, again: bool) -> WebSocket:
        signed = self._signer.sign("GET", PATH, digest_of())
        try:
            limits = ConnectionLimits(CONNECT_SECONDS)
            connection = Connection(self._place, self._context, proxy_for(self._place), limits)
            url = f"ws://{self._place}{self._place.prefix}{PATH}"
            sock = connection.sock
            return WebSocket(sock, url, signed, CONNECT_SECONDS, self._heartbeat)
        except InvalidStatus as error:
            response = error.response
            nonce = {NONCE: response.headers.get(NONCE, "")}
            if again and self._signer.again(signed, response.status_code, nonce):
                return self._opened(again=False)
            raise self._refused(response.status_code, bytes(response.body or b"")) from error
        except InvalidHandshake as error:
            raise LinkLostError(f"{self._place} cannot open a channel: {error}") from error
        except OSError as error:
            raise connection_error_of(error, self._place, CONNECT_SECONDS) from error

    def _refused(self, status: int, body: bytes) -> RefusedError | BusyError:
        reason = refusal_reason(body) or f"{self._place} answers {status} to a channel"
        if status >= 500 or status in (408, 425, 429):
            return BusyError(status, reason)
        return RefusedError(status, reason, body)

    def allow(self, most: int) -> None:
        """Set the maximum size in bytes of a frame from the server, from now on."""
        self._socket.allow(most)

    def next(self, seconds: float | None = None) -> Buffer:
        """Return the next frame.

        Raises LinkLostError for a broken connection or after `seconds` without a frame,
        RefusedError, OverError at the end of the run, and StoppedError.
        """
        waited = 0.0
        while not self._stop.is_set():
            try:
                frame = self._socket.receive(MOMENT)
            except ClosedError as error:
                raise self._closed(error) from error
            if frame is not None:
                return frame
            waited += MOMENT
            if seconds is not None and waited > seconds:
                raise LinkLostError(f"{self._place} sent nothing for {seconds:g} s")
        raise StoppedError

    def say(self, frame: Sequence[Buffer], kind: Kind = "message", at_once: bool = True) -> None:
        """Write the audit line of a frame, and send the frame in pieces.

        `kind` and `at_once` are as in `AuditLog.record`. Raises as `next` does, and
        RunFolderWriteError if the line cannot be written.
        """
        if self._audit is not None:
            self._audit.record_pieces(kind, frame, at_once=at_once)
        try:
            self._socket.send(frame)
        except ClosedError as error:
            raise self._closed(error) from error

    def _closed(self, error: ClosedError) -> Exception:
        if error.code == OVER:
            return RunEndedError(error.reason)
        if error.code == TURNED_AWAY or error.code in _REFUSALS:
            return RefusedError(422, error.reason)
        return LinkLostError(f"the connection to {self._place} broke")

    def close(self) -> None:
        with suppress(Exception):
            self._socket.close()

    def __enter__(self) -> Channel:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
