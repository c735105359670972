"""Whatever a stranger sends to the status listener or to `dure watch` is answered by a 4xx.

Requests are drawn by hypothesis and sent as bytes: forms, hosts, cookies, encodings, paths.
"""

from __future__ import annotations

import socket
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings

pytest.importorskip("plotly")

from dure.report.live import listener as loopback

sys.path.insert(0, str(Path(__file__).parent))
from listeners import SECONDS, Odd, odd_requests, status_of, status_served


@pytest.fixture(scope="module")
def ports(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    with status_served(tmp_path_factory.mktemp("status")) as served:
        yield served


@pytest.mark.parametrize("which", ["status", "watch"])
@settings(max_examples=100)
@given(odd=odd_requests())
def test_every_request_of_a_stranger_is_answered_by_a_4xx(which: str, odd: Odd, ports: Any) -> None:
    port = getattr(ports, which)
    answered = status_of(port, odd.sent, odd.method, SECONDS if odd.whole else 0.2)
    # What is cut off in the middle of a body is answered by nothing.
    assert answered == 0 or 400 <= answered < 500 or answered in (501, 505), answered
    if which == "status":
        assert answered not in (501, 505)
        assert ports.server_metrics.mistakes._value.get() == 0


@pytest.mark.parametrize(
    "sent",
    [
        b"POST / HTTP/1.1\r\nhost: 127.0.0.1\r\ncontent-length: 23\r\n\r\ntoken=a&b=1&c=1&d=1&e=1",
        b"GET / HTTP/1.1\r\nhost: [\r\n\r\n",
        b"GET /here HTTP/1.1\r\nhost: [\r\n\r\n",
        b"GET /status HTTP/1.1\r\nhost: [\r\n\r\n",
        b"GET / HTTP/1.1\r\nhost: 127.0.0.1\r\na: " + b"a" * 300_000 + b"\r\n\r\n",
        b"no request\r\n\r\n",
    ],
)
@pytest.mark.parametrize("which", ["status", "watch"])
def test_these_have_an_answer(sent: bytes, which: str, ports: Any) -> None:
    answered = status_of(getattr(ports, which), sent, "GET")
    # Some are hung up on before they have said all of it, and HTTP/0.9 has no status.
    hung_up = len(sent) > 100_000 or (which == "watch" and sent.startswith(b"no"))
    assert 400 <= answered < 500 or (answered == 0 and hung_up)


def test_a_length_with_leading_zeros_is_no_way_around_the_bound(ports: Any) -> None:
    length = b"00000000" + b"1" + b"9" * 10
    request = b"POST / HTTP/1.1\r\nhost: 127.0.0.1\r\ncontent-length: %b\r\n\r\n" % length
    # Without an answer the listener has begun to keep a body of 20 GB.
    assert status_of(ports.watch, request, "POST") == 413


def test_connections_without_a_request_are_bounded(
    ports: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(loopback, "MOST_CONNECTIONS", 8)
    links = [socket.create_connection(("127.0.0.1", ports.watch), SECONDS) for _ in range(8)]
    try:
        request = b"GET / HTTP/1.1\r\nhost: 127.0.0.1\r\n\r\n"
        assert status_of(ports.watch, request, "GET") == 0
    finally:
        for link in links:
            link.close()
    while status_of(ports.watch, request, "GET") != 401:
        pass
