"""Whatever a stranger sends to the status listener or to `dure watch` is answered by a 4xx.

Requests are drawn by hypothesis and sent as bytes: forms, hosts, cookies, encodings, paths.
"""

from __future__ import annotations

import logging
import socket
import sys
from collections.abc import Iterator
from contextlib import closing, suppress
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

pytest.importorskip("plotly")

from dure.report.live import listener as loopback
from dure.report.live.listener import Listener
from dure.report.live.page import LivePage
from dure.worlds.network.clock import Clock
from dure.worlds.network.journal import Journal
from dure.worlds.network.server.access import Access
from dure.worlds.network.server.desk import Desk
from dure.worlds.network.server.register import Register
from dure.worlds.network.server.serving import Serving
from dure.worlds.network.server.status import Status, kept_token
from dure.worlds.network.server.watching import Watching

sys.path.insert(0, str(Path(__file__).parents[1] / "worlds" / "network"))
from fuzzed import answer_of

SECONDS = 10.0


@pytest.fixture(scope="module")
def ports(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    """Of the two listeners; mistakes: how many the server has counted."""
    folder = tmp_path_factory.mktemp("status")
    clock = Clock()
    with Register(folder / "clients.db", 2) as register, closing(Journal(folder, clock)) as journal:
        watching = Watching()
        status = Status(
            about={},
            watching=watching,
            desk=Desk(clock.now),
            access=Access(register, "open"),
            journal=journal,
            clock=clock,
            differs=lambda seat: [],
            token=kept_token(folder),
            page=LivePage([folder], kept_token(folder), "It is there."),
        )
        serving = Serving(status.asgi(), "127.0.0.1", 0, None)
        watch = Listener(LivePage([folder], "CODE", "It is there."))
        try:
            yield SimpleNamespace(status=serving.port, watch=watch.port, watching=watching)
        finally:
            watch.close()
            serving.stop()


def status_of(port: int, sent: bytes, method: str, seconds: float = SECONDS) -> int:
    """The status of the answer; 0 where the listener only hangs up, or waits for more."""
    with socket.create_connection(("127.0.0.1", port), seconds) as link:
        with suppress(ConnectionError):
            link.sendall(sent)
        with suppress(ConnectionError, TimeoutError):
            return answer_of(link, method)[0]
    return 0


BYTES = st.binary(max_size=40).map(lambda raw: raw.translate(None, b"\r\n\0"))
ODD = st.sampled_from(
    [
        b"",
        b"[",
        b"[::1",
        b"127.0.0.1:x",
        b"evil.example",
        b"a, b",
        b"\xff\xfe",
        "é".encode(),
        b"%00",
        b"a" * 3000,
        b"dure=\xe9; ; =; a=b=c",
        b"Bearer \xe9",
        b"bearer",
        b"Basic x",
        b"gzip;q=x, \xff",
        b"\xc2\xb2",
        b"-1",
        b"99999999999999999999",
        b"chunked",
        b"0-5",
    ]
)
NAMES = st.sampled_from(
    [
        b"host",
        b"cookie",
        b"authorization",
        b"content-type",
        b"content-length",
        b"transfer-encoding",
        b"accept-encoding",
        b"if-none-match",
        b"last-event-id",
        b"range",
        b"origin",
        b"expect",
        b"upgrade",
        b"connection",
        b"x",
    ]
)
FORMS = st.one_of(
    st.sampled_from(
        [
            b"token=a&b=1&c=1&d=1&e=1",
            b"&" * 200,
            b"token=%ff%fe",
            b"token=\xff",
            b"token",
            b"=",
            b"token=a;token=b",
            b"%",
            b"token=" + b"9" * 5000,
        ]
    ),
    BYTES,
)
PATHS = st.one_of(
    st.sampled_from(
        [
            b"/",
            b"/status",
            b"/metrics",
            b"/here",
            b"/events?since=x",
            b"/events?" + b"a&" * 500,
            b"/plotly.js",
            b"/%ff%fe",
            b"//",
            b"/../status",
            b"http://[/",
            b"*",
            b"/?%",
            b"/status/",
            b"/HEALTH",
        ]
    ),
    BYTES.map(lambda raw: b"/" + raw.replace(b" ", b"+")),
)
METHODS = st.sampled_from(["GET", "POST", "HEAD", "PUT", "OPTIONS", "DELETE", "BREW"])


@pytest.mark.parametrize("which", ["status", "watch"])
@settings(max_examples=150)
@given(
    method=METHODS,
    path=PATHS,
    headers=st.lists(st.tuples(NAMES, ODD | BYTES), max_size=4),
    body=FORMS,
    says_length=st.booleans(),
)
def test_every_request_of_a_stranger_is_answered_by_a_4xx(
    which: str,
    method: str,
    path: bytes,
    headers: list[tuple[bytes, bytes]],
    body: bytes,
    says_length: bool,
    ports: Any,
) -> None:
    lines = [method.encode() + b" " + path + b" HTTP/1.1"]
    if not any(name == b"host" for name, _ in headers):
        lines.append(b"host: 127.0.0.1")
    lines += [name + b": " + value for name, value in headers]
    if says_length:
        lines.append(b"content-length: %d" % len(body))
    logging.getLogger("dure.server").handlers.clear()
    waits = {b"content-length", b"transfer-encoding", b"expect", b"upgrade"}
    whole = waits.isdisjoint(name for name, _ in headers)
    sent = b"\r\n".join(lines) + b"\r\n\r\n" + body
    answered = status_of(getattr(ports, which), sent, method, SECONDS if whole else 0.2)
    # What is cut off in the middle of a body is answered by nothing.
    assert answered == 0 or 400 <= answered < 500 or answered in (501, 505), answered
    if which == "status":
        assert answered not in (501, 505)
        assert ports.watching.mistakes._value.get() == 0


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
