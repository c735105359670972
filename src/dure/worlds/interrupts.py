"""Ctrl-C: the first asks the run to end after its step, a later one ends it at once."""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from types import FrameType

_SAME_KEYSTROKE = 1.0
"""Seconds: a launcher passes on the Ctrl-C that the terminal has sent to every process already."""


@contextmanager
def on_interrupt(
    ask: Callable[[], None], signals: Sequence[int] = (signal.SIGINT,)
) -> Iterator[None]:
    """Calls `ask` at the first of `signals`; a later one raises KeyboardInterrupt.

    Outside the main thread, where Python delivers no signals, nothing changes.
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
        # A run that does not get to the end of its step is ended by pressing again.
        elif time.monotonic() - asked > _SAME_KEYSTROKE:
            raise KeyboardInterrupt

    # The handlers of the caller are put back afterwards.
    before = {number: signal.signal(number, handle) for number in signals}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
