"""Federation clock: seconds that pass only while the server is up.

The clock is the coordinator's `now`. The server logs the time of every event. A restarted server
continues from the last logged time, and first stops the clock for a backoff period, so that no
deadline passes before the clients have found the server again. The clock never runs backwards.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable


class FederationClock:
    """Clock that stands at `start` until `run`.

    `monotonic` returns seconds of a clock that does not run backwards.
    """

    def __init__(self, start: float = 0.0, monotonic: Callable[[], float] = time.monotonic) -> None:
        self._monotonic = monotonic
        self._lock = threading.Lock()
        self._at = self._shown = start
        """Time of this clock at `_since` on the other clock; this clock runs from then on."""
        self._since = float("inf")

    def now(self) -> float:
        """Return the seconds on the federation's clock. Safe for several threads."""
        with self._lock:
            return self._now(self._monotonic())

    def begin_at(self, at: float) -> None:
        """Stop at `at`, the last logged time, or at the present time if that is later."""
        with self._lock:
            here = self._now(self._monotonic())
            self._at = max(at, here)
            self._since = float("inf")

    def run(self) -> None:
        """Start the clock, unless it runs or is stopped by `hold`."""
        self.hold(0.0)

    def hold(self, seconds: float) -> None:
        """Stop for `seconds` from now, or until the end of the current stop if later; then run."""
        with self._lock:
            there = self._monotonic()
            at = self._now(there)
            held = self._since if there < self._since < float("inf") else there
            self._at = at
            self._since = max(held, there + seconds)

    def _now(self, there: float) -> float:
        # Some machines' clocks run back a little, after a sleep or from core to core.
        self._shown = max(self._shown, self._at + max(0.0, there - self._since))
        return self._shown
