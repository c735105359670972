"""All listeners of dure, for a time, under what nobody should send: a few seconds each here.

As a proof (`tests/proofs.py`) they run for twenty minutes together. What is sent follows from a
seed, which is printed where a test fails; `DURE_FUZZ_SEED` repeats it.
"""

from __future__ import annotations

import logging
import os
import secrets
import socket
import struct
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, Phase, given, seed, settings
from hypothesis import strategies as st

from dure.parameter_server.messages import Pull
from dure.parameter_server.processes.handshake import call
from dure.wire.signatures import Key, Signer, digest_of

sys.path.insert(0, str(Path(__file__).parent))
sys.path.insert(0, str(Path(__file__).parents[1] / "worlds" / "network"))
sys.path.insert(0, str(Path(__file__).parents[1] / "parameter_server"))
from fuzzed import PLACES, Plan, Target, plans
from fuzzed import sent as sent_plan
from listeners import GARBAGE, Odd, channels_served, odd_requests, status_of, status_served
from test_port import TOKEN, soon, two

Try = Callable[[Any], None]

SHORT = 2.5
"""Seconds for each listener, in every run of the tests."""
LONG = 300.0
"""Seconds for each, as a proof."""


@contextmanager
def federation(folder: Path) -> Iterator[tuple[st.SearchStrategy[Any], Try]]:
    with Target(folder) as target:

        def attempt(plan: Plan) -> None:
            target.assign()
            before = target.state()
            status = sent_plan(target, plan)
            assert status < 500
            if status >= 400 or status == 0:
                assert target.state() == before
            assert max(target.sizes()["sessions"], target.sizes()["reserved"]) <= PLACES

        yield plans(), attempt


@contextmanager
def status(folder: Path) -> Iterator[tuple[st.SearchStrategy[Any], Try]]:
    with status_served(folder) as ports:

        def attempt(odd: Odd) -> None:
            seconds = 20.0 if odd.whole else 0.1
            for port in (ports.status, ports.watch):
                answered = status_of(port, odd.sent, odd.method, seconds)
                assert answered == 0 or 400 <= answered < 500 or answered in (501, 505)
            assert ports.server_metrics.mistakes._value.get() == 0

        yield odd_requests(), attempt


FRAMES = st.builds(
    lambda first, length, mask, content: (
        bytes([first, mask | length])
        + struct.pack("!Q", 1 << 33)[: {126: 2, 127: 8}.get(length, 0)]
        + (b"\0\0\0\0" if mask else b"")
        + content
    ),
    st.integers(0, 255) | st.just(0x82),
    st.sampled_from([0, 1, 5, 30, 125, 126, 127]),
    st.sampled_from([0x80, 0x80, 0]),
    st.binary(max_size=64),
)


@contextmanager
def websockets(folder: Path) -> Iterator[tuple[st.SearchStrategy[Any], Try]]:
    with channels_served(folder) as served:
        key = Key.make()
        served.access.register.enrol(key.public, "", None, None)
        signer = Signer(key)

        def opened(signs: bool) -> tuple[int, socket.socket]:
            link = socket.create_connection(("127.0.0.1", served.port), 20.0)
            lines = {
                "host": "x",
                "upgrade": "websocket",
                "connection": "Upgrade",
                "sec-websocket-key": "dGhlIHNhbXBsZSBub25jZQ==",
                "sec-websocket-version": "13",
            }
            signed = signer.sign("GET", "/v1/channel", digest_of()) if signs else {}
            text = "".join(f"{name}: {value}\r\n" for name, value in {**lines, **signed}.items())
            link.sendall(f"GET /v1/channel HTTP/1.1\r\n{text}\r\n".encode())
            head = b""
            while b"\r\n\r\n" not in head and (piece := link.recv(4096)):
                head += piece
            answered = int(head.split()[1])
            fresh = dict(
                line.decode().lower().split(": ", 1)
                for line in head.split(b"\r\n")[1:]
                if b": " in line
            )
            if signs and answered == 401 and signer.again(signed, answered, fresh):
                link.close()
                return opened(signs)
            return answered, link

        def attempt(said: tuple[bool, list[bytes]]) -> None:
            signs, frames = said
            answered, link = opened(signs)
            with link, suppress(ConnectionError):
                assert answered == (101 if signs else 401) or answered == 429
                for frame in frames:
                    link.sendall(frame)
            # Whatever came, the next one is heard.
            answered, link = opened(True)
            link.close()
            assert answered == 101
            while served.channels.next(0.0) is not None:
                pass

        yield st.tuples(st.booleans(), st.lists(FRAMES, max_size=6)), attempt


@contextmanager
def parameter_server(folder: Path) -> Iterator[tuple[st.SearchStrategy[Any], Try]]:
    with two() as (listening, worker):

        def attempt(said: tuple[bool, list[bytes]]) -> None:
            knows, pieces = said
            address = listening.port.address
            with suppress(ConnectionError):
                if knows:
                    link = call(address, "worker 0 heart", "server 0", TOKEN, 20.0)
                else:
                    link = socket.create_connection(address, 20.0)
                with link:
                    for piece in pieces:
                        link.sendall(piece)
            listening.heard.clear()
            worker.say("server 0", Pull(0, 0, 0, 0, 7, 0, 5))
            worker.flush()
            soon(lambda: any(isinstance(one, Pull) for _, one in list(listening.heard)))
            assert set(listening.port._lines) <= {"worker 0", "worker 0 heart"}

        yield st.tuples(st.booleans(), st.lists(GARBAGE, max_size=4)), attempt


LISTENERS = [federation, status, websockets, parameter_server]


def fuzz(listener: Any, folder: Path, seconds: float, logged: pytest.LogCaptureFixture) -> None:
    """Sends what is drawn, for so many seconds. Nothing of it may be a mistake of the server's."""
    begun = int(os.environ.get("DURE_FUZZ_SEED", secrets.randbits(32)))
    until = time.monotonic() + seconds
    number = begun
    with listener(folder) as (drawn, attempt):
        while time.monotonic() < until:
            print(f"DURE_FUZZ_SEED={number}")

            @seed(number)
            @settings(
                max_examples=20,
                database=None,
                deadline=None,
                phases=[Phase.generate],
                suppress_health_check=list(HealthCheck),
            )
            @given(drawn)
            def all_of_them(one: Any) -> None:
                if time.monotonic() < until:
                    attempt(one)

            all_of_them()
            number += 1
    mistakes = [record for record in logged.records if record.levelno >= logging.ERROR]
    assert not mistakes


@pytest.mark.parametrize("listener", LISTENERS, ids=lambda one: str(one.__name__))
def test_nothing_that_is_sent_for_some_seconds_is_a_mistake_of_the_server(
    listener: Any, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    if listener is status:
        pytest.importorskip("plotly")
    fuzz(listener, tmp_path, SHORT, caplog)


@pytest.mark.parametrize("listener", LISTENERS, ids=lambda one: str(one.__name__))
def test_nothing_that_is_sent_for_minutes_is_a_mistake_of_the_server(
    listener: Any, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    if listener is status:
        pytest.importorskip("plotly")
    fuzz(listener, tmp_path, LONG, caplog)
