"""A way from clients to a server on which things happen to what is sent.

It listens at one address as long as it lives, whatever becomes of the server behind it, and passes
bytes on as they come, also those of TLS. What it does to a connection is said by a `Harm`, which is
asked for anew at each one.
"""

from __future__ import annotations

import contextlib
import socket
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass


@dataclass(frozen=True)
class Harm:
    """up, down: bytes to and from the server after which the connection is cut, None for never.

    delay: seconds by which every piece comes later. hole: what is sent goes nowhere, and nothing
    comes back, but the connection stays open; for so many seconds.
    """

    up: int | None = None
    down: int | None = None
    delay: float = 0.0
    hole: float = 0.0


NONE = Harm()


class Proxy:
    """Passes connections on to the port of this machine that it leads to; closes them without."""

    def __init__(self) -> None:
        self._to: int | None = None
        self.harm: Callable[[], Harm] = lambda: NONE
        self.connections = 0
        self.cuts = 0
        self.twice = False
        """Whether what a client sends is sent to the server once more, on another connection."""
        self.repeated = 0
        self.seen: list[tuple[int, bytes]] | None = None
        """What clients send, where it is a list: the number of the connection, and the piece."""
        self._swallowed: set[socket.socket] = set()
        self._open: set[socket.socket] = set()
        self._lock = threading.Lock()
        self._closed = False
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port: int = self._listener.getsockname()[1]
        self._thread = threading.Thread(target=self._accept, daemon=True)
        self._thread.start()

    def lead_to(self, port: int | None) -> None:
        """From now on; None: nowhere."""
        self._to = port

    def cut(self) -> None:
        """Every connection breaks."""
        with self._lock:
            for one in self._open:
                _shut(one)

    def swallow(self) -> None:
        """What comes on the connections that are open now goes nowhere; they stay open."""
        with self._lock:
            self._swallowed = set(self._open)

    def close(self) -> None:
        self._closed = True
        _shut(self._listener)
        self._listener.close()
        self.cut()
        self._thread.join(10)

    def _accept(self) -> None:
        while not self._closed:
            try:
                client, _ = self._listener.accept()
            except OSError:
                return
            threading.Thread(target=self._lead, args=(client,), daemon=True).start()

    def _lead(self, client: socket.socket) -> None:
        harm = self.harm()
        with contextlib.ExitStack() as ending:
            ending.enter_context(client)
            self._know(client, ending)
            if harm.hole:
                time.sleep(harm.hole)
                return
            to = self._to
            if to is None:
                return
            try:
                server = ending.enter_context(socket.create_connection(("127.0.0.1", to), 5))
            except OSError:
                return
            server.settimeout(None)
            self._know(server, ending)
            self.connections += 1
            number = self.connections
            back = threading.Thread(
                target=self._pass, args=(server, client, harm.down, harm.delay), daemon=True
            )
            back.start()
            self._pass(client, server, harm.up, harm.delay, number)
            back.join()

    def _know(self, one: socket.socket, ending: contextlib.ExitStack) -> None:
        with self._lock:
            self._open.add(one)
        ending.callback(self._forget, one)
        if self._closed:
            _shut(one)

    def _forget(self, one: socket.socket) -> None:
        with self._lock:
            self._open.discard(one)

    def _pass(
        self,
        source: socket.socket,
        sink: socket.socket,
        most: int | None,
        delay: float,
        upwards: int | None = None,
    ) -> None:
        """Until one of them ends, or so many bytes have passed: then both are cut.

        upwards: the number of the connection, of what a client sends.
        """
        passed = 0
        with contextlib.suppress(OSError):
            while piece := source.recv(1 << 16):
                if source in self._swallowed:
                    continue
                if delay:
                    time.sleep(delay)
                if most is not None and passed + len(piece) >= most:
                    # What was on its way before the cut has arrived.
                    sink.sendall(piece[: most - passed])
                    self.cuts += 1
                    break
                if self.seen is not None and upwards is not None:
                    self.seen.append((upwards, piece))
                sink.sendall(piece)
                passed += len(piece)
                if self.twice and upwards is not None:
                    self._repeat(piece)
        _shut(source)
        _shut(sink)

    def _repeat(self, piece: bytes) -> None:
        """The same again; the answer is read, since the server is to have done it."""
        with socket.create_connection(("127.0.0.1", self._to or 0), 5) as link:
            link.sendall(piece)
            link.settimeout(0.5)
            with contextlib.suppress(OSError):
                self.repeated += bool(link.recv(1 << 16))


def _shut(one: socket.socket) -> None:
    with contextlib.suppress(OSError):
        one.shutdown(socket.SHUT_RDWR)
