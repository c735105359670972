"""The federation's clock: seconds, which pass only while the server is up.

The coordinator's `now`. It is logged with every event, and goes on from the last logged time when
the server comes back; then it stands for one more back-off period, so that no deadline passes
before the clients have noticed that they can answer. It never runs back.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable


class Clock:
    """Stands at `start` until it is told to run.

    monotonic: seconds by any clock that does not run back.
    """

    def __init__(self, start: float = 0.0, monotonic: Callable[[], float] = time.monotonic) -> None:
        self._monotonic = monotonic
        self._lock = threading.Lock()
        self._at = self._shown = start
        """The time at `_since`, on the other clock; from then on this one runs."""
        self._since = float("inf")

    def now(self) -> float:
        """Seconds of the federation. Any thread may ask."""
        with self._lock:
            return self._now(self._monotonic())

    def begin_at(self, at: float) -> None:
        """Stands at `at`, the last logged time, or where it is if that is later."""
        with self._lock:
            here = self._now(self._monotonic())
            self._at = max(at, here)
            self._since = float("inf")

    def run(self) -> None:
        """From here on time passes, unless it does already or is held."""
        self.hold(0.0)

    def hold(self, seconds: float) -> None:
        """Stands still for `seconds` from here, or as long as it was to anyway; then it runs."""
        with self._lock:
            there = self._monotonic()
            at = self._now(there)
            held = self._since if there < self._since < float("inf") else there
            self._at = at
            self._since = max(held, there + seconds)

    def _now(self, there: float) -> float:
        # Some machines' clocks do run back a little: after a sleep, or from one core to another.
        self._shown = max(self._shown, self._at + max(0.0, there - self._since))
        return self._shown
