"""When clients are there: a phone that charges at night, a hospital that is always on.

A client is there in windows [start, end) of the virtual time, which begins at 0. Two questions are
answered for any time, in any order, and for clients who are never asked about nothing is computed:

    next(client, now)    the first time t >= now at which it is there    next(next(now)) = next(now)
    until(client, now)   when it, there from next(now) on, leaves again  until(now) > next(now)

    always
    probability:P:PERIOD   there with probability P in each period of so many seconds, independently
    daily:SHARE:DAY        one window a day, of this share of it; each client at its own phase
    file:PATH:EVERY        CSV with client,start,end in seconds; EVERY > 0: again after so many

Cost: `probability` takes about three hashes for `next` and six for `until`, whatever P is; `daily`
takes one.

The answer is a time and not a boolean, so that a simulation does not ask again and again.

Source: K. Bonawitz et al., "Towards Federated Learning at Scale: System Design", MLSys 2019: four
times as many phones are there by night as by day.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import ClassVar

from dure.arguments import Told
from dure.errors import DataError
from dure.fleet.table import in_order, read_table
from dure.randomness.chance import uniform
from dure.settings import listed, read, write

_DAY = 86_400.0

LEAST = 1e-12
"""How far a probability is from 0, and from 1 if it is not 1.

Nearer than that, floats do not tell the periods apart.
"""


@dataclass(frozen=True)
class Availability(Told):
    """What all settings have in common: a name, a text form, `next` and `until`.

    always: whether every client is always there, so that nobody need ask.
    """

    name: ClassVar[str]
    always: ClassVar[bool] = False

    def next(self, client: int, now: float, seed: int) -> float:
        """The first time at or after `now` (seconds, >= 0) at which `client` is there.

        inf if never.
        """
        raise NotImplementedError

    def until(self, client: int, now: float, seed: int) -> float:
        """When `client`, which is there at `next(client, now, seed)`, leaves after that.

        inf if never.
        """
        raise NotImplementedError

    def __str__(self) -> str:
        """The text that `parse_availability` reads."""
        return write(self)


@dataclass(frozen=True)
class Always(Availability):
    """Every client is always there."""

    name: ClassVar[str] = "always"
    always: ClassVar[bool] = True

    def next(self, client: int, now: float, seed: int) -> float:
        return now

    def until(self, client: int, now: float, seed: int) -> float:
        return math.inf


@dataclass(frozen=True)
class Probability(Availability):
    """In each period the client is there or not, by a throw for that period.

    p: the probability, above 0. period: in seconds. A client that is there in periods that follow
    one another does not leave between them.
    """

    name: ClassVar[str] = "probability"
    p: float = 0.5
    period: float = 3_600.0

    def __post_init__(self) -> None:
        if not 0 < self.p <= 1:
            raise ValueError(f"probability: it is above 0 and at most 1, not {self.p}")
        if not LEAST <= self.p <= 1 - LEAST and self.p != 1:
            raise ValueError(
                f"probability: {self.p} cannot be told from {round(self.p)}, {LEAST} is the least"
            )
        _check_length(self.period, "probability: the period")

    def next(self, client: int, now: float, seed: int) -> float:
        return max(
            now, self._begin(self._first(True, client, _cycle(now, self._begin, self.period), seed))
        )

    def until(self, client: int, now: float, seed: int) -> float:
        # Never away, so that no first period of being away is looked for.
        if self.p == 1:
            return math.inf
        # First the period in which it is there, then the first one after that in which it is not.
        there = self._first(True, client, _cycle(now, self._begin, self.period), seed)
        return self._begin(self._first(False, client, there + 1, seed))

    def _begin(self, period: int) -> float:
        return period * self.period

    def _first(self, there: bool, client: int, period: int, seed: int) -> int:
        """The first period from `period` on in which the client is there, or is not."""
        # Only the rarer of the two is drawn. If that is what is asked for, it is the next one
        # found; if not, it is the first period that is none of those found in a row.
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
        """The periods, in order, in which the rarer of being there and being away happens.

        Some may be before `period`.

        Their gaps are geometric. They are drawn block by block, each block with about one, so that
        the throws of a distant time, or of a small P, need not be made one by one.
        """
        length = math.ceil(1 / rare)
        # Whole blocks: what is drawn in a block is a function of its number, from wherever it is
        # asked.
        block = period // length
        while True:
            at = -1
            drawn = 0
            while True:
                # A geometric number by inversion: how many periods come before the next rare one.
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
    """One window a day, at an hour that is the client's own.

    share: of the day, above 0. day: in seconds.
    """

    name: ClassVar[str] = "daily"
    share: float = 0.25
    day: float = _DAY

    def __post_init__(self) -> None:
        if not 0 < self.share <= 1:
            raise ValueError(
                f"daily: the share of the day is above 0 and at most 1, not {self.share}"
            )
        _check_length(self.day, "daily: the day")

    def next(self, client: int, now: float, seed: int) -> float:
        return now if self.share == 1 else max(now, self._window(client, now, seed)[0])

    def until(self, client: int, now: float, seed: int) -> float:
        if self.share == 1:
            return math.inf
        start, end = self._window(client, now, seed)
        # A gap may be shorter than numbers can tell.
        return max(end, math.nextafter(max(start, now), math.inf))

    def _window(self, client: int, now: float, seed: int) -> tuple[float, float]:
        """(start, end) of the first window that ends after `now`."""
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
    """Windows that were measured: a CSV file with the columns client,start,end, in seconds.

    A client may have many.

    every: after so many seconds all begins again, such as 604800 for the trace of a week; 0: it
    does not, and who has left for the last time stays away. end may be inf where nothing begins
    again. Client k has the windows of the file's client k, modulo their number: in order of first
    appearance, or, where all names are whole numbers, of these.

    Raises DataError if the file cannot be read, or a line is not a client's name and 0 <= start <
    end (<= every).
    """

    name: ClassVar[str] = "file"
    path: str = ""
    every: float = 0.0

    def __post_init__(self) -> None:
        if not (self.every >= 0 and math.isfinite(self.every)):
            raise ValueError(
                f"file: the seconds after which it begins again are 0 (never) or more, not "
                f"{self.every}"
            )
        found: dict[str, list[tuple[float, float]]] = {}
        for line, client, (start, end) in read_table(self.path, ("client", "start", "end")):
            if not 0 <= start < end:
                raise DataError(
                    f"{self.path}, line {line}: start has to be at least 0 and less than end"
                )
            if self.every and end > self.every:
                raise DataError(
                    f"{self.path}, line {line}: it ends at {end:g}, after all begins again "
                    f"({self.every:g})"
                )
            found.setdefault(client, []).append((start, end))
        # The class is frozen, and this is no field: it is read from the file that `path` names.
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
        # The next cycle's first window goes on with it.
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
        """(cycle, window) of the first window that ends after `now`.

        It is past the last window if there is none.
        """
        windows = self._of(client)
        cycle = _cycle(now, self._begin, self.every) if self.every else 0
        begin = self._begin(cycle)
        window = bisect_right(windows, now, key=lambda window: begin + window[1])
        # Past the last window of a cycle: the first one of the next.
        return (cycle + 1, 0) if self.every and window == len(windows) else (cycle, window)


AVAILABILITIES: dict[str, type[Availability]] = listed(globals(), Availability)
"""Every setting by the name its text form begins with."""


def parse_availability(text: str) -> Availability:
    """The availability that `text` names: "always", "daily:0.25", ...

    Raises ValueError for what is none.
    """
    return read(text, AVAILABILITIES, "availability", Availability)


def _cycle(now: float, start: Callable[[int], float], length: float) -> int:
    """The k with start(k) <= now < start(k+1), for starts `length` apart.

    Division alone may round to the neighbour of the right one, and a client would then leave before
    it has come.
    """
    k = math.floor((now - start(0)) / length)
    if now < start(k):
        return k - 1
    return k + 1 if now >= start(k + 1) else k


def _joined(windows: list[tuple[float, float]]) -> list[tuple[float, float]]:
    """The windows in order, those that overlap or touch made one."""
    joined: list[tuple[float, float]] = []
    # Joined, so that a client does not seem to leave where one window follows another.
    for start, end in sorted(windows):
        if joined and start <= joined[-1][1]:
            joined[-1] = (joined[-1][0], max(joined[-1][1], end))
        else:
            joined.append((start, end))
    return joined


def _check_length(value: float, what: str) -> None:
    if not (value > 0 and math.isfinite(value)):
        raise ValueError(f"{what} is a positive number of seconds, not {value}")
