"""Serve the live page on this machine alone: the standard library's HTTP server, on loopback.

A request must have a loopback address or localhost as its host, so that a foreign site whose name
resolves to this machine gets nothing (DNS rebinding). A connection that is silent for `SILENT`
seconds is closed.
"""

from __future__ import annotations

import re
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import urlsplit

from dure.contracts.page import MOST_BODY, PACE, EventStream, PageResponse
from dure.errors import ServeError
from dure.report.live.page import LivePage

SILENT = 20.0
"""Timeout in seconds for the next bytes of a request, or for a reader that takes a response."""

MOST_CONNECTIONS = 128
"""Most simultaneous connections, each with a thread; further connections are closed."""

LOOPBACK = ("127.0.0.1", "localhost", "::1")


class Listener:
    """A page served by threads of this process. Raises ServeError if it cannot listen."""

    def __init__(self, page: LivePage, port: int = 0) -> None:
        try:
            self._server = _Server(("127.0.0.1", port), page)
        except OSError as error:
            raise ServeError(
                f"cannot listen at 127.0.0.1, port {port}: {error.strerror or error}: choose "
                f"another port"
            ) from error
        self.page = page
        self.port: int = self._server.server_address[1]
        self.url = f"http://127.0.0.1:{self.port}/"
        self._thread = threading.Thread(
            target=self._server.serve_forever, args=(0.1,), name="dure watches", daemon=True
        )
        self._thread.start()

    def close(self) -> None:
        """Send readers the final state and the end, and close the listener."""
        self.page.close()
        self._server.shutdown()
        self._thread.join()
        self._server.told(2.0)
        self._server.server_close()


class _Server(ThreadingHTTPServer):
    daemon_threads = True
    block_on_close = False

    def __init__(self, address: tuple[str, int], page: LivePage) -> None:
        self.page = page
        self._streams = 0
        self._connections = 0
        self._changed = threading.Condition()
        super().__init__(address, _Handler)

    def streams(self, more: int) -> None:
        """Change the number of readers by `more`."""
        with self._changed:
            self._streams += more
            self._changed.notify_all()

    def verify_request(self, request: Any, client_address: Any) -> bool:
        """Return whether there is a thread for one more connection."""
        with self._changed:
            return self._connections < MOST_CONNECTIONS

    def process_request_thread(self, request: Any, client_address: Any) -> None:
        with self._changed:
            self._connections += 1
        try:
            super().process_request_thread(request, client_address)
        finally:
            with self._changed:
                self._connections -= 1

    def told(self, seconds: float) -> None:
        """Wait until all readers have received the end, for at most `seconds`."""
        with self._changed:
            self._changed.wait_for(lambda: not self._streams, seconds)

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Ignore errors: a lost reader needs no response, and the terminal is for the run."""


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server_version = "dure"
    sys_version = ""
    timeout = SILENT
    server: _Server

    def do_GET(self) -> None:
        self._answer(b"")

    def do_HEAD(self) -> None:
        self._answer(b"")

    def do_POST(self) -> None:
        length = self.headers.get("content-length", "")
        # Not plain int(): it rejects thousands of digits, and zeros could hide a large number.
        if re.fullmatch("[0-9]{1,9}", length) is None or int(length) > MOST_BODY:
            self.close_connection = True
            self._send(PageResponse(413))
            return
        self._answer(self.rfile.read(int(length)))

    def _answer(self, body: bytes) -> None:
        if not self._is_for_here():
            self._send(
                PageResponse(421, {"content-type": "text/plain"}, b"this is a loopback address\n")
            )
            return
        headers = {name.lower(): value for name, value in self.headers.items()}
        self._send(self.server.page.answer(self.command, self.path, headers, body))

    def _is_for_here(self) -> bool:
        try:
            return urlsplit(f"//{self.headers.get('host', '')}").hostname in LOOPBACK
        except ValueError:
            return False

    def _send(self, answer: PageResponse) -> None:
        self.send_response(answer.status)
        for name, value in answer.headers.items():
            self.send_header(name, value)
        if answer.stream is not None:
            # The end of the stream is the end of the connection.
            self.close_connection = True
            self.send_header("connection", "close")
            self.end_headers()
            if self.command != "HEAD":
                self._follow(answer.stream)
            return
        self.send_header("content-length", str(len(answer.body)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(answer.body)

    def _follow(self, stream: EventStream) -> None:
        """Send due events until the stream or the connection ends (OSError)."""
        self.server.streams(1)
        try:
            while not stream.over:
                self.wfile.write(stream.due())
                if not stream.over:
                    self.server.page.wait(PACE)
        finally:
            stream.close()
            self.server.streams(-1)

    def log_message(self, format: str, *args: Any) -> None:
        """Log nothing: the terminal is for the run."""
