"""A node that computes one thing after another, under a virtual clock.

What it computes is computed at once; what it says then leaves when it would have been computed.
"""

from __future__ import annotations

import math

from dure.fleet.virtual import Envelope


class Busy:
    """What a node will say, and when."""

    def __init__(self) -> None:
        self._until = 0.0
        self._later: list[tuple[float, list[Envelope]]] = []
        self.computed = 0.0
        """Seconds of computing."""

    def work(self, seconds: float, said: list[Envelope], now: float) -> list[Envelope]:
        """It computes for so long, and then says this. Returns what is said now."""
        self.computed += seconds
        self._until = max(self._until, now) + seconds
        if self._until <= now and not self._later:
            return said
        self._later.append((self._until, said))
        return []

    def drop(self) -> None:
        """What it would have said it will not say, and it computes nothing."""
        self._later.clear()
        self._until = 0.0

    @property
    def wake(self) -> float:
        """When it is done with what comes first."""
        return self._later[0][0] if self._later else math.inf

    def tick(self, now: float) -> list[Envelope]:
        """What is due."""
        said: list[Envelope] = []
        while self._later and self._later[0][0] <= now:
            said += self._later.pop(0)[1]
        return said
