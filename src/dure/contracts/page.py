"""A page that a listener shows: requests in, answers out, and no word of sockets.

A listener of any kind asks `Page.answer` for each request. An answer is bytes, or a stream of
server-sent events, of which the listener asks for what is due, until it is over. None of these
calls waits for anything but the disk.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Protocol

PACE = 0.25
"""Seconds after which a listener asks a stream again."""

MOST_BODY = 4096
"""Bytes of a request's body: a form with a token."""


class Stream(Protocol):
    """Server-sent events of one reader."""

    def due(self) -> bytes:
        """What is to be sent now; empty for nothing."""

    @property
    def over(self) -> bool:
        """Whether nothing comes any more."""

    def close(self) -> None:
        """Nobody reads any more."""


@dataclass(frozen=True)
class Answer:
    """An answer to a request. stream: what follows in place of the body."""

    status: int
    headers: Mapping[str, str] = field(default_factory=dict)
    body: bytes = b""
    stream: Stream | None = None


class Page(Protocol):
    """What is shown, until `close`."""

    def answer(self, method: str, path: str, headers: Mapping[str, str], body: bytes) -> Answer:
        """path: with its query, as it was sent. headers: names in lower case. body: at most
        `MOST_BODY` bytes."""

    def close(self) -> None:
        """Streams tell how things are by now, and end."""
