"""Client's HTTP requests to a server, with signatures, error classes and retries.

A `HttpLink` is a connection that stays open between requests. If the server has closed an idle
connection, the link reopens it and sends the request again: all requests are idempotent. The class
of the error describes every other failure. `call_with_retries` retries after the first two; the
others end a client:

    LinkLostError      refused, reset, cut off, timeout, no route, a name server
                       without an answer, a busy proxy
    BusyError          408, 425, 429, 5xx
    WrongAddressError  no such host, no TLS, no common TLS version, a proxy that refuses         *
    NotTrustedError    a certificate that the other side does not trust; `MOST_SILENT` connections
                       in a row closed after the TLS handshake without an answer                 *
    RefusedError       4xx with a `Refusal` of a dure server
    UnfitMessageError  an answer of a dure server with a value out of range
                       3xx, 4xx without `Refusal`, an HTML page: not a dure server               *

    *  until a dure server has answered once. Afterwards the address is known to be right, and the
       obstacle may be transient: the login page of a hotel, a name that is known only inside a
       VPN, a certificate under renewal. These errors then become LinkLostError and BusyError.

The waiting time of `call_with_retries` doubles with each attempt, and is drawn uniformly between 0
and that time, so that the clients of a restarted server do not return simultaneously ("full
jitter": M. Brooker, Exponential backoff and jitter, AWS architecture blog, 2015).
"""

from __future__ import annotations

import email.utils
import hashlib
import http.client
import random
import ssl
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import NamedTuple, Protocol, TypeVar

from dure.deploy.client.connection import (
    CERTIFICATE_HINT,
    READ_AT_ONCE,
    RETRYABLE_STATUSES,
    SENT_AT_ONCE,
    Connection,
    ConnectionLimits,
    LinkLostError,
    NotTrustedError,
    WrongAddressError,
    closed_silently,
    connection_error_of,
    proxy_for,
    server_address_of,
)
from dure.errors import DureError
from dure.peer_text import one_line
from dure.wire.requests import (
    MOST_BODY,
    Body,
    MessageBody,
    RangeError,
    Refusal,
    RequestError,
    from_json,
    to_json,
)

__all__ = [
    "Backoff",
    "BusyError",
    "HttpAnswer",
    "HttpLink",
    "LinkLostError",
    "NotTrustedError",
    "OutgoingBody",
    "RefusedError",
    "RequestSigner",
    "StoppedError",
    "StreamedAnswer",
    "UnfitMessageError",
    "WrongAddressError",
    "call_with_retries",
]

MOST_HEAD = 1 << 18
"""Maximum bytes of an answer's head."""

LONGEST_WAIT = 600.0
"""Maximum seconds that the client waits at the request of a server."""

MOST_SILENT = 4
"""Connections that the server closes without an answer, in a row, before the client gives up.

A server closes TLS connections so if it refuses the client's certificate; a server that ends does
so once or twice.
"""

_EARLY_ANSWER = 1.0
_CLOSED = (ConnectionError, ssl.SSLEOFError, ssl.SSLZeroReturnError)
_Result = TypeVar("_Result")


class RefusedError(DureError):
    """The server refuses the request.

    `status` is the HTTP status. `reason` is the server's reason, in one line. `body` is the body of
    the answer, truncated if long.
    """

    def __init__(self, status: int, reason: str, body: bytes = b"") -> None:
        super().__init__(status, reason, body)
        self.status = status
        self.reason = reason
        self.body = body

    def __str__(self) -> str:
        return self.reason


class UnfitMessageError(DureError):
    """A dure server sent an invalid message, for example a number out of range.

    The client does not act on the message, and does not retry.
    """


class BusyError(OSError):
    """The server, or a proxy before it, cannot answer now.

    `seconds` is the server's requested delay before a retry; 0 without a request.
    """

    def __init__(self, status: int, reason: str, seconds: float = 0.0) -> None:
        super().__init__(status, reason, seconds)
        self.status = status
        self.reason = reason
        self.seconds = seconds

    def __str__(self) -> str:
        return self.reason


class StoppedError(Exception):
    """The caller has ended the operation: `stop` was set, or the link was closed."""


class RequestSigner(Protocol):
    """Signer of requests. Several threads may call it at once."""

    def headers(self, method: str, path: str, digest: str) -> Mapping[str, str]:
        """Return the headers for a transmission of a request with this SHA-256 of its body."""

    def renew(self, nonce: str) -> None:
        """Use this nonce of the server from now on."""


class HttpAnswer(NamedTuple):
    """Answer of a server. The names of `headers` are in lower case."""

    status: int
    headers: Mapping[str, str]
    body: bytes


class StreamedAnswer(NamedTuple):
    """Answer whose body is read as it arrives.

    `read` fills the front of the memory and returns the number of bytes, 0 at the end. It raises
    LinkLostError for a truncated body.
    """

    status: int
    headers: Mapping[str, str]
    read: Callable[[memoryview], int]


class OutgoingBody(NamedTuple):
    """Body of a request.

    `digest` is its SHA-256. `pieces` yields the bytes from the beginning at each call; its errors
    end the request.
    """

    size: int
    digest: str
    pieces: Callable[[], Iterator[bytes | memoryview]]


def _outgoing(body: bytes) -> OutgoingBody:
    return OutgoingBody(len(body), hashlib.sha256(body).hexdigest(), lambda: iter((body,)))


class HttpLink:
    """Requests to a server, by one thread at a time.

    Args:
        url: https://HOST:PORT, with a path if a proxy before the server expects one.
        context: TLS context; None for the system's authorities.
        signs: Signer of the requests; None for unsigned requests.
        connect_seconds: Timeout of opening a connection.
        silent_seconds: Timeout of an answer, and between two bytes of a long answer.
        idle_seconds: Longest idle time of a reused connection, below the idle timeout of servers.
        known: Whether a dure server has answered at this address before.

    The attribute `most_part` is the largest body in bytes that passes all proxies; uploads set it.

    Raises ValueError for an invalid URL or proxy.
    """

    def __init__(
        self,
        url: str,
        *,
        context: ssl.SSLContext | None = None,
        signs: RequestSigner | None = None,
        connect_seconds: float = 10.0,
        silent_seconds: float = 30.0,
        idle_seconds: float = 55.0,
        known: bool = False,
    ) -> None:
        self.known = known
        self._silent = 0
        """Connections in a row that were closed without an answer."""
        self.place = server_address_of(url)
        self._proxy = proxy_for(self.place)
        self._context = (context or ssl.create_default_context()) if self.place.secure else None
        self._signs = signs
        self._connect_seconds = connect_seconds
        self.silent_seconds = silent_seconds
        self._idle_seconds = idle_seconds
        self.most_part: int | None = None
        self._limits = ConnectionLimits(silent_seconds)
        self._connection: Connection | None = None
        self._used = 0.0
        self._closed = False
        self._one = threading.Lock()

    def request(
        self,
        method: str,
        path: str,
        body: bytes = b"",
        headers: Mapping[str, str] | None = None,
        timeout: float | None = None,
        most: int = MOST_BODY,
    ) -> HttpAnswer:
        """Send a request with a small answer, and return the answer.

        Args:
            method: HTTP method.
            path: Path with query.
            body: Body of the request.
            headers: Additional headers.
            timeout: Seconds until the whole answer must have arrived; None for `silent_seconds`.
            most: Maximum bytes of the answer's body.

        Raises:
            LinkLostError, NotTrustedError, WrongAddressError, RefusedError, BusyError: See the
                module.
            StoppedError: The link was closed.
        """
        return self.send(method, path, _outgoing(body), headers, timeout, most)

    def ask(
        self,
        method: str,
        path: str,
        said: MessageBody,
        kind: type[Body],
        timeout: float | None = None,
    ) -> Body:
        """Send a body of `dure.wire.requests` and return the decoded answer.

        Raises as `request` does.
        """
        headers = {"content-type": "application/json"}
        return self.understood(self.request(method, path, to_json(said), headers, timeout), kind)

    def understood(self, answer: HttpAnswer, kind: type[Body]) -> Body:
        """Decode an answer.

        Raises UnfitMessageError for a value out of range. An answer of another form is not a dure
        server's, such as the login page of a network: raises RefusedError, or BusyError at a known
        address.
        """
        try:
            said = from_json(answer.body, kind)
        except RangeError as error:
            raise UnfitMessageError(
                one_line(f"an answer of {self.place} is rejected: {error}")
            ) from error
        except RequestError as error:
            raise self._foreign(answer.status, str(error), answer.body) from error
        self.known = True
        return said

    def _foreign(self, status: int, about: str, body: bytes) -> RefusedError | BusyError:
        """Return the error for an answer that is not a dure server's."""
        reason = one_line(f"{self.place} is not a server of dure: {about}")
        return BusyError(status, reason) if self.known else RefusedError(status, reason, body)

    def send(
        self,
        method: str,
        path: str,
        body: OutgoingBody,
        headers: Mapping[str, str] | None = None,
        timeout: float | None = None,
        most: int = MOST_BODY,
    ) -> HttpAnswer:
        """Send a request with a long body, as `request` does."""
        seconds = self.silent_seconds if timeout is None else timeout
        with self._held(), self._told(seconds):
            response = self._answered(method, path, body, headers or {}, seconds)
            return HttpAnswer(response.status, _headers(response), self._whole(response, most))

    @contextmanager
    def stream(
        self,
        method: str,
        path: str,
        headers: Mapping[str, str] | None = None,
        most: int = MOST_BODY,
    ) -> Iterator[StreamedAnswer]:
        """Send a request whose long answer is read within the block. Raises as `request` does."""
        with self._held():
            with self._told(self.silent_seconds):
                response = self._answered(
                    method, path, _outgoing(b""), headers or {}, self.silent_seconds
                )
            limits = self._limits
            limits.until = None
            limits.left = most + MOST_HEAD
            try:
                yield StreamedAnswer(response.status, _headers(response), self._reader(response))
            finally:
                # The rest of the body would be read as the next answer.
                if not response.isclosed():
                    self._hang_up()
                response.close()

    def close(self) -> None:
        """Close the link for good. Any thread may call this; a waiting thread gets StoppedError."""
        self._closed = True
        connection = self._connection
        if connection is not None:
            connection.shut()
        if self._one.acquire(blocking=False):
            try:
                self._hang_up()
            finally:
                self._one.release()

    def __enter__(self) -> HttpLink:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @contextmanager
    def _held(self) -> Iterator[None]:
        if not self._one.acquire(blocking=False):
            raise RuntimeError("a Link takes one request at a time: create another for this thread")
        try:
            yield
        finally:
            if self._closed:
                self._hang_up()
            # The wall clock, which also counts while the machine sleeps.
            self._used = time.time()
            self._one.release()

    @contextmanager
    def _told(self, seconds: float) -> Iterator[None]:
        """Context manager: convert errors of the connection to the module's errors; close it."""
        try:
            yield
            self._silent = 0
        except (LinkLostError, BusyError, RefusedError, StoppedError):
            self._silent = 0
            raise
        except (NotTrustedError, WrongAddressError) as error:
            if self.known:
                raise LinkLostError(str(error)) from error
            raise
        except (OSError, http.client.HTTPException) as error:
            self._hang_up()
            if self._closed:
                raise StoppedError("the link is closed") from error
            raise self._judged(error, seconds) from error
        except BaseException:
            # An interrupted request leaves the connection in an unusable state.
            self._hang_up()
            raise

    def _judged(self, error: Exception, seconds: float) -> Exception:
        """Return the module's error for a failure of an open connection."""
        judged = connection_error_of(error, self.place, seconds, self._limits.heard)
        told = self.place.secure and not self._limits.heard and closed_silently(error)
        self._silent = self._silent + 1 if told else 0
        if self._silent >= MOST_SILENT and not self.known:
            return NotTrustedError(
                f"{self.place} has closed {self._silent} connections without an answer: "
                f"{CERTIFICATE_HINT}"
            )
        if isinstance(judged, NotTrustedError | WrongAddressError) and self.known:
            return LinkLostError(str(judged))
        return judged

    def _answered(
        self, method: str, path: str, body: OutgoingBody, headers: Mapping[str, str], seconds: float
    ) -> http.client.HTTPResponse:
        """Send a request and return the answer with its body unread, if the status is 2xx.

        Signs the request again if the server sends a new nonce.
        """
        response = self._exchanged(method, path, body, headers, seconds)
        nonce = response.headers.get("dure-nonce")
        if response.status == 401 and nonce is not None and self._signs is not None:
            self._front(response, MOST_BODY)
            self._signs.renew(nonce)
            response = self._exchanged(method, path, body, headers, seconds)
        if not 200 <= response.status < 300:
            raise self._refusal(response, self._front(response, MOST_BODY), method)
        return response

    def _refusal(
        self, response: http.client.HTTPResponse, body: bytes, method: str
    ) -> RefusedError | BusyError:
        status = response.status
        said = refusal_reason(body)
        if said is not None:
            self.known = True
        reason = said or _status(response)
        if status >= 500 or status in RETRYABLE_STATUSES:
            return BusyError(status, reason, _retry_after(response.headers.get("retry-after")))
        # If a proxy refuses a long body, the uploader sends smaller parts.
        if said is not None or method == "PATCH":
            return RefusedError(status, reason, body)
        return self._foreign(status, reason, body)

    def _exchanged(
        self, method: str, path: str, body: OutgoingBody, headers: Mapping[str, str], seconds: float
    ) -> http.client.HTTPResponse:
        """Send a request and return an answer of any status, reopening a closed idle connection."""
        connection = self._kept()
        if connection is not None:
            try:
                return self._once(connection, method, path, body, headers, seconds)
            except _CLOSED:
                # The sender of a long body decides itself which bytes to send again.
                if body.size > SENT_AT_ONCE:
                    raise
                self._hang_up()
        return self._once(self._opened(), method, path, body, headers, seconds)

    def _once(
        self,
        connection: Connection,
        method: str,
        path: str,
        body: OutgoingBody,
        headers: Mapping[str, str],
        seconds: float,
    ) -> http.client.HTTPResponse:
        limits = self._limits
        limits.left = MOST_HEAD + MOST_BODY
        # Signed per transmission: a server accepts each signature once.
        signed = {} if self._signs is None else self._signs.headers(method, path, body.digest)
        length = {"content-length": str(body.size)} if body.size or method != "GET" else {}
        head = connection.head(method, path, {**length, **headers, **signed})
        connection.sock.settimeout(self.silent_seconds)
        try:
            for piece in _joined(head, body.pieces()):
                connection.send(piece)
        except OSError as error:
            # A server that refuses a body may answer and close before the whole body is sent.
            connection.usable = False
            limits.until = time.monotonic() + _EARLY_ANSWER
            return _early(connection, error)
        limits.until = time.monotonic() + seconds
        return connection.getresponse()

    def _whole(self, response: http.client.HTTPResponse, most: int) -> bytes:
        """Return the body of an answer. Raises RefusedError if it has more than `most` bytes."""
        body = self._front(response, most + 1)
        if len(body) > most:
            reason = f"{self.place} answers with more than {most} bytes"
            raise RefusedError(response.status, reason, body)
        return body

    def _front(self, response: http.client.HTTPResponse, most: int) -> bytes:
        """Return at most `most` bytes of the body of an answer."""
        self._limits.until = time.monotonic() + self.silent_seconds
        self._limits.left = most + MOST_HEAD
        try:
            body = response.read(most)
        except ValueError as error:
            raise http.client.HTTPException("an answer in chunks without a size") from error
        left = response.length
        if left and len(body) < most:
            raise http.client.IncompleteRead(body, left)
        if left or not response.isclosed():
            self._hang_up()
        return body

    def _reader(self, response: http.client.HTTPResponse) -> Callable[[memoryview], int]:
        def read(memory: memoryview) -> int:
            with self._told(self.silent_seconds):
                count = response.readinto(memory[:READ_AT_ONCE])
                if count == 0 and len(memory) and response.length:
                    raise http.client.IncompleteRead(b"", response.length)
                return count

        return read

    # The connection

    def _kept(self) -> Connection | None:
        """Return the connection of the previous request, if it is open and recently used."""
        if self._connection is None:
            return None
        idle = time.time() - self._used
        open_still = self._connection.usable and self._connection.sock is not None
        if not open_still or not 0 <= idle <= self._idle_seconds:
            self._hang_up()
        return self._connection

    def _opened(self) -> Connection:
        if self._closed:
            raise StoppedError("the link is closed")
        limits = ConnectionLimits(self._connect_seconds)
        try:
            connection = Connection(self.place, self._context, self._proxy, limits)
        except OSError as error:
            raise connection_error_of(error, self.place, self._connect_seconds) from error
        limits.silent = self.silent_seconds
        self._limits = limits
        self._connection = connection
        if self._closed:  # while it was opened
            raise StoppedError("the link is closed")
        return connection

    def _hang_up(self) -> None:
        connection = self._connection
        self._connection = None
        if connection is not None:
            connection.close()


def _joined(head: bytes, pieces: Iterator[bytes | memoryview]) -> Iterator[bytes | memoryview]:
    """Yield the head, joined with the first piece of the body if that is small, and the rest."""
    first = next(pieces, b"")
    if len(first) <= SENT_AT_ONCE:
        yield head + bytes(first)
    else:
        yield head
        yield first
    yield from pieces


def _early(connection: Connection, broken: OSError) -> http.client.HTTPResponse:
    """Return the answer that arrived before the request was completely sent.

    Raises `broken` without an answer, and the error of TLS if there is one.
    """
    try:
        response = connection.getresponse()
    except ssl.SSLError:
        raise
    except (OSError, http.client.HTTPException):
        raise broken from None
    if response.status < 400:
        raise broken
    return response


def _headers(response: http.client.HTTPResponse) -> dict[str, str]:
    return {name.lower(): value for name, value in response.getheaders()}


def refusal_reason(body: bytes) -> str | None:
    """Return the reason of a dure server's refusal; None for any other body."""
    try:
        return one_line(from_json(body, Refusal).error)
    except RequestError:
        return None


def _status(response: http.client.HTTPResponse) -> str:
    to = response.headers.get("location")
    elsewhere = f", and redirects to {to}: use that address" if to else ""
    return one_line(f"it answers {response.status} {response.reason}{elsewhere}")


def _retry_after(text: str | None) -> float:
    """Return seconds from a Retry-After header, which has a number or a date."""
    if text is None:
        return 0.0
    try:
        seconds = float(text)
    except ValueError:
        try:
            seconds = email.utils.parsedate_to_datetime(text).timestamp() - time.time()
        except (ValueError, OverflowError):
            return 0.0
    # NaN is not a waiting time.
    return min(max(seconds, 0.0), LONGEST_WAIT) if seconds == seconds else 0.0


@dataclass(frozen=True)
class Backoff:
    """Exponential backoff: a random wait of at most min(base 2^n, `most`) seconds.

    The wait precedes attempt n. `draw` returns a number from 0 to 1. It uses the system's random
    source, so that clients draw different numbers.
    """

    base: float = 0.25
    most: float = 5.0
    draw: Callable[[], float] = random.SystemRandom().random

    def waits(self) -> Iterator[float]:
        longest = self.base
        while True:
            yield self.draw() * min(longest, self.most)
            longest = min(2 * longest, self.most)


def _untold(error: OSError, seconds: float) -> None:
    pass


def call_with_retries(
    call: Callable[[], _Result],
    backoff: Backoff,
    stop: threading.Event,
    tell: Callable[[OSError, float], None] = _untold,
    limit: float | None = None,
) -> _Result:
    """Call `call` until it raises neither LinkLostError nor BusyError, and return its result.

    Args:
        call: Function to call.
        backoff: Waiting times between attempts.
        stop: Event that ends the attempts, and any wait, immediately.
        tell: Function called with each such error and the seconds until the next attempt.
        limit: Seconds after which no further attempt is made; None for no limit.

    Raises:
        StoppedError: `stop` was set.
        LinkLostError, BusyError: The last error, at the limit.
    """
    until = None if limit is None else time.monotonic() + limit
    for wait in backoff.waits():
        if stop.is_set():
            raise StoppedError
        try:
            return call()
        except (LinkLostError, BusyError) as error:
            if stop.is_set():
                raise StoppedError from error
            if isinstance(error, BusyError):
                # Added to the random wait, so that the refused clients do not return
                # simultaneously.
                wait += error.seconds
            if until is not None and time.monotonic() + wait > until:
                raise
            tell(error, wait)
            stop.wait(wait)
    raise AssertionError("waits do not end")
