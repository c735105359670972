"""How often somebody may ask, and who has to stay away for a while.

Rate: a bucket of `burst` tokens, filled with `rate` tokens a second; each request takes one.
Quarantine: who was refused `refusals` times within `within` seconds is not heard for `quarantine`
seconds, and each time twice as long as before, up to `longest`; after as long without another
quarantine the count begins anew.

What is remembered of somebody is of constant size, and so is the number of those that are
remembered. It is forgotten when the server ends.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable, Hashable
from dataclasses import dataclass
from typing import Generic, TypeVar

MOST_REMEMBERED = 65536


@dataclass(frozen=True)
class Limits:
    """rate: requests a second; burst: as many at once. Times are in seconds.

    A client that sends a large update asks once for each part of it, as fast as the link allows.
    """

    rate: float = 500.0
    burst: float = 2000.0
    refusals: int = 20
    within: float = 60.0
    quarantine: float = 120.0
    longest: float = 3600.0

    def __post_init__(self) -> None:
        if not (self.rate > 0 and self.burst >= 1 and self.refusals >= 1):
            raise ValueError("limits: rate is above 0, burst and refusals are at least 1")
        if not (self.within > 0 and 0 < self.quarantine <= self.longest):
            raise ValueError("limits: within and quarantine are above 0, longest is no less")


class _Conduct:
    __slots__ = ("ended", "filled", "refusals", "times", "tokens")

    def __init__(self, limits: Limits, now: float) -> None:
        self.tokens = limits.burst
        self.filled = now
        self.refusals: list[float] = []
        """When the last ones were."""
        self.times = 0
        """How often it was in quarantine."""
        self.ended = float("-inf")
        """When the last quarantine ends or has ended."""


Who = TypeVar("Who", bound=Hashable)


class Conducts(Generic[Who]):
    """Of everybody, by number or by name. clock: seconds that only grow."""

    def __init__(self, limits: Limits | None, clock: Callable[[], float]) -> None:
        self._limits = limits if limits is not None else Limits()
        self._clock = clock
        self._all: OrderedDict[Who, _Conduct] = OrderedDict()
        self._lock = threading.Lock()

    def away(self, who: Who) -> float:
        """Seconds for which it still has to stay away; 0 for all who are welcome."""
        with self._lock:
            known = self._all.get(who)
            return 0.0 if known is None else max(0.0, known.ended - self._clock())

    def hurry(self, who: Who) -> float:
        """Takes a token. Where there is none: seconds until there is."""
        now = self._clock()
        with self._lock:
            conduct = self._of(who, now)
            earned = (now - conduct.filled) * self._limits.rate
            conduct.tokens = min(self._limits.burst, conduct.tokens + earned)
            conduct.filled = now
            if conduct.tokens < 1:
                return (1 - conduct.tokens) / self._limits.rate
            conduct.tokens -= 1
            return 0.0

    def refused(self, who: Who) -> float:
        """Something that it asked for was refused. Seconds for which it has to stay away now."""
        now = self._clock()
        limits = self._limits
        with self._lock:
            conduct = self._of(who, now)
            # What it is refused because it is in quarantine does not make that any longer.
            if now < conduct.ended:
                return conduct.ended - now
            conduct.refusals.append(now)
            del conduct.refusals[: -limits.refusals]
            many = len(conduct.refusals) == limits.refusals
            if not many or now - conduct.refusals[0] > limits.within:
                return 0.0
            conduct.refusals.clear()
            if now - conduct.ended > limits.longest:
                conduct.times = 0
            # The power is bounded, else it would overflow one day.
            length = min(limits.quarantine * 2.0 ** min(conduct.times, 64), limits.longest)
            conduct.times += 1
            conduct.ended = now + length
            return length

    def in_quarantine(self) -> dict[Who, float]:
        """Who has to stay away, and for how many seconds."""
        now = self._clock()
        with self._lock:
            return {who: one.ended - now for who, one in self._all.items() if one.ended > now}

    def _of(self, who: Who, now: float) -> _Conduct:
        conduct = self._all.get(who)
        if conduct is None:
            conduct = self._all[who] = _Conduct(self._limits, now)
            if len(self._all) > MOST_REMEMBERED:
                self._all.popitem(last=False)
        self._all.move_to_end(who)
        return conduct
