"""Strangers learn nothing of a server, fill neither its log nor its memory, and hold up nobody."""

from __future__ import annotations

import logging
import socket
import sys
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from websockets.exceptions import InvalidStatus
from websockets.sync.client import connect

from dure.deploy.server import serving
from dure.deploy.server.access import AccessControl, RequestRefused
from dure.deploy.server.concurrency_limits import (
    MOST_OF_ADDRESS,
    MOST_OF_CLIENT,
    ConcurrencyLimits,
)
from dure.deploy.server.log_rate_limit import MOST_LINES

sys.path.insert(0, str(Path(__file__).parent))
sys.path.insert(0, str(Path(__file__).parents[1] / "worlds" / "network"))
from fuzzed import Request, Target
from listeners import channels_served

SECONDS = 20.0


@pytest.fixture(scope="module")
def channels(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    """A server of split learning."""
    with channels_served(tmp_path_factory.mktemp("channels")) as served:
        yield served


@pytest.fixture
def target(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Target]:
    monkeypatch.setattr(serving, "SILENT_SECONDS", 1)
    with Target(tmp_path) as served:
        yield served


def asked(port: int, path: str, lines: str, host: str) -> tuple[bytes, bytes]:
    """(first line, body) of the answer, without what changes with the hour."""
    with socket.create_connection(("127.0.0.1", port), SECONDS) as link:
        request = f"GET {path} HTTP/1.1\r\nhost: {host}\r\nconnection: close\r\n{lines}\r\n"
        link.sendall(request.replace("connection: close\r\n", "", int("upgrade" in lines)).encode())
        found = b""
        while piece := link.recv(1 << 16):
            found += piece
    head, _, content = found.partition(b"\r\n\r\n")
    return head.split(b"\r\n")[0], content


UPGRADE = (
    "upgrade: websocket\r\nconnection: Upgrade\r\n"
    "sec-websocket-key: dGhlIHNhbXBsZSBub25jZQ==\r\nsec-websocket-version: 13\r\n"
)

PATHS = st.sampled_from(
    ["/v1/channel", "/v1/check-in", "/v1/next", "/", "/v1/nothing", "/v1/channel/", "/a?b=c"]
)


@settings(max_examples=20)
@given(path=PATHS, other=PATHS, host=st.sampled_from(["x", "[", "a:b:c", ""]))
def test_an_unsigned_request_to_any_path_is_answered_alike(
    path: str, other: str, host: str, channels: Any
) -> None:
    fresh = AccessControl(channels.access.register, "open")
    channels.access._addresses = fresh._addresses
    for lines in ("", UPGRADE):
        first = asked(channels.port, path, lines, host)
        assert first == asked(channels.port, other, lines, host)
        assert first[0].split()[1] == b"401"


def test_unsigned_websockets_write_a_few_lines_a_minute(
    channels: Any, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.INFO):
        for _ in range(3 * MOST_LINES):
            with pytest.raises(InvalidStatus):
                connect(f"ws://127.0.0.1:{channels.port}/v1/channel")
    lines = Counter(record.name for record in caplog.records)
    assert sum(lines.values()) <= 2 * MOST_LINES, lines


def taken(link: socket.socket, piece: bytes) -> int:
    """Bytes that the server takes of a piece without end, until it hangs up."""
    sent = 0
    with suppress(ConnectionError):
        while sent < 64 << 20:
            sent += link.send(piece)
    return sent


def test_a_header_without_end_is_not_kept(target: Target) -> None:
    with socket.create_connection(("127.0.0.1", target.serving.port), SECONDS) as link:
        link.sendall(b"GET / HTTP/1.1\r\na: ")
        # Far less than what comes in the time that a header has.
        assert taken(link, b"a" * (1 << 16)) < 16 << 20
    assert target.said("client", "/v1/watch", {"ticket": 7})[0] == 200


@pytest.mark.parametrize("end", [b"0\r\n", b"1;"])
def test_trailers_and_extensions_without_end_are_not_kept(end: bytes, target: Target) -> None:
    headers = target.signed("client", "POST", "/v1/watch", b"{}")
    lines = [b"POST /v1/watch HTTP/1.1", b"host: a", b"transfer-encoding: chunked"]
    lines += [name + b": " + value for name, value in headers]
    with socket.create_connection(("127.0.0.1", target.serving.port), SECONDS) as link:
        link.sendall(b"\r\n".join(lines) + b"\r\n\r\n" + end)
        assert taken(link, b"a: b\r\n" * 1000) < 16 << 20


def test_a_body_that_comes_byte_by_byte_is_given_up(target: Target) -> None:
    body = b'{"token": "' + b"t" * 5000 + b'"}'
    with socket.create_connection(("127.0.0.1", target.serving.port), SECONDS) as link:
        head = f"POST /v1/enrol HTTP/1.1\r\nhost: a\r\ncontent-length: {len(body)}\r\n\r\n"
        link.sendall(head.encode())
        until = time.monotonic() + SECONDS
        gone = False
        for each in body:
            try:
                link.sendall(bytes([each]))
            except ConnectionError:
                gone = True
                break
            assert time.monotonic() < until
            time.sleep(0.02)
    assert gone


@pytest.mark.parametrize("size", [(16 << 10) + 1, 1 << 20])
@pytest.mark.parametrize("chunked", [False, True])
def test_a_stranger_may_not_send_a_long_body(size: int, chunked: bool, target: Target) -> None:
    headers = [(b"transfer-encoding", b"chunked")] if chunked else []
    body = b"a" * size
    if chunked:
        body = b"%x\r\n" % size + body + b"\r\n0\r\n\r\n"
    request = Request("POST", b"/v1/enrol", headers, body, "nobody")
    status, _, _ = target.send(request, SECONDS)
    assert status == 413


def test_so_many_requests_are_under_way_and_no_more() -> None:
    counted = ConcurrencyLimits()
    under_way: list[Any] = []
    for who, most in (("stranger", MOST_OF_ADDRESS), (3, MOST_OF_CLIENT)):

        def begin(who: Any = who) -> Any:
            one = counted.of_client(who) if who == 3 else counted.of_stranger(who)
            one.__enter__()
            return one

        under_way += [begin() for _ in range(most)]
        with pytest.raises(RequestRefused, match="under way"):
            begin()
        # Others are not held up by it, and neither is who comes again later.
        with counted.of_client(4), counted.of_stranger("another"):
            pass
        under_way.pop().__exit__(None, None, None)
        begin()
