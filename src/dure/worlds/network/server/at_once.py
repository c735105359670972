"""How many requests of one client, or of strangers, may be under way at the same time.

What a request holds in memory is bounded by its route (`calls.MOST_OF`); what all of them hold
is that times these numbers. A request too many is answered by 429, and counted against nobody: a
client that has lost its link cannot know that its former requests still wait.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TypeVar

from dure.worlds.network.server.access import Refused

MOST_OF_CLIENT = 32
"""Requests of one client. It trains with two or three; several processes may share a key."""

MOST_OF_ADDRESS = 64
"""Requests of strangers from one address, such as enrolments."""

MOST_OF_STRANGERS = 128
"""Requests of strangers altogether."""


class AtOnce:
    """Counts the requests under way. For the event loop alone."""

    def __init__(self) -> None:
        self._clients: Counter[int] = Counter()
        self._addresses: Counter[str] = Counter()

    @contextmanager
    def of_client(self, client: int) -> Iterator[None]:
        """A request of a client is under way. Raises Refused if there are too many."""
        with _counted(self._clients, client, MOST_OF_CLIENT):
            yield

    @contextmanager
    def of_stranger(self, address: str) -> Iterator[None]:
        """A request of nobody that is known is under way. Raises Refused if there are too many."""
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


def _too_many() -> Refused:
    return Refused(429, "too many", "too many requests are under way", {"retry-after": "1"})
