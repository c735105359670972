"""What lies between a server and clients that keep a channel open: frames, both ways, in order.

A frame is bytes; what they mean is the affair of the system that trains. A client that is gone may
come again, and is the same client then, of whom nothing is on its way any more.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple, Protocol

from dure.wire.requests import Trains

if TYPE_CHECKING:
    from dure.wire.signatures import Key


class Came(NamedTuple):
    """A client is there. hello: its first frame."""

    client: int
    hello: bytes


class Said(NamedTuple):
    """A client has sent a frame."""

    client: int
    frame: bytes


class Gone(NamedTuple):
    """The channel of a client has ended."""

    client: int
    why: str


Event = Came | Said | Gone


class Hosted(NamedTuple):
    """What a network has to know of a run to let its clients in.

    clients: how many numbers there are. trains: what a site has to train; None: it is not compared.
    threads: with how many a client is to compute.
    """

    clients: int
    seed: int
    trains: Trains | None
    threads: int = 1


class Channels(Protocol):
    """Of a server, to its clients by their numbers.

    run: what the run is called. folder: what the server keeps. key: by which it signs. lasts:
    seconds that a client may be silent when something is awaited of it, or be gone.
    """

    run: str
    folder: Path
    key: Key
    lasts: float

    def next(self, seconds: float) -> Event | None:
        """What happens next; None if nothing does for so long. Raises ServeError."""

    def allow(self, most: int) -> None:
        """Bytes that a frame of a client may have from now on; until then only a small one."""

    def say(self, client: int, frame: Sequence[bytes | bytearray | memoryview]) -> None:
        """Sends a frame, in pieces. To a client that is gone it says nothing."""

    def identity(self, client: int) -> tuple[str, str]:
        """The public key of a client that has come, and its name."""

    def turn_away(self, client: int, reason: str) -> None:
        """Ends the channel of a client, and tells it why."""

    def over(self, reason: str) -> None:
        """The run is over: clients need not come again."""
