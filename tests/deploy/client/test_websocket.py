"""A client's end of a WebSocket, against a server of the library's."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress

import pytest
from websockets.exceptions import ConnectionClosed
from websockets.server import ServerProtocol
from websockets.sync.server import ServerConnection, serve

from dure.deploy.client import websocket
from dure.deploy.client.websocket import ClosedError, WebSocket

SECONDS = 10.0


@contextmanager
def opened(
    does: Callable[[ServerConnection], object], heartbeat: float = 10.0
) -> Iterator[WebSocket]:
    """A client, and a server that does this once it is there."""

    def handler(connection: ServerConnection) -> None:
        with suppress(ConnectionClosed):
            does(connection)

    with serve(
        handler, "127.0.0.1", 0, compression=None, max_size=None, close_timeout=0.2
    ) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        try:
            port = server.socket.getsockname()[1]
            sock = socket.create_connection(("127.0.0.1", port))
            client = WebSocket(sock, f"ws://127.0.0.1:{port}/", {}, SECONDS, heartbeat)
            try:
                yield client
            finally:
                client.close()
        finally:
            server.shutdown()
            thread.join()


def echo(connection: ServerConnection) -> None:
    for message in connection:
        connection.send(message)


@pytest.mark.parametrize("size", [1, 7, 8, 9, 16, 100])
def test_a_message_of_any_length_comes_back(size: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(websocket, "FRAGMENT", 8)
    said = bytes(range(size))
    with opened(echo) as client:
        for _ in range(2):
            client.send([said[:3], b"", memoryview(said)[3:]])
            assert client.receive(SECONDS) == said


def test_where_nothing_is_said_nothing_comes() -> None:
    with opened(echo) as client:
        assert client.receive(0.01) is None


def test_a_message_in_fragments_comes_as_one() -> None:
    with opened(lambda server: (server.send([b"ab", b"", b"c"]), server.recv())) as client:
        assert client.receive(SECONDS) == b"abc"


def test_pings_are_answered_while_nobody_waits() -> None:
    answered = threading.Event()

    def pings(server: ServerConnection) -> None:
        if server.ping().wait(SECONDS):
            answered.set()

    with opened(pings, heartbeat=0.1):
        assert answered.wait(SECONDS)


@pytest.mark.parametrize("says", [False, True])
def test_why_the_server_has_closed_it_is_told(says: bool) -> None:
    def hears() -> None:
        for _ in range(1000):
            if says:
                client.send([bytes(1000)])
            else:
                client.receive(SECONDS)
            time.sleep(0.001)

    # Who only sends looks now and then.
    with opened(lambda server: server.close(4001, "not you"), heartbeat=0.2) as client:
        with pytest.raises(ClosedError, match="not you") as raised:
            hears()
        assert raised.value.code == 4001


def test_what_was_said_before_the_end_is_heard_first() -> None:
    with opened(lambda server: (server.send(b"last"), server.close(4000, "over"))) as client:
        assert client.receive(SECONDS) == b"last"
        with pytest.raises(ClosedError, match="over"):
            client.receive(SECONDS)


def test_a_server_that_is_silent_is_gone() -> None:
    """It opens the channel, and answers no ping."""
    there, here = socket.socketpair()

    def opens() -> None:
        protocol = ServerProtocol()
        protocol.receive_data(there.recv(1 << 16))
        (request,) = protocol.events_received()
        protocol.send_response(protocol.accept(request))  # type: ignore[arg-type]
        for data in protocol.data_to_send():
            there.sendall(data)

    thread = threading.Thread(target=opens)
    thread.start()
    client = WebSocket(here, "ws://there/", {}, SECONDS, heartbeat=0.05)
    thread.join()
    # By its silence, and not by the end of what the caller would wait.
    with there, pytest.raises(ClosedError):
        client.receive(60 * SECONDS)
    client.close()
