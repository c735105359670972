"""How long somebody is waited for that lives and makes no progress.

Seconds are those of looks: between two looks at most `every` count. So a process that is stopped
together with who waits for it, as by Ctrl-Z, or that waits for one while it is busy itself, blames
nobody for the time in which it did not look.
"""

from __future__ import annotations

import time
from dataclasses import dataclass

LOOK = 1.0
"""Seconds between two looks, at most."""


@dataclass
class Patience:
    """Ends after `deadline` seconds in which progress, whatever it is told by, stays the same."""

    deadline: float
    _waited: float = 0.0
    _seen: object = None
    _looked: float = 0.0

    @property
    def every(self) -> float:
        """Seconds after which to look again."""
        return min(LOOK, self.deadline / 4)

    def is_over(self, progress: object) -> bool:
        """At a look: whether there was no progress for the deadline."""
        now = time.monotonic()
        if progress == self._seen:
            self._waited += min(now - self._looked, self.every)
        else:
            self._waited = 0.0
        self._seen = progress
        self._looked = now
        return self._waited >= self.deadline

    def again(self) -> None:
        """Something new is waited for."""
        self._seen = None
