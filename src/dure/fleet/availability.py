"""Availability of clients: a phone that charges at night, a hospital that is always on.

A client is available in windows [start, end) of the virtual time, which begins at 0. Two queries
are answered for any time, in any order, without any computation for other clients:

    next(client, now)    first time t >= now at which it is available;  next(next(now)) = next(now)
    until(client, now)   end of the availability from next(now) on;     until(now) > next(now)

    always
    probability:P:PERIOD   available with probability P in each period of PERIOD s, independently
    daily:SHARE:DAY        a window per day, of this share of the day; each client at its own phase
    file:PATH:EVERY        CSV with client,start,end in seconds; repeats after EVERY > 0 seconds

Cost: `probability` takes about three hashes for `next` and six for `until`, whatever P is; `daily`
takes one hash.

The answers are times and not booleans, so that a simulation does not have to poll.

Source: K. Bonawitz et al., "Towards Federated Learning at Scale: System Design", MLSys 2019: four
times as many phones are available by night as by day.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import ClassVar

from dure.arguments import NamedSettings, above, at_least, between
from dure.errors import DataError
from dure.fleet.table import in_order, read_table
from dure.randomness.hashed_numbers import uniform
from dure.settings import listed, read, write

_DAY = 86_400.0

LEAST = 1e-12
"""Least distance of a probability from 0, and from 1 unless it is 1.

Closer than that, floats do not distinguish the periods.
"""


@dataclass(frozen=True)
class Availability(NamedSettings):
    """Base class of availability settings, with a name, a text form, `next` and `until`.

    always: whether every client is always available, so that no query is needed.
    """

    always: ClassVar[bool] = False

    def next(self, client: int, now: float, seed: int) -> float:
        """Return the first time at or after `now` (seconds, >= 0) at which `client` is available.

        inf if never.
        """
        raise NotImplementedError

    def until(self, client: int, now: float, seed: int) -> float:
        """Return the end of the availability of `client` that starts at `next(client, now, seed)`.

        inf if never.
        """
        raise NotImplementedError

    def __str__(self) -> str:
        """Return the text that `parse_availability` reads."""
        return write(self)


@dataclass(frozen=True)
class Always(Availability):
    """Availability of every client at all times."""

    name: ClassVar[str] = "always"
    always: ClassVar[bool] = True

    def next(self, client: int, now: float, seed: int) -> float:
        return now

    def until(self, client: int, now: float, seed: int) -> float:
        return math.inf


@dataclass(frozen=True)
class Probability(Availability):
    """Independent availability in each period, by a draw per period.

    p: the probability, above 0. period: in seconds. A client that is available in consecutive
    periods does not leave between them.
    """

    name: ClassVar[str] = "probability"
    p: float = field(default=0.5, metadata=between(0, 1, "(]"))
    period: float = field(default=3_600.0, metadata=above(0, finite=True))

    def __post_init__(self) -> None:
        super().__post_init__()
        if not LEAST <= self.p <= 1 - LEAST and self.p != 1:
            raise ValueError(
                f"probability: {self.p} is too close to {round(self.p)}, the smallest is {LEAST}"
            )

    def next(self, client: int, now: float, seed: int) -> float:
        return max(
            now, self._begin(self._first(True, client, _cycle(now, self._begin, self.period), seed))
        )

    def until(self, client: int, now: float, seed: int) -> float:
        # Always available: there is no first period of absence to search for.
        if self.p == 1:
            return math.inf
        # First the period in which it is available, then the first later period in which it is not.
        there = self._first(True, client, _cycle(now, self._begin, self.period), seed)
        return self._begin(self._first(False, client, there + 1, seed))

    def _begin(self, period: int) -> float:
        return period * self.period

    def _first(self, there: bool, client: int, period: int, seed: int) -> int:
        """Return the first period from `period` on in which the client is available, or is not."""
        # Only the rarer of the two events is drawn. A query for the rarer event returns the next
        # drawn period; a query for the other returns the first period outside of the consecutive
        # drawn periods.
        rare = min(self.p, 1 - self.p)
        if rare == 0:
            return period
        following = (found for found in self._rare(client, period, rare, seed) if found >= period)
        if there == (self.p <= 0.5):
            return next(following)
        while next(following) == period:
            period += 1
        return period

    def _rare(self, client: int, period: int, rare: float, seed: int) -> Iterator[int]:
        """Yield in order the periods of the rarer event, presence or absence.

        Some periods may be before `period`.

        The gaps between them are geometric. They are drawn block by block, about one per block, so
        that a query for a distant time, or with a small P, need not draw all earlier periods.
        """
        length = math.ceil(1 / rare)
        # Whole blocks: a block's draws are a function of its number alone.
        block = period // length
        while True:
            at = -1
            drawn = 0
            while True:
                # A geometric number by inversion: the number of periods before the next rare
                # period.
                gap = math.log(uniform(seed, "availability", client, block, drawn)) / math.log1p(
                    -rare
                )
                at = at + 1 + int(gap)
                drawn = drawn + 1
                if at >= length:
                    break
                yield block * length + at
            block += 1


@dataclass(frozen=True)
class Daily(Availability):
    """A daily window, at each client's own hour.

    share: of the day, above 0. day: in seconds.
    """

    name: ClassVar[str] = "daily"
    share: float = field(default=0.25, metadata=between(0, 1, "(]"))
    day: float = field(default=_DAY, metadata=above(0, finite=True))

    def next(self, client: int, now: float, seed: int) -> float:
        return now if self.share == 1 else max(now, self._window(client, now, seed)[0])

    def until(self, client: int, now: float, seed: int) -> float:
        if self.share == 1:
            return math.inf
        start, end = self._window(client, now, seed)
        # A gap may be shorter than the floating-point resolution.
        return max(end, math.nextafter(max(start, now), math.inf))

    def _window(self, client: int, now: float, seed: int) -> tuple[float, float]:
        """Return (start, end) of the first window that ends after `now`."""
        # Drawn once for each client: the same hour every day.
        phase = uniform(seed, "availability", client) * self.day

        def start(day: int) -> float:
            return phase + day * self.day

        day = _cycle(now, start, self.day)
        if start(day) + self.share * self.day <= now:
            day += 1
        return start(day), start(day) + self.share * self.day


@dataclass(frozen=True)
class AvailabilityFile(Availability):
    """Measured windows: a CSV file with the columns client,start,end, in seconds.

    A client may have many windows.

    every: period of repetition in seconds, such as 604800 for the trace of a week; 0: no
    repetition, and a client stays away after its last window. end may be inf without repetition.
    Client k has the windows of the file's client k, modulo their number: in order of first
    appearance, or, if all names are whole numbers, in numerical order.

    Raises DataError if the file cannot be read, or a line is not a client's name and 0 <= start <
    end (<= every).
    """

    name: ClassVar[str] = "file"
    path: str = ""
    every: float = field(default=0.0, metadata=at_least(0, finite=True))

    def __post_init__(self) -> None:
        super().__post_init__()
        found: dict[str, list[tuple[float, float]]] = {}
        for line, client, (start, end) in read_table(self.path, ("client", "start", "end")):
            if not 0 <= start < end:
                raise DataError(
                    f"{self.path}, line {line}: start has to be at least 0 and less than end"
                )
            if self.every and end > self.every:
                raise DataError(
                    f"{self.path}, line {line}: it ends at {end:g}, after the schedule repeats "
                    f"({self.every:g})"
                )
            found.setdefault(client, []).append((start, end))
        # The class is frozen, and the windows are no field: they are read from the file that `path`
        # names.
        object.__setattr__(
            self, "_windows", [_joined(found[client]) for client in in_order(list(found))]
        )

    def next(self, client: int, now: float, seed: int) -> float:
        cycle, window = self._place(client, now)
        windows = self._of(client)
        return (
            max(now, self._begin(cycle) + windows[window][0]) if window < len(windows) else math.inf
        )

    def until(self, client: int, now: float, seed: int) -> float:
        cycle, window = self._place(client, now)
        windows = self._of(client)
        if window == len(windows):
            return math.inf
        # The next cycle's first window continues it.
        if windows[window][1] == self.every and windows[0][0] == 0:
            if len(windows) == 1:
                return math.inf
            cycle = cycle + 1
            window = 0
        return self._begin(cycle) + windows[window][1]

    def _begin(self, cycle: int) -> float:
        return cycle * self.every

    def _of(self, client: int) -> list[tuple[float, float]]:
        windows: list[list[tuple[float, float]]] = self._windows  # type: ignore[attr-defined]
        return windows[client % len(windows)]

    def _place(self, client: int, now: float) -> tuple[int, int]:
        """Return (cycle, window) of the first window that ends after `now`.

        The index is past the last window if there is none.
        """
        windows = self._of(client)
        cycle = _cycle(now, self._begin, self.every) if self.every else 0
        begin = self._begin(cycle)
        window = bisect_right(windows, now, key=lambda window: begin + window[1])
        # Past the last window of a cycle: the first window of the next.
        return (cycle + 1, 0) if self.every and window == len(windows) else (cycle, window)


AVAILABILITIES: dict[str, type[Availability]] = listed(globals(), Availability)
"""Built-in settings by the name with which their text form begins."""


def parse_availability(text: str) -> Availability:
    """Return the availability that `text` names: "always", "daily:0.25", ...

    Raises ValueError for any other text.
    """
    return read(text, AVAILABILITIES, "availability", Availability)


def _cycle(now: float, start: Callable[[int], float], length: float) -> int:
    """Return the k with start(k) <= now < start(k+1), for starts `length` apart.

    Division alone may round to the neighbour of the right k, and a client would then leave before
    its arrival.
    """
    k = math.floor((now - start(0)) / length)
    if now < start(k):
        return k - 1
    return k + 1 if now >= start(k + 1) else k


def _joined(windows: list[tuple[float, float]]) -> list[tuple[float, float]]:
    """Return the windows in order, with overlapping or adjacent windows merged."""
    joined: list[tuple[float, float]] = []
    # Merged, so that a client does not seem to leave between adjacent windows.
    for start, end in sorted(windows):
        if joined and start <= joined[-1][1]:
            joined[-1] = (joined[-1][0], max(joined[-1][1], end))
        else:
            joined.append((start, end))
    return joined
