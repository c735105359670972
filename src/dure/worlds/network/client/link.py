"""The client's side of the wire: requests to a server, and patience.

A `Link` is one connection that stays open between requests. Where the server has closed it
meanwhile, it is opened anew and the request sent once more: all requests here may be repeated.
Whatever else goes wrong is said by the kind of the error. `patiently` tries again after the first
two; the others end a client:

    LinkLostError      refused, reset, cut off, nothing within the time, no way there, a name server
                       that is silent, a proxy that is busy
    BusyError          408, 425, 429, 5xx
    WrongAddressError  no such host, no TLS there, none that both speak, a proxy that says no    *
    NotTrustedError    one of the two does not trust the other; `MOST_SILENT` connections in a row
                       closed after TLS was agreed on, without a word                            *
    RefusedError       4xx in the words of a server of dure
    UnfitMessageError  an answer of a server of dure with a value that it cannot have
                       3xx, 4xx without them, a page: what answers there is no server of dure    *

    *  until a server of dure has answered once. It has been the right one then, and what stands in
       between may pass: a sign-on page of a hotel, a name that is known within a VPN alone, a
       certificate that is being renewed. So these are LinkLostError and BusyError from then on.

How long `patiently` waits doubles, and is drawn from all of that time, so that the clients of a
server that comes back do not come all at once ("full jitter": M. Brooker, Exponential backoff and
jitter, AWS architecture blog, 2015).
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

from dure.errors import DureError
from dure.peer_text import one_line
from dure.wire.requests import (
    MOST_BODY,
    Body,
    RangeError,
    Refusal,
    RequestError,
    Said,
    from_json,
    to_json,
)
from dure.worlds.network.client.connection import (
    ASKS_FOR_ONE,
    NOT_NOW,
    READ_AT_ONCE,
    SENT_AT_ONCE,
    Connection,
    Limits,
    LinkLostError,
    NotTrustedError,
    WrongAddressError,
    closed_without_a_word,
    lost,
    place_of,
    proxy_for,
)

__all__ = [
    "Answer",
    "Backoff",
    "BusyError",
    "Link",
    "LinkLostError",
    "NotTrustedError",
    "Outgoing",
    "RefusedError",
    "Signs",
    "StoppedError",
    "Streamed",
    "UnfitMessageError",
    "WrongAddressError",
    "patiently",
]

MOST_HEAD = 1 << 18
"""Bytes of an answer besides its body, at most."""

LONGEST_WAIT = 600.0
"""Seconds that a server may ask a client to stay away."""

MOST_SILENT = 4
"""Connections over TLS in a row that a server closes without a word, before it is left alone: it
does so with clients whose certificate it does not take. One that ends does so once or twice."""

_EARLY_ANSWER = 1.0
_CLOSED = (ConnectionError, ssl.SSLEOFError, ssl.SSLZeroReturnError)
_Result = TypeVar("_Result")


class RefusedError(DureError):
    """The server does not do what it was asked.

    status: of HTTP. reason: what the server says, in one line. body: its answer, cut where it is
    long.
    """

    def __init__(self, status: int, reason: str, body: bytes = b"") -> None:
        super().__init__(status, reason, body)
        self.status = status
        self.reason = reason
        self.body = body

    def __str__(self) -> str:
        return self.reason


class UnfitMessageError(DureError):
    """A server of dure says what cannot be: a number beyond its range, say. Nothing is done of it,
    and it is not asked again."""


class BusyError(OSError):
    """The server, or what stands before it, cannot answer now.

    seconds: how long it wants to be left alone; 0 where it does not say.
    """

    def __init__(self, status: int, reason: str, seconds: float = 0.0) -> None:
        super().__init__(status, reason, seconds)
        self.status = status
        self.reason = reason
        self.seconds = seconds

    def __str__(self) -> str:
        return self.reason


class StoppedError(Exception):
    """The caller's own wish to end came first: `stop` was set, or the link closed."""


class Signs(Protocol):
    """Signs requests. Several threads may ask at once."""

    def headers(self, method: str, path: str, digest: str) -> Mapping[str, str]:
        """Of one sending of a request; digest: SHA-256 of its body, as hexadecimal digits."""

    def renew(self, nonce: str) -> None:
        """The server's new nonce, to be used from now on."""


class Answer(NamedTuple):
    """headers: by their names in small letters."""

    status: int
    headers: Mapping[str, str]
    body: bytes


class Streamed(NamedTuple):
    """An answer whose body is read as it comes. read: fills the front of the memory; how many
    bytes that were, 0 at the end; raises LinkLostError where the body ends early."""

    status: int
    headers: Mapping[str, str]
    read: Callable[[memoryview], int]


class Outgoing(NamedTuple):
    """A request's body. digest: SHA-256 of it. pieces: the bytes, from the beginning at each call;
    what it raises ends the request."""

    size: int
    digest: str
    pieces: Callable[[], Iterator[bytes | memoryview]]


def _outgoing(body: bytes) -> Outgoing:
    return Outgoing(len(body), hashlib.sha256(body).hexdigest(), lambda: iter((body,)))


class Link:
    """Requests to one server, by one thread at a time.

    url: https://HOST:PORT, with a path where a proxy before the server expects one. context: of
    TLS; the system's authorities without. signs: what signs each request. connect_seconds: to open
    a connection. silent_seconds: for an answer, and between two bytes of a long one. idle_seconds:
    after which a connection is not used again, below the time after which servers close it.
    most_part: bytes of a body that something on the way is known to refuse more than; uploads
    note it here. known: a server of dure has answered there before.

    Raises ValueError for a URL or a proxy that is none.
    """

    def __init__(
        self,
        url: str,
        *,
        context: ssl.SSLContext | None = None,
        signs: Signs | None = None,
        connect_seconds: float = 10.0,
        silent_seconds: float = 30.0,
        idle_seconds: float = 55.0,
        known: bool = False,
    ) -> None:
        self.known = known
        self._silent = 0
        """Connections in a row that were closed without a word."""
        self.place = place_of(url)
        self._proxy = proxy_for(self.place)
        self._context = (context or ssl.create_default_context()) if self.place.secure else None
        self._signs = signs
        self._connect_seconds = connect_seconds
        self.silent_seconds = silent_seconds
        self._idle_seconds = idle_seconds
        self.most_part: int | None = None
        self._limits = Limits(silent_seconds)
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
    ) -> Answer:
        """A request whose answer is small.

        timeout: seconds until the answer has to be there, `silent_seconds` by default. most: bytes
        that its body may have.

        Raises LinkLostError, NotTrustedError, RefusedError, BusyError, and StoppedError where the
        link was closed.
        """
        return self.send(method, path, _outgoing(body), headers, timeout, most)

    def ask(
        self, method: str, path: str, said: Said, kind: type[Body], timeout: float | None = None
    ) -> Body:
        """A request and an answer of `dure.wire.requests`. Raises as `request` does."""
        headers = {"content-type": "application/json"}
        return self.understood(self.request(method, path, to_json(said), headers, timeout), kind)

    def understood(self, answer: Answer, kind: type[Body]) -> Body:
        """What an answer says. Raises RefusedError where it says something else: who signs on to a
        foreign network is often answered by a page of its own. Raises UnfitMessageError for a value
        beyond its range."""
        try:
            said = from_json(answer.body, kind)
        except RangeError as error:
            raise UnfitMessageError(
                one_line(f"an answer of {self.place} is refused: {error}")
            ) from error
        except RequestError as error:
            raise self._foreign(answer.status, str(error), answer.body) from error
        self.known = True
        return said

    def _foreign(self, status: int, about: str, body: bytes) -> RefusedError | BusyError:
        """An answer that is none of a server of dure."""
        reason = one_line(f"what answers at {self.place} is no server of dure: {about}")
        return BusyError(status, reason) if self.known else RefusedError(status, reason, body)

    def send(
        self,
        method: str,
        path: str,
        body: Outgoing,
        headers: Mapping[str, str] | None = None,
        timeout: float | None = None,
        most: int = MOST_BODY,
    ) -> Answer:
        """`request`, whose body may be long."""
        seconds = self.silent_seconds if timeout is None else timeout
        with self._held(), self._told(seconds):
            response = self._answered(method, path, body, headers or {}, seconds)
            return Answer(response.status, _headers(response), self._whole(response, most))

    @contextmanager
    def stream(
        self,
        method: str,
        path: str,
        headers: Mapping[str, str] | None = None,
        most: int = MOST_BODY,
    ) -> Iterator[Streamed]:
        """A request whose answer is long, and read within the block. Raises as `request` does."""
        with self._held():
            with self._told(self.silent_seconds):
                response = self._answered(
                    method, path, _outgoing(b""), headers or {}, self.silent_seconds
                )
            limits = self._limits
            limits.until = None
            limits.left = most + MOST_HEAD
            try:
                yield Streamed(response.status, _headers(response), self._reader(response))
            finally:
                # What is left of a body would be taken for the next answer.
                if not response.isclosed():
                    self._hang_up()
                response.close()

    def close(self) -> None:
        """For good. Any thread may say so; one that waits here gets StoppedError at once."""
        self._closed = True
        connection = self._connection
        if connection is not None:
            connection.shut()
        if self._one.acquire(blocking=False):
            try:
                self._hang_up()
            finally:
                self._one.release()

    def __enter__(self) -> Link:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @contextmanager
    def _held(self) -> Iterator[None]:
        if not self._one.acquire(blocking=False):
            raise RuntimeError("a Link takes one request at a time: make another for this thread")
        try:
            yield
        finally:
            if self._closed:
                self._hang_up()
            # By the clock on the wall, which goes on while the machine sleeps.
            self._used = time.time()
            self._one.release()

    @contextmanager
    def _told(self, seconds: float) -> Iterator[None]:
        """What goes wrong with the connection is one of the errors above, and ends it."""
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
            # A request that was ended in its midst leaves a connection that nobody can use.
            self._hang_up()
            raise

    def _judged(self, error: Exception, seconds: float) -> Exception:
        """What a connection that was open has come to."""
        judged = lost(error, self.place, seconds, self._limits.heard)
        told = self.place.secure and not self._limits.heard and closed_without_a_word(error)
        self._silent = self._silent + 1 if told else 0
        if self._silent >= MOST_SILENT and not self.known:
            return NotTrustedError(
                f"{self.place} has closed {self._silent} connections without a word: {ASKS_FOR_ONE}"
            )
        if isinstance(judged, NotTrustedError | WrongAddressError) and self.known:
            return LinkLostError(str(judged))
        return judged

    def _answered(
        self, method: str, path: str, body: Outgoing, headers: Mapping[str, str], seconds: float
    ) -> http.client.HTTPResponse:
        """The answer to a request, its body unread, where it says that all is well."""
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
        said = own_words(body)
        if said is not None:
            self.known = True
        reason = said or _status(response)
        if status >= 500 or status in NOT_NOW:
            return BusyError(status, reason, _retry_after(response.headers.get("retry-after")))
        # Of a body that is too long for something on the way the sender makes smaller ones.
        if said is not None or method == "PATCH":
            return RefusedError(status, reason, body)
        return self._foreign(status, reason, body)

    def _exchanged(
        self, method: str, path: str, body: Outgoing, headers: Mapping[str, str], seconds: float
    ) -> http.client.HTTPResponse:
        """An answer of any status. That a connection was closed while it lay idle is no failure."""
        connection = self._kept()
        if connection is not None:
            try:
                return self._once(connection, method, path, body, headers, seconds)
            except _CLOSED:
                # Who sends a long body decides for himself what is sent again.
                if body.size > SENT_AT_ONCE:
                    raise
                self._hang_up()
        return self._once(self._opened(), method, path, body, headers, seconds)

    def _once(
        self,
        connection: Connection,
        method: str,
        path: str,
        body: Outgoing,
        headers: Mapping[str, str],
        seconds: float,
    ) -> http.client.HTTPResponse:
        limits = self._limits
        limits.left = MOST_HEAD + MOST_BODY
        # Signed at each sending: a server may take a signature once.
        signed = {} if self._signs is None else self._signs.headers(method, path, body.digest)
        length = {"content-length": str(body.size)} if body.size or method != "GET" else {}
        head = connection.head(method, path, {**length, **headers, **signed})
        connection.sock.settimeout(self.silent_seconds)
        try:
            for piece in _joined(head, body.pieces()):
                connection.send(piece)
        except OSError as error:
            # Who refuses a body may answer, and close, before all of it is sent.
            connection.usable = False
            limits.until = time.monotonic() + _EARLY_ANSWER
            return _early(connection, error)
        limits.until = time.monotonic() + seconds
        return connection.getresponse()

    def _whole(self, response: http.client.HTTPResponse, most: int) -> bytes:
        """The body of an answer. Raises RefusedError where it is longer than `most`."""
        body = self._front(response, most + 1)
        if len(body) > most:
            reason = f"{self.place} answers with more than {most} bytes"
            raise RefusedError(response.status, reason, body)
        return body

    def _front(self, response: http.client.HTTPResponse, most: int) -> bytes:
        """The body of an answer, cut where it is longer."""
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
        """The connection of the request before, if it is open and was used of late."""
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
        limits = Limits(self._connect_seconds)
        try:
            connection = Connection(self.place, self._context, self._proxy, limits)
        except OSError as error:
            raise lost(error, self.place, self._connect_seconds) from error
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
    """The head with the first piece of the body, if that is small, and the other pieces."""
    first = next(pieces, b"")
    if len(first) <= SENT_AT_ONCE:
        yield head + bytes(first)
    else:
        yield head
        yield first
    yield from pieces


def _early(connection: Connection, broken: OSError) -> http.client.HTTPResponse:
    """The answer that came before a request was sent. Raises what broke the sending without one,
    and what TLS has to say."""
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


def own_words(body: bytes) -> str | None:
    """Why a server of dure refuses; None of anybody else."""
    try:
        return one_line(from_json(body, Refusal).error)
    except RequestError:
        return None


def _status(response: http.client.HTTPResponse) -> str:
    to = response.headers.get("location")
    elsewhere = f", and names {to} instead: use that" if to else ""
    return one_line(f"it answers {response.status} {response.reason}{elsewhere}")


def _retry_after(text: str | None) -> float:
    """Seconds, of a number of them or a date."""
    if text is None:
        return 0.0
    try:
        seconds = float(text)
    except ValueError:
        try:
            seconds = email.utils.parsedate_to_datetime(text).timestamp() - time.time()
        except (ValueError, OverflowError):
            return 0.0
    # A number that is none, such as "nan", is no time to wait either.
    return min(max(seconds, 0.0), LONGEST_WAIT) if seconds == seconds else 0.0


@dataclass(frozen=True)
class Backoff:
    """How long is waited before another attempt: at the n-th, up to base 2^n seconds, and at most
    `most`.

    draw: a number from 0 to 1. Clients are to draw different ones, so it comes from the system.
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


def patiently(
    call: Callable[[], _Result],
    backoff: Backoff,
    stop: threading.Event,
    tell: Callable[[OSError, float], None] = _untold,
    limit: float | None = None,
) -> _Result:
    """What `call` returns, once it neither raises LinkLostError nor BusyError.

    tell: is called with each of these, and the seconds until the next attempt. limit: seconds after
    which there is no next.

    Raises StoppedError once `stop` is set, at once even while it waits; the last error at the
    limit; and whatever else `call` raises.
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
                # All that are sent away come back later, and not all at one time.
                wait += error.seconds
            if until is not None and time.monotonic() + wait > until:
                raise
            tell(error, wait)
            stop.wait(wait)
    raise AssertionError("waits do not end")
