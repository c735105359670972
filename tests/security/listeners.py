"""Listeners of dure on loopback, for those who attack them, and what strangers send to them."""

from __future__ import annotations

import socket
import sys
from collections.abc import Iterator
from contextlib import closing, contextmanager, suppress
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

from hypothesis import strategies as st

from dure.deploy.clock import FederationClock
from dure.deploy.journal import Journal
from dure.deploy.server.access import AccessControl
from dure.deploy.server.channels import NetworkChannels
from dure.deploy.server.outbox import ClientOutbox
from dure.deploy.server.register import FILE, Register
from dure.deploy.server.server_metrics import ServerMetrics
from dure.deploy.server.serving import HttpServer
from dure.deploy.server.sessions import ServedRun
from dure.deploy.server.status import Status, load_or_create_token
from dure.parameter_server.processes.frames import HEAD, MOST_HEADER
from dure.wire.requests import Machine, TaskDescription
from dure.wire.signatures import Key

sys.path.insert(0, str(Path(__file__).parents[1] / "worlds" / "network"))
from fuzzed import answer_of

SECONDS = 20.0


@contextmanager
def channels_served(folder: Path) -> Iterator[Any]:
    """A server of split learning: port, access, channels."""
    about = ServedRun(
        run="run",
        clients=2,
        strategy={"name": "split"},
        seed=0,
        trains=TaskDescription({}),
        machine=Machine("2", "none", "loop", 1),
        heartbeat=5.0,
        patience=1.0,
        compare=lambda theirs, ours: [],
        samples=lambda examples: 0,
    )
    with Register(folder / FILE, 2) as register:
        access = AccessControl(register, "open")
        served = NetworkChannels(
            about, access, ServerMetrics(), folder, Key.make(), 600.0, lambda: None
        )
        listens = HttpServer(served.asgi(), "127.0.0.1", 0, None, served.lives_in, heartbeat=5.0)
        try:
            yield SimpleNamespace(port=listens.port, access=access, channels=served)
        finally:
            listens.stop()


@contextmanager
def status_served(folder: Path) -> Iterator[Any]:
    """The ports of a status listener and of `dure watch`, and what the former has counted."""
    from dure.report.live.listener import Listener
    from dure.report.live.page import LivePage

    clock = FederationClock()
    with Register(folder / FILE, 2) as register, closing(Journal(folder, clock)) as journal:
        server_metrics = ServerMetrics()
        status = Status(
            about={},
            server_metrics=server_metrics,
            outbox=ClientOutbox(clock.now),
            access=AccessControl(register, "open"),
            journal=journal,
            clock=clock,
            differs=lambda session: [],
            token=load_or_create_token(folder),
            page=LivePage([folder], load_or_create_token(folder), "It is there."),
        )
        serving = HttpServer(status.asgi(), "127.0.0.1", 0, None)
        watch = Listener(LivePage([folder], "CODE", "It is there."))
        try:
            yield SimpleNamespace(
                status=serving.port, watch=watch.port, server_metrics=server_metrics
            )
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


GARBAGE = st.one_of(
    st.binary(max_size=300),
    st.binary(max_size=30).map(lambda some: HEAD.pack(MOST_HEADER, 900 << 20) + some),
    st.binary(max_size=30).map(lambda some: b"\x08\x00server 0" + some),
    st.just(b"\xff\xff"),
)
"""What strangers say to the port of a parameter server."""

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


class Odd(NamedTuple):
    """A request of a stranger. whole: nothing more is awaited after it."""

    method: str
    sent: bytes
    whole: bool


_WAITS = {b"content-length", b"transfer-encoding", b"expect", b"upgrade"}


@st.composite
def odd_requests(draw: st.DrawFn) -> Odd:
    """A request with an odd method, path, headers and form."""
    method = draw(METHODS)
    headers = draw(st.lists(st.tuples(NAMES, ODD | BYTES), max_size=4))
    body = draw(FORMS)
    lines = [method.encode() + b" " + draw(PATHS) + b" HTTP/1.1"]
    if not any(name == b"host" for name, _ in headers):
        lines.append(b"host: 127.0.0.1")
    lines += [name + b": " + value for name, value in headers]
    if draw(st.booleans()):
        lines.append(b"content-length: %d" % len(body))
    whole = _WAITS.isdisjoint(name for name, _ in headers)
    return Odd(method, b"\r\n".join(lines) + b"\r\n\r\n" + body, whole)
