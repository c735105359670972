"""Limits of a channel hold before anything is stored: of a message, its fragments, pings, silence,
and of channels that say nothing."""

from __future__ import annotations

import base64
import os
import socket
import struct
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from websockets.sync.server import serve

from dure.deploy.client.link import BusyError, RefusedError
from dure.deploy.client.websocket import MOST_FIRST, ClosedError, WebSocket
from dure.deploy.frame_limits import (
    MOST_CONTROL,
    FrameLimitError,
    FrameLimits,
)
from dure.deploy.server import channels as module
from dure.deploy.server.channels import MOST_GREETING
from dure.deploy.server.websocket import MOST_FIRST as ROOM
from dure.protocol.channels import ClientConnected, ClientDisconnected, ClientFrame
from dure.wire.signatures import NONCE, Signer, digest_of
from served_channels import SECONDS, client, events, opened, served_channels

BINARY, CONTINUATION, PING = 2, 0, 9


def header(length: int, kind: int = BINARY, final: bool = True, bits: int = 0) -> bytes:
    """Of a frame of a client, with a mask that changes nothing."""
    first = (0x80 if final else 0) | bits << 4 | kind
    if length < 126:
        return struct.pack("!BB", first, 0x80 | length) + bytes(4)
    if length < 1 << 16:
        return struct.pack("!BBH", first, 0x80 | 126, length) + bytes(4)
    return struct.pack("!BBQ", first, 0x80 | 127, length) + bytes(4)


# By headers alone

fragments = st.lists(st.integers(0, 300), min_size=1, max_size=6)


def stream_of(messages: list[list[int]]) -> bytes:
    """Messages in fragments of these sizes."""
    return b"".join(
        header(size, CONTINUATION if place else BINARY, place == len(sizes) - 1) + bytes(size)
        for sizes in messages
        for place, size in enumerate(sizes)
    )


@given(st.lists(fragments, max_size=5), st.lists(st.integers(1, 40), min_size=1), st.integers(0, 3))
def test_messages_within_the_limit_pass_however_they_are_cut(
    messages: list[list[int]], cuts: list[int], over: int
) -> None:
    most = max((sum(sizes) for sizes in messages), default=0)
    stream = stream_of(messages)
    limits = FrameLimits(most, masked=True)
    at = 0
    while at < len(stream):
        size = cuts[at % len(cuts)]
        limits.look(stream[at : at + size])
        at += size
    # And one that is longer does not, as soon as a header says so.
    longer = header(most // 2, BINARY, False) + bytes(most // 2)
    with pytest.raises(FrameLimitError, match="but may have at most"):
        limits.look(longer + header(most - most // 2 + 1 + over, CONTINUATION))


@given(st.integers(0, 1 << 20), st.integers(1, (1 << 63) - 1))
def test_a_length_beyond_the_limit_is_refused_by_its_header(most: int, beyond: int) -> None:
    with pytest.raises(FrameLimitError, match="but may have at most"):
        FrameLimits(most, masked=True).look(header(min(most + beyond, (1 << 63) - 1)))


@given(st.integers(1, 7), st.sampled_from([BINARY, CONTINUATION, PING]))
def test_bits_of_extensions_are_refused(bits: int, kind: int) -> None:
    with pytest.raises(FrameLimitError, match="not be compressed"):
        FrameLimits(1000, masked=True).look(header(5, kind, bits=bits))


@pytest.mark.parametrize(
    ("piece", "said"),
    [
        (header(0, PING) * (MOST_CONTROL + 1), "pings in"),
        (header(200, PING), "control frame"),
        (header(5, 1), "text"),
        (header(0, BINARY, False) + header(0, CONTINUATION, False) * 100, "fragments"),
        (header(0) * 300, "messages at once"),
    ],
)
def test_floods_of_small_frames_are_refused(piece: bytes, said: str) -> None:
    with pytest.raises(FrameLimitError, match=said):
        FrameLimits(1000, masked=True).look(piece)


# A server


@pytest.fixture
def served(tmp_path: Path) -> Iterator[Any]:
    with served_channels(tmp_path) as found:
        yield found


def raw(served: Any, signer: Signer, **more: str) -> tuple[socket.socket, bytes]:
    """A channel by hand: its socket, and the answer to the request."""
    signed: dict[str, str] = {}
    while True:
        signed = signer.sign("GET", module.CHANNEL, digest_of())
        sock = socket.create_connection(("127.0.0.1", served.port), SECONDS)
        headers = {
            "host": "x",
            "upgrade": "websocket",
            "connection": "Upgrade",
            "sec-websocket-key": base64.b64encode(os.urandom(16)).decode(),
            "sec-websocket-version": "13",
            **more,
            **signed,
        }
        lines = "".join(f"{name}: {value}\r\n" for name, value in headers.items())
        sock.sendall(f"GET {module.CHANNEL} HTTP/1.1\r\n{lines}\r\n".encode())
        answer = b""
        while b"\r\n\r\n" not in answer:
            answer += sock.recv(4096)
        if answer.split(b" ")[1] == b"101":
            return sock, answer
        sock.close()
        nonce = answer.lower().partition(NONCE.encode() + b": ")[2].split(b"\r")[0].decode()
        assert signer.again(signed, int(answer.split(b" ")[1]), {NONCE: nonce})


def closed(sock: socket.socket) -> tuple[int, str]:
    """(code, reason) by which the server closes a channel; pings of its own are skipped."""
    sock.settimeout(SECONDS)
    head = sock.recv(2, socket.MSG_WAITALL)
    content = sock.recv(head[1] & 0x7F, socket.MSG_WAITALL)
    if head[0] & 0x0F == PING:
        return closed(sock)
    assert head[0] & 0x0F == 8
    return struct.unpack("!H", content[:2])[0], content[2:].decode()


@pytest.mark.parametrize("length", [ROOM + 1, 900 << 20, 1 << 40, (1 << 63) - 1])
def test_a_first_message_is_refused_when_its_header_has_come(served: Any, length: int) -> None:
    sock, _ = raw(served, client(served))
    with sock:
        # Not a byte of it: a server that waited for some would store them.
        sock.sendall(header(length))
        code, reason = closed(sock)
    assert (code, f"{length:,}"[:9] in reason) == (1009, True)
    assert served.channels.next(0.05) is None


@settings(max_examples=5, deadline=None)
@given(most=st.integers(ROOM, 1 << 18), pieces=st.integers(1, 5))
def test_after_the_first_message_a_client_may_send_what_is_allowed(
    most: int, pieces: int, tmp_path_factory: Any
) -> None:
    with (
        served_channels(tmp_path_factory.mktemp("run")) as served,
        opened(served, client(served)) as channel,
    ):
        channel.say([b"hello"])
        assert events(served, 1) == [ClientConnected(0, b"hello")]
        served.channels.allow(most)
        served.channels.say(0, [b"begin"])
        assert channel.next(SECONDS) == b"begin"
        frame = bytes(most)
        size = -(-most // pieces)
        channel.say([frame[at : at + size] for at in range(0, most, size)])
        assert events(served, 1) == [ClientFrame(0, frame)]
        channel.say([bytes(most + 1)])
        (gone,) = events(served, 1)
        assert isinstance(gone, ClientDisconnected)
        assert f"may have at most {most:,}" in gone.why
        # It hears so, and does not try again.
        with pytest.raises(RefusedError, match="may have"):
            channel.next(SECONDS)


def test_no_compression_is_agreed_upon_and_none_is_taken(served: Any) -> None:
    extension = {"sec-websocket-extensions": "permessage-deflate; client_max_window_bits"}
    sock, answer = raw(served, client(served), **extension)
    with sock:
        assert b"permessage" not in answer.lower()
        sock.sendall(header(100, bits=4) + bytes(100))
        assert closed(sock)[0] == 1002


def test_a_client_that_pings_and_says_nothing_is_over_at_the_deadline(
    served: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "HELLO_SECONDS", 0.3)
    sock, _ = raw(served, client(served))
    with sock:
        began = time.monotonic()
        sock.sendall(header(50))
        for _ in range(3):
            sock.sendall(b"\0")
        code, reason = closed(sock)
    assert (code, "within 0.3 s" in reason) == (module.TURNED_AWAY, True)
    assert time.monotonic() - began < SECONDS


def test_a_client_has_few_channels_that_say_nothing(served: Any) -> None:
    signer = client(served)
    silent = [opened(served, signer) for _ in range(MOST_GREETING)]
    with pytest.raises(BusyError, match="open only one"):
        opened(served, signer)
    # Another client is not in its way, and one that speaks makes room.
    with opened(served, client(served)):
        silent[0].say([b"hello"])
        assert events(served, 1) == [ClientConnected(0, b"hello")]
        with opened(served, signer):
            pass
    for channel in silent:
        channel.close()


def test_the_main_thread_that_is_busy_is_not_flooded_with_arrivals(served: Any) -> None:
    signer = client(served)
    for _ in range(module.MOST_WAITING):
        with opened(served, signer) as channel:
            channel.say([b"hello"])
            until = time.monotonic() + SECONDS
            while served.channels._greeting[0] and time.monotonic() < until:
                time.sleep(0.01)
    with pytest.raises(BusyError, match="open only one"):
        opened(served, signer)


# A client


def test_a_server_that_sends_more_than_it_may_is_refused() -> None:
    def talks(connection: Any) -> None:
        connection.send(bytes(MOST_FIRST))
        connection.recv()
        connection.send(bytes(MOST_FIRST + 1))

    with serve(talks, "127.0.0.1", 0, compression=None) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        port = server.socket.getsockname()[1]
        sock = socket.create_connection(("127.0.0.1", port))
        channel = WebSocket(sock, f"ws://127.0.0.1:{port}/", {}, SECONDS, 5.0)
        assert channel.receive(SECONDS) == bytes(MOST_FIRST)
        channel.send([b"next"])
        with pytest.raises(ClosedError, match="violates the protocol"):
            channel.receive(SECONDS)
        channel.close()
        server.shutdown()
