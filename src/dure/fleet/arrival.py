"""Data over time: the examples that a client has at a virtual time.

A client's examples are assumed to be in the order of their creation; k of its n examples are
available at time t:

    still                    all of them, always                             k = n
    arriving:SHARE:SECONDS   the first k; more and more, all after SECONDS   k from SHARE·n to n
    leaving:SHARE:SECONDS    the last k: the oldest are forgotten            k from n to SHARE·n
    window:SHARE:SECONDS     k in a row from n·t/SECONDS on, in a circle     k = SHARE·n

k is rounded to the nearest whole number, and never 0: a client without any example is an
unavailable client, which `dure.fleet.availability` simulates. Cost O(k) per query, for the queried
client only.

Sources: arriving data as in Y. Chen et al., "Asynchronous Online Federated Learning for Edge
Devices with Non-IID Data", IEEE Big Data 2020; a window as in O. Marfoq et al., "Federated Learning
for Data Streams", AISTATS 2023 (clients whose memory is small).
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import ClassVar

import torch
from torch import Tensor

from dure.arguments import NamedSettings, above, between
from dure.settings import listed, read, write


@dataclass(frozen=True)
class Arrival(NamedSettings):
    """Base class of arrival settings, with a name, a text form, and `present`.

    is_static: whether all data are always available, so that no query is needed.
    """

    is_static: ClassVar[bool] = False

    def present(self, n: int, now: float) -> Tensor:
        """Return the positions of the examples that a client has at time `now` (seconds, >= 0).

        Positions in 0..n-1, ascending, int64 of shape (k,) with 1 <= k <= n:
        `indices[arrival.present(n, now)]`.
        """
        raise NotImplementedError

    def __str__(self) -> str:
        """Return the text that `parse_arrival` reads."""
        return write(self)


@dataclass(frozen=True)
class StaticData(Arrival):
    """All data of every client, all the time."""

    name: ClassVar[str] = "still"
    is_static: ClassVar[bool] = True

    def present(self, n: int, now: float) -> Tensor:
        return torch.arange(n)


@dataclass(frozen=True)
class GradualArrival(Arrival):
    """Data that arrive evenly. share: available at the start. seconds: until all are available."""

    name: ClassVar[str] = "arriving"
    share: float = field(default=0.1, metadata=between(0, 1))
    seconds: float = field(default=86_400.0, metadata=above(0, finite=True))

    def present(self, n: int, now: float) -> Tensor:
        return torch.arange(_count(n, self.share + (1 - self.share) * min(now / self.seconds, 1)))


@dataclass(frozen=True)
class GradualForgetting(Arrival):
    """Data that are forgotten evenly, the oldest first.

    share: remaining in the end. seconds: until only the share is left.
    """

    name: ClassVar[str] = "leaving"
    share: float = field(default=0.1, metadata=between(0, 1))
    seconds: float = field(default=86_400.0, metadata=above(0, finite=True))

    def present(self, n: int, now: float) -> Tensor:
        return torch.arange(n - _count(n, 1 - (1 - self.share) * min(now / self.seconds, 1)), n)


@dataclass(frozen=True)
class MovingWindow(Arrival):
    """A window that moves over the data in a circle.

    share: of the data in the window. seconds: for a full circle.
    """

    name: ClassVar[str] = "window"
    share: float = field(default=0.1, metadata=between(0, 1))
    seconds: float = field(default=86_400.0, metadata=above(0, finite=True))

    def present(self, n: int, now: float) -> Tensor:
        start = int(n * (math.fmod(now, self.seconds) / self.seconds))
        count = _count(n, self.share)
        # The part beyond the end wraps around to the beginning, and comes first: positions are
        # ascending.
        wrapped = max(start + count - n, 0)
        return torch.cat([torch.arange(wrapped), torch.arange(start, start + count - wrapped)])


ARRIVALS: dict[str, type[Arrival]] = listed(globals(), Arrival)
"""Built-in settings by the name with which their text form begins."""


def parse_arrival(text: str) -> Arrival:
    """Return the arrival that `text` names: "still", "arriving:0.1:3600", ...

    Raises ValueError for any other text.
    """
    return read(text, ARRIVALS, "arrival", Arrival)


def _count(n: int, share: float) -> int:
    # Never 0: every job has examples, and a mean has weights.
    return max(round(n * share), 1)
