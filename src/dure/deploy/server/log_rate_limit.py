"""Rate limit on log lines of the same kind, because strangers can cause any number of refusals."""

from __future__ import annotations

import logging
import sys
import threading
import time
from collections.abc import Callable

from dure.peer_text import one_line

MOST_LINES = 20
"""Maximum lines of the same kind per minute."""

MINUTE = 60.0

MOST_KINDS = 256
"""Maximum kinds with separate counters; further kinds share a counter."""


class LogRateLimit:
    """Counter of lines by kind. Safe for several threads. `clock` returns monotonic seconds."""

    def __init__(self, clock: Callable[[], float] | None = None) -> None:
        self._clock = time.monotonic if clock is None else clock
        self._kinds: dict[str, _Kind] = {}
        self._lock = threading.Lock()

    def take(self, kind: str) -> int | None:
        """Return the number of omitted lines of this kind before this line.

        Returns None if this line is to be omitted too.
        """
        with self._lock:
            if kind not in self._kinds and len(self._kinds) >= MOST_KINDS:
                kind = ""
            return self._kinds.setdefault(kind, _Kind()).take(self._clock())


def log_mistake(log: logging.Logger, sparing: LogRateLimit, request: str) -> None:
    """Log the exception being handled, unless its code position has used up its lines."""
    error = sys.exc_info()[1]
    trace = None if error is None else error.__traceback__
    while trace is not None and trace.tb_next is not None:
        trace = trace.tb_next
    place = "" if trace is None else f"{trace.tb_frame.f_code.co_filename}:{trace.tb_lineno}"
    left_out = sparing.take(f"{type(error).__name__} {place}")
    if left_out is not None:
        more = f" ({left_out} like it were left out)" if left_out else ""
        log.exception("%s", one_line(request) + more)


class _Kind:
    def __init__(self) -> None:
        self._began = float("-inf")
        self._written = 0
        self._left_out = 0

    def take(self, at: float) -> int | None:
        if at - self._began > MINUTE:
            self._began = at
            self._written = 0
        if self._written >= MOST_LINES:
            self._left_out += 1
            return None
        self._written += 1
        left_out = self._left_out
        self._left_out = 0
        return left_out
