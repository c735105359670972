"""A server over loopback that answers as a test says, faults included."""

from __future__ import annotations

import datetime
import http.server
import ipaddress
import socket
import ssl
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec


class Request(http.server.BaseHTTPRequestHandler):
    """A request on its way: what it says, and what may be done to it."""

    protocol_version = "HTTP/1.1"
    # A head and a body are two pieces here.
    disable_nagle_algorithm = True
    server: Server

    def handle_one_request(self) -> None:
        try:
            super().handle_one_request()
        except (OSError, ValueError):  # the client has gone, or the test has closed the socket
            self.close_connection = True

    def __getattr__(self, name: str) -> object:
        if name.startswith("do_"):
            return self._do
        raise AttributeError(name)

    def _do(self) -> None:
        self.server.requests.append((self.command, self.path))
        self.server.answer(self)

    def log_message(self, *_: object) -> None:
        pass

    @property
    def length(self) -> int:
        return int(self.headers.get("content-length", 0))

    def body(self) -> bytes:
        return self.rfile.read(self.length)

    def reply(
        self, status: int = 200, body: bytes = b"", headers: Mapping[str, str] | None = None
    ) -> None:
        self.head(status, {"content-length": str(len(body)), **(headers or {})})
        self.wfile.write(body)

    def head(self, status: int, headers: Mapping[str, str]) -> None:
        self.send_response(status)
        for name, value in headers.items():
            self.send_header(name, value)
        self.end_headers()

    def hang_up(self) -> None:
        """Closes the connection without a word."""
        self.close_connection = True
        socket.socket.shutdown(self.connection, socket.SHUT_RDWR)


class Server(http.server.ThreadingHTTPServer):
    """requests: (method, path) of each, in the order of their arrival. connections: how many there
    were."""

    daemon_threads = True

    def __init__(
        self, answer: Callable[[Request], None], context: ssl.SSLContext | None = None
    ) -> None:
        super().__init__(("127.0.0.1", 0), Request)
        self.answer = answer
        self.context = context
        self.requests: list[tuple[str, str]] = []
        self.connections = 0
        scheme = "http" if context is None else "https"
        self.url = f"{scheme}://127.0.0.1:{self.server_port}"

    def finish_request(self, request: socket.socket, address: object) -> None:
        self.connections += 1
        if self.context is not None:
            request = self.context.wrap_socket(request, server_side=True)
        super().finish_request(request, address)  # type: ignore[arg-type]

    def handle_error(self, *_: object) -> None:
        pass


@contextmanager
def serving(
    answer: Callable[[Request], None], context: ssl.SSLContext | None = None
) -> Iterator[Server]:
    server = Server(answer, context)
    thread = threading.Thread(target=lambda: server.serve_forever(poll_interval=0.01))
    thread.start()
    try:
        yield server
    finally:
        server.shutdown()
        thread.join()
        server.socket.close()


def certificate(folder: Path) -> tuple[Path, Path]:
    """A certificate for 127.0.0.1 and server.test that signs itself, and its key."""
    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, "test")])
    now = datetime.datetime.now(datetime.timezone.utc)
    names = [x509.IPAddress(ipaddress.ip_address("127.0.0.1")), x509.DNSName("server.test")]
    made = (
        x509.CertificateBuilder()
        .subject_name(name)
        .issuer_name(name)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - datetime.timedelta(days=1))
        .not_valid_after(now + datetime.timedelta(days=1))
        .add_extension(x509.SubjectAlternativeName(names), critical=False)
        .add_extension(x509.BasicConstraints(ca=True, path_length=None), critical=True)
        .sign(key, hashes.SHA256())
    )
    public, private = folder / "certificate.pem", folder / "key.pem"
    public.write_bytes(made.public_bytes(serialization.Encoding.PEM))
    private.write_bytes(
        key.private_bytes(
            serialization.Encoding.PEM,
            serialization.PrivateFormat.PKCS8,
            serialization.NoEncryption(),
        )
    )
    return public, private
