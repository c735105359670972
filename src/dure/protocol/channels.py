"""Channels between a server and clients that stay connected: ordered frames in both directions.

A frame is bytes; the system that trains defines the content. A client that disconnected may
reconnect as the same client; frames in flight at the disconnection are lost.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple, Protocol

from dure.wire.requests import TaskDescription

if TYPE_CHECKING:
    from dure.wire.signatures import Key


class ClientConnected(NamedTuple):
    """Event: a client has connected. hello: its first frame."""

    client: int
    hello: bytes


class ClientFrame(NamedTuple):
    """Event: a client has sent a frame."""

    client: int
    frame: bytes


class ClientDisconnected(NamedTuple):
    """Event: the channel of a client has ended."""

    client: int
    why: str


Event = ClientConnected | ClientFrame | ClientDisconnected


class HostedRun(NamedTuple):
    """Facts about a run that a network needs to admit its clients.

    clients: number of client numbers. trains: what a site has to train, or None if not compared.
    threads: number of threads with which a client computes.
    """

    clients: int
    seed: int
    trains: TaskDescription | None
    threads: int = 1


class Channels(Protocol):
    """Server side of the channels, to clients by number.

    run: name of the run. folder: folder of the server. key: the server's signing key.
    answer_timeout: timeout in seconds for a client that is silent while the server waits for its
    frame, or is disconnected.
    """

    run: str
    folder: Path
    key: Key
    answer_timeout: float

    def next(self, seconds: float) -> Event | None:
        """Return the next event, or None after `seconds` without an event. Raises ServeError."""

    def allow(self, most: int) -> None:
        """Set the maximum bytes of a client's frame.

        Before the first call only small frames are accepted.
        """

    def say(self, client: int, frame: Sequence[bytes | bytearray | memoryview]) -> None:
        """Send a frame, in pieces. A frame to a disconnected client is discarded."""

    def identity(self, client: int) -> tuple[str, str]:
        """Return (public key, name) of a client that has connected."""

    def reject(self, client: int, reason: str) -> None:
        """End the channel of a client and send the reason."""

    def over(self, reason: str) -> None:
        """End the run: clients need not reconnect."""
