"""Terminal output during a benchmark: a bar, or on other outputs a line for every size."""

from __future__ import annotations

import sys
from typing import Any

from rich import progress
from rich.console import Console

from dure.bench.plan import BenchPlan, size_text


class BenchProgress:
    """Shows events of the contest. quiet: show nothing."""

    def __init__(self, plan: BenchPlan, quiet: bool = False) -> None:
        self.plan = plan
        self.quiet = quiet
        console = Console(stderr=True)
        self.bar = progress.Progress(
            progress.TextColumn("{task.description}"),
            progress.BarColumn(bar_width=24),
            progress.TextColumn("{task.percentage:>3.0f}%"),
            progress.TextColumn("{task.fields[what]}"),
            progress.TimeElapsedColumn(),
            console=console,
            # The bar disappears at the end, when the table follows.
            transient=True,
        )
        self.live = console.is_terminal and not quiet
        self.task = self.bar.add_task(
            "all-reduce", total=float(len(plan.ranks) * len(plan.sizes)), what=""
        )
        self._said: tuple[int, int] | None = None

    def __enter__(self) -> BenchProgress:
        if self.live:
            self.bar.start()
        return self

    def __exit__(self, *error: object) -> None:
        if self.live:
            self.bar.stop()

    def __call__(self, event: dict[str, Any]) -> None:
        try:
            self._show(event)
        except OSError:  # the terminal or the reader is gone; the benchmark goes on
            self.live = False
            self.quiet = True

    def _show(self, event: dict[str, Any]) -> None:
        place = f"{event['ranks']} ranks, {size_text(event['bytes'])}"
        if self.live:
            # Finished sizes, including all of fewer ranks, and a part of this size.
            done = (
                self.plan.ranks.index(event["ranks"]) * len(self.plan.sizes)
                + event["step"]
                + event["share"]
            )
            self.bar.update(self.task, completed=done, what=f"{place}: {event['what']}")
        elif not self.quiet and self._said != (event["ranks"], event["bytes"]):
            self._said = (event["ranks"], event["bytes"])
            print(f"all-reduce: {place}", file=sys.stderr, flush=True)
