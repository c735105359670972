"""Rate limits and quarantine of clients and addresses.

Rate: a token bucket of `burst` tokens, refilled with `rate` tokens per second; each request takes a
token. Quarantine: a client with `refusals` refusals within `within` seconds is ignored for
`quarantine` seconds; each further quarantine lasts twice as long, up to `longest`; after `longest`
seconds without a quarantine the length is reset.

The state of a client has constant size, and the number of states is bounded. The states are lost
when the server ends.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable, Hashable
from dataclasses import dataclass
from typing import Generic, TypeVar

MOST_REMEMBERED = 65536


@dataclass(frozen=True)
class RateLimits:
    """Rate limits of a client: `rate` requests per second, and `burst` at once.

    Times are in seconds.

    A client that sends a large update makes a request per part, as fast as the link allows.
    """

    rate: float = 500.0
    burst: float = 2000.0
    refusals: int = 20
    within: float = 60.0
    quarantine: float = 120.0
    longest: float = 3600.0

    def __post_init__(self) -> None:
        if not (self.rate > 0 and self.burst >= 1 and self.refusals >= 1):
            raise ValueError("limits: rate has to be above 0, burst and refusals at least 1")
        if not (self.within > 0 and 0 < self.quarantine <= self.longest):
            raise ValueError(
                "limits: within and quarantine have to be above 0, and longest at least as large"
            )


class _Conduct:
    __slots__ = ("ended", "filled", "refusals", "times", "tokens")

    def __init__(self, limits: RateLimits, now: float) -> None:
        self.tokens = limits.burst
        self.filled = now
        self.refusals: list[float] = []
        """Times of the last refusals."""
        self.times = 0
        """Number of quarantines."""
        self.ended = float("-inf")
        """End of the last quarantine."""


Who = TypeVar("Who", bound=Hashable)


class RateLimiter(Generic[Who]):
    """Rate limits and quarantines by number or address. `clock` returns monotonic seconds."""

    def __init__(self, limits: RateLimits | None, clock: Callable[[], float]) -> None:
        self._limits = limits if limits is not None else RateLimits()
        self._clock = clock
        self._all: OrderedDict[Who, _Conduct] = OrderedDict()
        self._lock = threading.Lock()

    def away(self, who: Who) -> float:
        """Return the remaining seconds of a quarantine; 0 without a quarantine."""
        with self._lock:
            known = self._all.get(who)
            return 0.0 if known is None else max(0.0, known.ended - self._clock())

    def hurry(self, who: Who) -> float:
        """Take a token and return 0; without a token, return the seconds until the next token."""
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
        """Count a refusal, and return the seconds of the quarantine; 0 without a quarantine."""
        now = self._clock()
        limits = self._limits
        with self._lock:
            conduct = self._of(who, now)
            # Refusals during a quarantine do not extend it.
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
            # The exponent is bounded; otherwise the power would overflow eventually.
            length = min(limits.quarantine * 2.0 ** min(conduct.times, 64), limits.longest)
            conduct.times += 1
            conduct.ended = now + length
            return length

    def in_quarantine(self) -> dict[Who, float]:
        """Return the remaining seconds of all quarantines."""
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
