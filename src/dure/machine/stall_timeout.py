"""Timeout for a process that is alive and makes no progress.

Time counts between two checks, at most `every` seconds for each. So a process that is stopped
together with the waiting process, as by Ctrl-Z, or for which a busy process waits, is not blamed
for the time without checks.
"""

from __future__ import annotations

import time
from dataclasses import dataclass

LOOK = 1.0
"""Maximum seconds between two checks."""


@dataclass
class StallTimeout:
    """Timeout that expires after `deadline` seconds without a change of the progress value."""

    deadline: float
    _waited: float = 0.0
    _seen: object = None
    _looked: float = 0.0

    @property
    def every(self) -> float:
        """Seconds until the next check."""
        return min(LOOK, self.deadline / 4)

    def is_over(self, progress: object) -> bool:
        """Check the progress, and return whether it stayed the same for `deadline` seconds."""
        now = time.monotonic()
        if progress == self._seen:
            self._waited += min(now - self._looked, self.every)
        else:
            self._waited = 0.0
        self._seen = progress
        self._looked = now
        return self._waited >= self.deadline

    def again(self) -> None:
        """Restart the timeout for a new wait."""
        self._seen = None
