"""Handling of Ctrl-C: the first stops the run after its step, a later one stops it immediately."""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from types import FrameType

_SAME_KEYSTROKE = 1.0
"""Seconds within which two signals count as one keystroke.

A launcher forwards the Ctrl-C that the terminal has already sent to every process.
"""


@contextmanager
def on_interrupt(
    ask: Callable[[], None], signals: Sequence[int] = (signal.SIGINT,)
) -> Iterator[None]:
    """Call `ask` at the first of `signals`; a later signal raises KeyboardInterrupt.

    Outside the main thread, in which Python delivers signals, the context manager does nothing.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    asked: float | None = None

    def handle(signum: int, frame: FrameType | None) -> None:
        nonlocal asked
        if asked is None:
            asked = time.monotonic()
            ask()
        # A second Ctrl-C ends a run whose step does not complete.
        elif time.monotonic() - asked > _SAME_KEYSTROKE:
            raise KeyboardInterrupt

    # The caller's handlers are restored afterwards.
    before = {number: signal.signal(number, handle) for number in signals}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
