"""Limits on concurrent requests of a client, or of unknown senders.

The route bounds the memory of a request (`client_requests.MOST_OF`); the memory of all requests is
bounded by that number times these limits. A request beyond a limit gets 429, and counts against
nobody: a client with a broken connection cannot know that its earlier requests still wait.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TypeVar

from dure.deploy.server.access import RequestRefused

MOST_OF_CLIENT = 32
"""Maximum concurrent requests of a client.

A client that trains needs two or three; several processes may share a key.
"""

MOST_OF_ADDRESS = 64
"""Maximum concurrent requests of unknown senders from an address, such as enrolments."""

MOST_OF_STRANGERS = 128
"""Maximum concurrent requests of all unknown senders."""


class ConcurrencyLimits:
    """Counter of concurrent requests, for use in the event loop only."""

    def __init__(self) -> None:
        self._clients: Counter[int] = Counter()
        self._addresses: Counter[str] = Counter()

    @contextmanager
    def of_client(self, client: int) -> Iterator[None]:
        """Context manager: count a request of a client. Raises Refused above the limit."""
        with _counted(self._clients, client, MOST_OF_CLIENT):
            yield

    @contextmanager
    def of_stranger(self, address: str) -> Iterator[None]:
        """Context manager: count a request of an unknown sender. Raises Refused above the limit."""
        if self._addresses.total() >= MOST_OF_STRANGERS:
            raise _too_many()
        with _counted(self._addresses, address, MOST_OF_ADDRESS):
            yield


Who = TypeVar("Who", int, str)


@contextmanager
def _counted(under_way: Counter[Who], who: Who, most: int) -> Iterator[None]:
    if under_way[who] >= most:
        raise _too_many()
    under_way[who] += 1
    try:
        yield
    finally:
        under_way[who] -= 1
        if not under_way[who]:
            del under_way[who]


def _too_many() -> RequestRefused:
    return RequestRefused(429, "too many", "too many requests are under way", {"retry-after": "1"})
