"""Sequential computation of a node under a virtual clock.

Results are computed at once; the messages leave at the time at which a real node would be done.
"""

from __future__ import annotations

import math
from collections.abc import Callable

from dure.fleet.virtual_network import Envelope

ActivityWatch = Callable[[str, float, float], None]
"""watch(part, began, seconds): called for each computation with a part of the model."""


def ignore_activity(what: str, began: float, seconds: float) -> None:
    """Ignore the computation."""


class ComputeQueue:
    """Queue of a node's pending messages, with their times."""

    def __init__(self) -> None:
        self._until = 0.0
        self._later: list[tuple[float, list[Envelope]]] = []
        self.computed = 0.0
        """Total seconds of computing."""
        self.watch: ActivityWatch = ignore_activity

    def work(
        self, seconds: float, said: list[Envelope], now: float, what: str = ""
    ) -> list[Envelope]:
        """Compute for `seconds`, then send the messages; return the messages that leave now.

        what: the part of the model, for `watch`; "" to omit the call.
        """
        self.computed += seconds
        began = max(self._until, now)
        self._until = began + seconds
        if what:
            self.watch(what, began, seconds)
        if self._until <= now and not self._later:
            return said
        self._later.append((self._until, said))
        return []

    def drop(self) -> None:
        """Discard pending messages and the current computation."""
        self._later.clear()
        self._until = 0.0

    @property
    def wake(self) -> float:
        """Time at which the first pending computation is done; infinite if there is none."""
        return self._later[0][0] if self._later else math.inf

    def tick(self, now: float) -> list[Envelope]:
        """Return the messages that are due."""
        said: list[Envelope] = []
        while self._later and self._later[0][0] <= now:
            said += self._later.pop(0)[1]
        return said
