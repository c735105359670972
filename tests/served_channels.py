"""A server of channels on loopback, for tests, and clients that have a place there."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from dure.deploy.client.channel import Channel
from dure.deploy.server.access import AccessControl
from dure.deploy.server.channels import NetworkChannels
from dure.deploy.server.register import FILE, Register
from dure.deploy.server.server_metrics import ServerMetrics
from dure.deploy.server.serving import HttpServer
from dure.deploy.server.sessions import ServedRun
from dure.wire.requests import Machine, TaskDescription
from dure.wire.signatures import Key, Signer

PLACES = 2
SECONDS = 60.0


@contextmanager
def served_channels(folder: Path) -> Iterator[Any]:
    """(channels, url, access)"""
    about = ServedRun(
        run="run",
        clients=PLACES,
        strategy={"name": "split"},
        seed=0,
        trains=TaskDescription({}),
        machine=Machine("2", "none", "loop", 1),
        heartbeat=5.0,
        patience=1.0,
        compare=lambda theirs, ours: [],
        samples=lambda examples: 0,
    )
    with Register(folder / FILE, PLACES) as register:
        access = AccessControl(register, "open")
        key = Key.make()
        channels = NetworkChannels(about, access, ServerMetrics(), folder, key, 600.0, lambda: None)
        serving = HttpServer(
            channels.asgi(), "127.0.0.1", 0, None, channels.lives_in, heartbeat=5.0
        )
        try:
            url = f"http://127.0.0.1:{serving.port}"
            yield SimpleNamespace(channels=channels, url=url, access=access, port=serving.port)
        finally:
            serving.stop()


def client(served: Any) -> Signer:
    """A client that has a place."""
    key = Key.make()
    served.access.register.enrol(key.public, "", None, None)
    return Signer(key)


def opened(served: Any, signer: Signer) -> Channel:
    return Channel(served.url, None, signer, threading.Event(), heartbeat=5.0)


def events(served: Any, count: int) -> list[Any]:
    found: list[Any] = []
    until = time.monotonic() + SECONDS
    while len(found) < count and time.monotonic() < until:
        event = served.channels.next(0.05)
        if event is not None:
            found.append(event)
    return found
