"""Page that a listener serves: requests in, answers out, independent of sockets.

A listener of any kind calls `Page.answer` for each request. An answer is bytes, or a stream of
server-sent events, which the listener polls for due bytes until the stream is over. These calls
wait for nothing except the disk.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Protocol

PACE = 0.25
"""Seconds between two polls of a stream."""

MOST_BODY = 4096
"""Maximum bytes of a request's body: a form with a token."""


class EventStream(Protocol):
    """Server-sent events for a single reader."""

    def due(self) -> bytes:
        """Return the bytes to send now, possibly empty."""

    @property
    def over(self) -> bool:
        """Whether the stream has ended."""

    def close(self) -> None:
        """Close the stream, because the reader is gone."""


@dataclass(frozen=True)
class PageResponse:
    """Answer to a request. stream: events that follow instead of the body."""

    status: int
    headers: Mapping[str, str] = field(default_factory=dict)
    body: bytes = b""
    stream: EventStream | None = None


class Page(Protocol):
    """Page of a run, available until `close`."""

    def answer(
        self, method: str, path: str, headers: Mapping[str, str], body: bytes
    ) -> PageResponse:
        """Return the answer to a request.

        path: with the query, as sent. headers: names in lower case. body: at most `MOST_BODY`
        bytes.
        """

    def close(self) -> None:
        """Send the final state to the streams and end them."""
