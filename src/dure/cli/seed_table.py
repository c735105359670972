"""Table of statistics over runs that differ only in their seed: a row for each system.

0.9512 ±0.0031 [0.9480, 0.9544]      mean, deviation, and the 95 % interval of the mean
"""

from __future__ import annotations

import dataclasses
import operator
from collections.abc import Callable, Sequence
from typing import Any

from rich.markup import escape
from rich.table import Table

from dure.cli.show import (
    SummaryColumn,
    best_and_last,
    columns,
    competes,
    is_last,
    notes_on,
    with_notes,
)
from dure.record.spread import Spread, spread

Group = Sequence[dict[str, Any]]
"""Summaries of runs that differ only in their seed."""

_LEFT_OUT = (
    "batch",
    "steps",
    "epochs",
    "peak memory",
    "simulated in",
    "shuffle time",
    "idle (over busy)",
)
"""Columns of single runs without a table over seeds; report and summary.json have them."""


def groups(summaries: Sequence[dict[str, Any]]) -> list[Group]:
    """Return the summaries by system; [] if no system has several seeds."""
    found: dict[str, list[dict[str, Any]]] = {}
    for summary in summaries:
        found.setdefault(summary["label"], []).append(summary)
    several = any(len({one["seed"] for one in group}) > 1 for group in found.values())
    return list(found.values()) if several else []


def over_seeds(together: Sequence[Group]) -> list[dict[str, Any]]:
    """Return the statistics as JSON: label, seeds, and each metric of the systems."""
    told = []
    for group in together:
        names = dict.fromkeys(name for one in group for name in one["best"])
        spreads = {name: _spread(group, operator.methodcaller("get", name)) for name in names}
        told.append(
            {
                "label": group[0]["label"],
                "seeds": [one["seed"] for one in group],
                **{
                    name: dataclasses.asdict(found)
                    for name, found in spreads.items()
                    if found is not None
                },
            }
        )
    return told


def table_over_seeds(together: Sequence[Group]) -> Table:
    """Return a row for each system; the best mean of every column is in bold.

    A run with a chosen best model counts with that model.
    """
    notes = notes_on([summary for group in together for summary in group])
    together = [[one for one in best_and_last(group) if not is_last(one)] for group in together]
    every = [summary for group in together for summary in group]
    shown = [column for column in columns(every) if column.heading not in _LEFT_OUT]
    metrics = {name.replace("_", " ") for summary in every for name in summary["best"]}
    result = Table(box=None, pad_edge=False, header_style="dim")
    result.add_column("system")
    result.add_column("seeds", justify="right")
    for column in shown:
        result.add_column(column.heading, justify="right")
    best = [_best(column, together) for column in shown]
    for group in together:
        cells = []
        for column, top in zip(shown, best, strict=True):
            found = _spread(group, column.value)
            text = _written(found, column.text, column.heading in metrics)
            competing = competes(group[0], column.heading)
            is_best = found is not None and found.mean == top and competing
            cells.append(f"[bold]{escape(text)}[/bold]" if is_best else escape(text))
        # Without the step of the best model, which differs from run to run.
        label = str(group[0].get("system", group[0]["label"]))
        result.add_row(escape(label), str(len(group)), *cells)
    return with_notes(result, notes)


def _spread(group: Group, value: Callable[[dict[str, Any]], float | None]) -> Spread | None:
    return spread([number for number in map(value, group) if number is not None])


def _best(column: SummaryColumn, together: Sequence[Group]) -> float | None:
    """Return the best mean of a column; None without differing means to compare."""
    competing = (group for group in together if competes(group[0], column.heading))
    spreads = [_spread(group, column.value) for group in competing]
    means = [one.mean for one in spreads if one is not None]
    if column.lower is None or len(set(means)) < 2:
        return None
    return min(means) if column.lower else max(means)


def _written(found: Spread | None, text: Callable[[float], str], interval: bool) -> str:
    """Return mean and deviation as text. interval: include the interval, which takes room."""
    if found is None:
        return "–"
    if found.deviation is None or found.low is None or found.high is None:
        return text(found.mean)
    # A value that is the same under every seed, such as bytes, has a deviation of 0.
    if not found.deviation:
        return text(found.mean)
    written = f"{text(found.mean)} ±{text(found.deviation)}"
    return f"{written} [{text(found.low)}, {text(found.high)}]" if interval else written
