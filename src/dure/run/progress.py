"""Progress of a run in words and as a share; progress bars in a notebook.

In a notebook `dure.train`, `dure.resume` and `dure.compare` draw a bar for each run, unless the
caller passes a function of progress. The bars are HTML of a few elements, shown through IPython,
which every notebook has already loaded: dure neither needs nor imports it otherwise.
"""

from __future__ import annotations

import html
import sys
import time
from collections.abc import Callable
from functools import partial
from typing import Any

from dure.contracts.stop import Stop
from dure.record.history import is_spread

SECONDS = 0.2
"""Seconds between two drawings of a notebook's bars."""


def fraction_done(stop: Stop, event: dict[str, Any]) -> float | None:
    """Return the finished share of a run, by the nearest limit; None if no limit is known."""
    own = stop.steps if event["unit"] == "step" else stop.rounds
    limits = [
        (own, event["step"]),
        (stop.epochs, event["epoch"]),
        (stop.seconds, event["seconds"]),
        (stop.bytes, event.get("bytes", 0)),
    ]
    shares = [done / limit for limit, done in limits if limit is not None]
    # A step may overshoot the limit of epochs or seconds.
    return min(max(shares), 1.0) if shares else None


def facts(event: dict[str, Any]) -> str:
    """Return a line such as "round 12 · loss 0.31 · test_accuracy 0.953 · 48,200 samples/s"."""
    parts = [f"{event['unit']} {event['step']}"]
    if event["loss"] is not None:
        parts.append(f"loss {event['loss']:.4g}")
    parts.extend(
        f"{name} {value:.4g}"
        for name, value in event["metrics"].items()
        if name != "test_loss" and not is_spread(name)
    )
    epsilon = event.get("numbers", {}).get("epsilon")
    if epsilon is not None:
        parts.append(f"epsilon {epsilon:.4g}")
    if event["seconds"] > 0:
        parts.append(f"{event['samples'] / event['seconds']:,.0f} samples/s")
    return " · ".join(parts)


class NotebookBars:
    """The progress bars of a notebook, a bar for each run.

    display: IPython.display. The cell's output is a single element, which is redrawn.
    """

    def __init__(self, stop: Stop, display: Any) -> None:
        self.stop = stop
        self._display = display
        self._rows: dict[str, str] = {}
        self._shown: Any = None
        self._drawn = 0.0

    def __call__(self, label: str, event: dict[str, Any]) -> None:
        """Update the bar of the run called `label` from a progress event."""
        # News of a server about its clients, which is no progress of the run.
        if "unit" not in event:
            return
        done = fraction_done(self.stop, event)
        is_new = label not in self._rows
        self._rows[label] = _row(label, done, facts(event))
        now = time.monotonic()
        # The end is always drawn, with its last evaluation.
        ended = done is not None and done >= 1.0
        if is_new or ended or now - self._drawn >= SECONDS:
            self._drawn = now
            self._draw()

    def _draw(self) -> None:
        content = self._display.HTML(f"<table>{''.join(self._rows.values())}</table>")
        if self._shown is None:
            self._shown = self._display.display(content, display_id=True)
        else:
            self._shown.update(content)

    def of(self, label: str) -> Callable[[dict[str, Any]], None]:
        """Return the progress function of a single run."""
        return partial(self, label)


def _row(label: str, done: float | None, said: str) -> str:
    # Without a limit that is known in advance the bar is indeterminate.
    value = "" if done is None else f' value="{done:.4f}"'
    share = "" if done is None else f"{done:.0%}"
    return (
        f'<tr><td>{html.escape(label)}</td><td><progress max="1"{value}></progress></td>'
        f"<td>{share}</td><td>{html.escape(said)}</td></tr>"
    )


def bars_here(stop: Stop) -> NotebookBars | None:
    """Return progress bars in a notebook; None elsewhere."""
    shell = sys.modules.get("IPython")
    running = None if shell is None else shell.get_ipython()
    # IPython in a terminal has no kernel; a notebook always has a kernel.
    if running is None or not hasattr(running, "kernel"):
        return None
    # Loaded already, by IPython itself.
    return NotebookBars(stop, sys.modules["IPython.display"])
