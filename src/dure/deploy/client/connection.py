"""HTTP connection of a client: opening, timeouts, and classification of errors.

HTTP/1.1 by the standard library's `http.client`, over TLS, through the proxy that the environment
names (`https_proxy`, `http_proxy`, `no_proxy`). The module differs from the library in two points.
It sends a request's head and a small body in a single write, because a second small write would
wait for the receiver's acknowledgement of the first. And every wait has a timeout: a small answer
has a deadline as a whole, and a long answer has a timeout for every silence.
"""

from __future__ import annotations

import base64
import errno
import http.client
import io
import re
import socket
import ssl
import time
import urllib.parse
import urllib.request
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, NamedTuple, cast

from dure.errors import DureError
from dure.wire.loopback import is_loopback

SENT_AT_ONCE = 1 << 16
"""Maximum bytes passed to a socket per call.

TLS splits them into records of 16 KiB anyway, so larger pieces are no faster. On a slow link a
piece has to leave within the timeout of a silence.
"""

READ_AT_ONCE = 1 << 18
"""Maximum bytes read from a socket per call, directly into the target memory."""

UNSENT = 1 << 17
"""Maximum unsent bytes in the system's send buffer, if the system supports the limit.

Without the limit the system accepts megabytes that have not left, and the timeout of the answer
begins too early.
"""

_READ_AHEAD = 1 << 14


class LinkLostError(OSError):
    """The server is unreachable, or the connection broke. A retry may succeed."""


class NotTrustedError(DureError):
    """The client or the server does not trust the other side's certificate.

    A retry does not help.
    """

    exit_code = 2


class WrongAddressError(DureError):
    """The address cannot belong to a dure server, for example because the host does not exist.

    A retry does not help.
    """

    exit_code = 2


class ServerAddress(NamedTuple):
    """Address of a server. `prefix` is the path before each request's path, "" or "/dure"."""

    secure: bool
    host: str
    port: int
    prefix: str

    def __str__(self) -> str:
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"{host}:{self.port}"


def server_address_of(url: str) -> ServerAddress:
    """Parse a server's URL. Raises ValueError for an invalid URL."""
    said = urllib.parse.urlsplit(url)
    if said.scheme not in ("https", "http") or not said.hostname:
        raise ValueError(f"{url!r} is not the URL of a server: write https://HOST:PORT")
    if said.query or said.fragment or said.username is not None:
        raise ValueError(f"{url!r} has more than https://HOST:PORT/PATH: leave out the rest")
    secure = said.scheme == "https"
    port = said.port or (443 if secure else 80)
    return ServerAddress(secure, said.hostname, port, said.path.rstrip("/"))


class Proxy(NamedTuple):
    """Address of a proxy. `headers` are sent to the proxy, for its authentication."""

    host: str
    port: int
    headers: dict[str, str]


def proxy_for(place: ServerAddress) -> Proxy | None:
    """Return the proxy of the environment; None for a direct connection.

    Raises ValueError for a proxy whose scheme is not http.
    """
    # A loopback address is on this machine, and a proxy could not reach it.
    if is_loopback(place.host) or urllib.request.proxy_bypass(place.host):
        return None
    url = urllib.request.getproxies().get("https" if place.secure else "http")
    if not url:
        return None
    said = urllib.parse.urlsplit(url if "://" in url else f"http://{url}")
    if said.scheme != "http" or not said.hostname:
        raise ValueError(
            f"the proxy {said.scheme}://{said.hostname} does not have the form http://HOST:PORT"
        )
    headers = {}
    if said.username is not None:
        name = urllib.parse.unquote(said.username)
        secret = urllib.parse.unquote(said.password or "")
        word = base64.b64encode(f"{name}:{secret}".encode()).decode()
        headers["Proxy-Authorization"] = f"Basic {word}"
    return Proxy(said.hostname, said.port or 8080, headers)


@dataclass
class ConnectionLimits:
    """Timeouts and size limit of a connection, and its progress.

    Args:
        silent: Seconds without a byte.
        until: Deadline on the clock `time.monotonic`; None for no deadline.
        left: Bytes that may still arrive.
        ended: Whether the server has closed the connection.
        heard: Whether any byte has arrived.
    """

    silent: float
    until: float | None = None
    left: int = 0
    ended: bool = False
    heard: bool = False

    def seconds(self) -> float:
        """Return the timeout of the next read in seconds.

        Raises TimeoutError after the deadline.
        """
        if self.until is None:
            return self.silent
        left = self.until - time.monotonic()
        if left <= 0:
            raise TimeoutError("timed out")
        return left

    def took(self, count: int) -> None:
        self.left -= count
        self.ended = count == 0
        self.heard = self.heard or not self.ended
        if self.left < 0:
            raise http.client.HTTPException("the answer does not end")


class _Incoming(io.RawIOBase):
    """Raw input of a socket, within the limits."""

    def __init__(self, sock: socket.socket, limits: ConnectionLimits) -> None:
        self._sock = sock
        # The file object keeps the socket open until the answer is read, as the library expects.
        self._raw = cast(io.RawIOBase, sock.makefile("rb", buffering=0))
        self._limits = limits

    def readable(self) -> bool:
        return True

    def readinto(self, memory: Any) -> int:
        self._sock.settimeout(self._limits.seconds())
        count = self._raw.readinto(memory) or 0
        self._limits.took(count)
        return count

    def close(self) -> None:
        try:
            self._raw.close()
        finally:
            super().close()


class _Source(NamedTuple):
    """Object that `http.client.HTTPResponse` uses as its socket."""

    sock: socket.socket
    limits: ConnectionLimits

    def makefile(self, mode: str) -> io.BufferedReader:
        return io.BufferedReader(_Incoming(self.sock, self.limits), _READ_AHEAD)


class Connection(http.client.HTTPConnection):
    """Open HTTP connection. Raises OSError if the connection fails."""

    def __init__(
        self,
        place: ServerAddress,
        context: ssl.SSLContext | None,
        proxy: Proxy | None,
        limits: ConnectionLimits,
    ) -> None:
        to = proxy or place
        super().__init__(to.host, to.port, timeout=limits.silent)
        self.limits = limits
        self.response_class = self._response  # type: ignore[assignment]
        self.default_port = 443 if place.secure else 80
        # Without TLS the proxy itself takes requests, by absolute URLs.
        self._before = place.prefix
        self._more: dict[str, str] = {}
        if proxy is not None and place.secure:
            self.set_tunnel(place.host, place.port, proxy.headers)
        elif proxy is not None:
            self._before = f"http://{place}{place.prefix}"
            self._more = proxy.headers
        self._head: bytearray | None = None
        self.usable = True
        """Whether another request may use the connection; False after an early answer."""
        limits.left = 1 << 16
        self.connect()
        try:
            if context is not None:
                self.sock = context.wrap_socket(self.sock, server_hostname=place.host)
            _arrange(self.sock)
            self._wire: socket.socket = self.sock
        except BaseException:
            self.close()
            raise

    def _response(self, sock: socket.socket, method: str | None = None) -> Any:
        return http.client.HTTPResponse(_Source(sock, self.limits), method=method)  # type: ignore[arg-type]

    def head(self, method: str, path: str, headers: Mapping[str, str]) -> bytes:
        """Return the bytes before a request's body; send nothing."""
        self._head = bytearray()
        try:
            self.putrequest(method, self._before + path)
            for name, value in {**self._more, **headers}.items():
                self.putheader(name, value)
            self.endheaders()
            return bytes(self._head)
        finally:
            self._head = None

    def send(self, data: Any) -> None:
        if self._head is not None:
            self._head += data
        else:
            super().send(data)

    def getresponse(self) -> http.client.HTTPResponse:
        response = super().getresponse()
        # The library would accept a truncated head as complete.
        if self.limits.ended:
            self.close()
            raise http.client.RemoteDisconnected(
                "the connection broke inside the header of an answer"
            )
        return response

    def shut(self) -> None:
        """End the wait of a thread on this connection; any other thread may call this."""
        with suppress(OSError):
            # Bypasses the method of the TLS socket, after which the waiting thread would read
            # undeciphered bytes.
            socket.socket.shutdown(self._wire, socket.SHUT_RDWR)


_OPTIONS = (
    # Keeps an idle connection alive, before a router forgets it.
    (socket.SOL_SOCKET, "SO_KEEPALIVE", 1),
    (socket.IPPROTO_TCP, "TCP_KEEPIDLE", 20),
    (socket.IPPROTO_TCP, "TCP_KEEPINTVL", 10),
    (socket.IPPROTO_TCP, "TCP_KEEPCNT", 3),
    (socket.IPPROTO_TCP, "TCP_NODELAY", 1),
    (socket.IPPROTO_TCP, "TCP_NOTSENT_LOWAT", UNSENT),
)


def _arrange(sock: socket.socket) -> None:
    for level, name, value in _OPTIONS:
        option = getattr(socket, name, 25 if name == "TCP_NOTSENT_LOWAT" else None)
        if option is None:
            continue
        try:
            sock.setsockopt(level, option, value)
        except OSError as error:
            if error.errno not in (errno.ENOPROTOOPT, errno.EINVAL):
                raise


def connection_error_of(
    error: Exception, place: ServerAddress, seconds: float, heard: bool = True
) -> LinkLostError | NotTrustedError | WrongAddressError:
    """Return the error for a broken connection; the table is in `dure.deploy.client.link`.

    `seconds` is the timeout, for the message of a TimeoutError. `heard` is whether any byte has
    arrived on this connection.
    """
    if isinstance(error, LinkLostError | NotTrustedError | WrongAddressError):
        return error
    if isinstance(error, ssl.SSLCertVerificationError):
        return NotTrustedError(_untrusted(error, place))
    if isinstance(error, ssl.SSLError) and _refuses_ours(error):
        return NotTrustedError(
            f"{place} rejects this client's certificate, or requires one: {error.reason}"
        )
    wrong = _wrong_address(error, place)
    if wrong is not None:
        return WrongAddressError(wrong)
    reason = " ".join(_reason(error, place, seconds).split())
    if place.secure and not heard and closed_silently(error):
        reason += f" before it answered: {CERTIFICATE_HINT}"
    return LinkLostError(reason)


CERTIFICATE_HINT = "does the server require a client certificate, or another one?"


def closed_silently(error: Exception) -> bool:
    """Return whether a server closed the connection without an answer.

    A server often refuses a client's certificate so, and a server that ends closes connections so.
    """
    return isinstance(error, ConnectionError | ssl.SSLEOFError)


def _wrong_address(error: Exception, place: ServerAddress) -> str | None:
    """Return the reason why no server can be at this address; None if a server may be there."""
    if isinstance(error, socket.gaierror) and error.errno in _NO_SUCH_HOST:
        return f"there is no host {place.host}: {error.strerror}"
    if isinstance(error, ssl.SSLError) and error.reason in _NO_TLS:
        return f"{place} does not use TLS: is it an http:// server?"
    if isinstance(error, ssl.SSLError) and _has(error, _NO_COMMON_TLS):
        return f"{place} and this machine have no TLS version in common: {error.reason}"
    # The library's own words about the proxy's answer to CONNECT.
    status = re.match(r"Tunnel connection failed: (4\d\d) (.*)", str(error))
    if status is not None and int(status[1]) not in RETRYABLE_STATUSES:
        return f"the proxy cannot reach {place}: {status[1]} {status[2]}"
    return None


# EAI_AGAIN is not listed: it means a name server without an answer.
_NO_SUCH_HOST = {socket.EAI_NONAME, getattr(socket, "EAI_NODATA", socket.EAI_NONAME)}
_NO_TLS = ("WRONG_VERSION_NUMBER", "HTTP_REQUEST")
_NO_COMMON_TLS = ("PROTOCOL_VERSION", "UNSUPPORTED_PROTOCOL", "INSUFFICIENT_SECURITY")
_NOT_OURS = ("CERTIFICATE", "UNKNOWN_CA", "HANDSHAKE_FAILURE", "ACCESS_DENIED")
RETRYABLE_STATUSES = (408, 425, 429)
"""Status codes below 500 of requests that may be repeated."""


def _has(error: ssl.SSLError, words: tuple[str, ...]) -> bool:
    return any(word in (error.reason or "") for word in words)


def _untrusted(error: ssl.SSLCertVerificationError, place: ServerAddress) -> str:
    hint = "give the certificate of the authority that signed it (--authority)"
    if "not yet valid" in error.verify_message or "expired" in error.verify_message:
        hint = "check the clock of this machine and the certificate's dates"
    elif "mismatch" in error.verify_message:
        hint = "use a host name that is in the certificate"
    return f"the certificate of {place} is not trusted: {error.verify_message}; {hint}"


def _refuses_ours(error: ssl.SSLError) -> bool:
    return "ALERT" in (error.reason or "") and _has(error, _NOT_OURS)


def _reason(error: Exception, place: ServerAddress, seconds: float) -> str:
    if isinstance(error, ConnectionRefusedError):
        return f"{place} refuses connections: is the server running?"
    if isinstance(error, socket.gaierror):
        return f"the host name {place.host} cannot be resolved: {error.strerror}"
    if isinstance(error, TimeoutError):
        return f"{place} did not answer within {seconds:g} s"
    if isinstance(error, http.client.RemoteDisconnected) and not place.secure:
        return f"{place} closes the connection without an answer: is it an https:// server?"
    if isinstance(error, ConnectionError | http.client.IncompleteRead | ssl.SSLEOFError):
        return f"the connection to {place} broke"
    return f"the connection to {place} failed: {error}"
