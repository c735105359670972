"""How far a run has come, in words and as a share; and bars of it in a notebook.

In a notebook `dure.train`, `dure.resume` and `dure.compare` draw a bar for each run, where nobody
else is told of progress. It is HTML of a few elements, shown through IPython, which is there where
a notebook is: dure does not need it otherwise, and does not import it.
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
"""Between two drawings of a notebook's bars."""


def fraction_done(stop: Stop, event: dict[str, Any]) -> float | None:
    """How much of a run is done, by the limit that is nearest; None if only a target ends it."""
    own = stop.steps if event["unit"] == "step" else stop.rounds
    limits = [
        (own, event["step"]),
        (stop.epochs, event["epoch"]),
        (stop.seconds, event["seconds"]),
        (stop.bytes, event.get("bytes", 0)),
    ]
    shares = [done / limit for limit, done in limits if limit is not None]
    # A step may go beyond the limit of epochs or seconds.
    return min(max(shares), 1.0) if shares else None


def facts(event: dict[str, Any]) -> str:
    """ "round 12 · loss 0.31 · test_accuracy 0.953 · 48,200 samples/s"."""
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


class Bars:
    """The bars of a notebook, one for each run.

    display: IPython.display. The cell's output is one element, which is drawn again.
    """

    def __init__(self, stop: Stop, display: Any) -> None:
        self.stop = stop
        self._display = display
        self._rows: dict[str, str] = {}
        self._shown: Any = None
        self._drawn = 0.0

    def __call__(self, label: str, event: dict[str, Any]) -> None:
        """The run called `label` has come as far as `event` says."""
        # What a server tells of its clients, and no progress of the run.
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
        """What is told of the progress of one run."""
        return partial(self, label)


def _row(label: str, done: float | None, said: str) -> str:
    # Without a limit that is known in advance the bar only moves to and fro.
    value = "" if done is None else f' value="{done:.4f}"'
    share = "" if done is None else f"{done:.0%}"
    return (
        f'<tr><td>{html.escape(label)}</td><td><progress max="1"{value}></progress></td>'
        f"<td>{share}</td><td>{html.escape(said)}</td></tr>"
    )


def bars_here(stop: Stop) -> Bars | None:
    """Bars, if this is a notebook; None elsewhere."""
    shell = sys.modules.get("IPython")
    running = None if shell is None else shell.get_ipython()
    # IPython in a terminal has no kernel, which is what a notebook talks to.
    if running is None or not hasattr(running, "kernel"):
        return None
    # Known to be there: IPython itself has loaded it.
    return Bars(stop, sys.modules["IPython.display"])
