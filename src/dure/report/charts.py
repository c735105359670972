"""Data of the page's charts, as plain JSON: curves, timelines and partitions, bounded in size.

A colour is written `var(--name)`; the page resolves it against style.css, once for light and once
for dark. Text for plotly is escaped here, since plotly interprets a little HTML in it.

Histories are thinned for drawing: the evaluations to the lowest and highest of every stretch (so
that the best value stays on the curve), the training losses to the mean of every stretch. The total
bytes of all workers are known at evaluations only; between evaluations a training loss is placed by
linear interpolation, after the last evaluation not at all. A federation records its clock at every
round, so its measurements have a place on that clock as well.
"""

from __future__ import annotations

import html
from bisect import bisect_left
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from dure.record.history import is_spread
from dure.report.formatting import count, duration, higher_is_better, is_share, listed, metric_name
from dure.report.runs import (
    CLOCKS,
    HistoryLine,
    PartitionSummary,
    ReportedRun,
    RunTimeline,
    TimelineSpan,
    clock_of,
    time_of,
)
from dure.report.translation import recorded, translated

JSON = dict[str, Any]
Clock = Callable[[float], float | None]

COLOURS = 8
SYMBOLS = ("circle", "square", "diamond", "triangle-up", "x", "triangle-down", "cross")
DASHES = ("solid", "dash", "dot", "dashdot")
CATEGORIES = ("compute", "communication", "idle", "evaluation", "checkpoint")

POINTS = 400
LANES = 12
SPANS = 3_000
SPANS_OF_ALL_RUNS = 24_000
CELLS = 60_000
"""Bounds on the amount of drawing; a browser draws this much without delay.

POINTS: of a curve. LANES: of a timeline. SPANS: of a timeline, SPANS_OF_ALL_RUNS: of all timelines
of the page. CELLS: of a partition.
"""

VIRTUAL = "virtual"
WALL = "wall"
"""Axes of a federation's own clock: simulated, or real time of a deployed federation."""


def style(index: int) -> JSON:
    """Return the appearance of run `index` in every chart.

    A colour, then a dash when the colours repeat, and a marker.
    """
    return {
        "color": f"var(--run-{index % COLOURS})",
        "dash": DASHES[index // COLOURS % len(DASHES)],
        "symbol": SYMBOLS[index % len(SYMBOLS)],
    }


def metrics(runs: Sequence[ReportedRun]) -> list[str]:
    """Return all metrics of the runs, the most important first.

    Losses come last. Of the statistics of a metric over clients, the worst tenth and the worst
    client are included, except for losses.
    """
    keys: dict[str, None] = {}
    for run in runs:
        keys.update(dict.fromkeys(filter(_has_a_curve, run.result.best)))
    return sorted(keys, key=lambda key: "loss" in key)


def _has_a_curve(key: str) -> bool:
    return not is_spread(key) or (key.endswith(("_p10", "_worst")) and "loss" not in key)


def curves(runs: Sequence[ReportedRun]) -> JSON | None:
    """Return the curves of the runs; None if there is nothing to draw.

    Every metric, the training loss and the strategies' numbers per round, against epochs, seconds,
    steps or rounds, bytes, and the seconds of a federation's own clock; virtual seconds have an
    axis of their own. A strategy's number that is 0 in all runs is left out.
    """
    series = []
    for index, run in enumerate(runs):
        if any(line.metrics for line in run.evaluations):
            series.append(_evaluations(index, run))
        if run.steps:
            series.append(_training(index, run))
    keys = _keys(runs, series)
    if not keys:
        return None
    return {
        "axes": [axis | {"log": _wide(series, axis["key"])} for axis in _axes(runs, series)],
        "metrics": [
            {
                "key": key,
                "name": translated("training loss") if key == "train_loss" else metric_name(key),
                "share": is_share(key),
                "rises": higher_is_better(key),
            }
            for key in keys
        ],
        "series": series,
    }


def _keys(runs: Sequence[ReportedRun], series: Sequence[JSON]) -> list[str]:
    """Return the keys of the curves, in the order of the menu.

    Metrics, the training loss, and numbers of strategies that are not always 0.
    """
    known: dict[str, None] = {}
    told: dict[str, None] = {}
    for one in series:
        for key, values in one["y"].items():
            if any(value is not None for value in values):
                known[key] = None
            # Drawn if any value is neither 0 nor unknown.
            if any(values):
                told[key] = None
    menu = dict.fromkeys([*metrics(runs), "train_loss", *told])
    return [key for key in menu if key in known]


def _axes(runs: Sequence[ReportedRun], series: Sequence[JSON]) -> list[JSON]:
    units = sorted({run.result.unit for run in runs})
    counted = translated(" or ").join(translated(f"{unit}s") for unit in units)
    axes = [
        _axis("epoch", "epochs", "epochs"),
        _axis("seconds", "seconds", "seconds of training"),
        _axis("step", counted, counted),
        _axis("bytes", "bytes", "bytes sent, all workers together"),
    ]
    axes += [
        _axis(VIRTUAL, "virtual seconds", "seconds on the simulation’s clock"),
        _axis(WALL, "wall seconds", "seconds on the federation’s clock"),
    ]
    return [axis for axis in axes if any(map(partial(_has_a_place, axis["key"]), series))]


def _has_a_place(axis: str, one: JSON) -> bool:
    return any(place is not None for place in one["x"][axis])


def _axis(key: str, name: str, title: str) -> JSON:
    return {"title": translated(title), "key": key, "name": translated(name)}


def timelines(runs: Sequence[ReportedRun]) -> list[JSON]:
    """Return lanes and spans by category for each run with a trace, each bounded in number."""
    traced = [(index, run.trace) for index, run in enumerate(runs) if run.trace]
    # Many runs share the capacity of a page.
    most = min(SPANS, SPANS_OF_ALL_RUNS // max(len(traced), 1))
    return [_timeline(index, trace, most) for index, trace in traced]


def partitions(runs: Sequence[ReportedRun]) -> list[JSON]:
    """Return the distinct partitions, each with the runs that used it."""
    users: list[tuple[PartitionSummary, list[str]]] = []
    for run in runs:
        if run.partition is None:
            continue
        # Runs of a comparison mostly share a partition: it is drawn once.
        same = next((names for partition, names in users if partition == run.partition), None)
        if same is None:
            users.append((run.partition, [run.label]))
        else:
            same.append(run.label)
    return [_partition(partition, names) for partition, names in users]


def _evaluations(index: int, run: ReportedRun) -> JSON:
    lines = [line for line in run.evaluations if line.metrics]
    columns = {key: _column(lines, key) for key in _said(lines) if _has_a_curve(key)}
    places: set[int] = set()
    for column in columns.values():
        # Each metric keeps its own extremes; together they share the points of a curve.
        places |= set(_extremes(column, POINTS // len(columns)))
    kept = [lines[place] for place in sorted(places)]
    x = {
        "epoch": [short(line.epoch) for line in kept],
        "step": [line.step for line in kept],
        "bytes": [line.bytes_sent for line in kept],
        **_times(run, kept),
    }
    y = {key: list(map(short, _column(kept, key))) for key in columns}
    return {"run": index, "x": x, "y": y}


def _times(run: ReportedRun, lines: Sequence[HistoryLine]) -> dict[str, list[float | None]]:
    """Return the times of the lines, on each clock that the run has.

    A simulation's real seconds do not measure the simulated system: they have no axis.
    """
    own = clock_of(run)
    told = [short(now) for now in map(_clock(run), (line.step for line in lines))]
    nowhere: list[float | None] = [None] * len(lines)
    return {
        "seconds": nowhere if own == VIRTUAL else [short(line.seconds) for line in lines],
        VIRTUAL: told if own == VIRTUAL else nowhere,
        WALL: told if own == WALL else nowhere,
    }


def _said(lines: Sequence[HistoryLine]) -> list[str]:
    """Return the keys of the lines' metrics, in order of first occurrence."""
    keys: dict[str, None] = {}
    for line in lines:
        keys.update(dict.fromkeys(line.metrics))
    return list(keys)


def _training(index: int, run: ReportedRun) -> JSON:
    lines = run.steps
    # The loss of a batch fluctuates; the mean of a stretch shows the trend.
    stretches = _stretches(len(lines), POINTS // 2)
    last = [lines[end - 1] for _, end in stretches]
    # A step line knows rank 0's bytes only; an evaluation those of all workers.
    sent = _interpolated([(line.step, line.bytes_sent) for line in run.evaluations])
    x = {
        "epoch": [short(line.epoch) for line in last],
        "step": [line.step for line in last],
        "bytes": [short(sent(line.step)) for line in last],
        **_times(run, last),
    }
    columns = {"train_loss": [line.loss for line in lines]}
    columns |= {key: _column(lines, key) for key in _said(lines) if key not in CLOCKS}
    y = {key: _means(column, stretches) for key, column in columns.items()}
    return {"run": index, "x": x, "y": y}


def _column(lines: Sequence[HistoryLine], key: str) -> list[float | None]:
    return [line.metrics.get(key) for line in lines]


def _stretches(length: int, most: int) -> list[tuple[int, int]]:
    pieces = min(length, most)
    return [(piece * length // pieces, (piece + 1) * length // pieces) for piece in range(pieces)]


def _extremes(values: Sequence[float | None], most: int) -> list[int]:
    """Return the indices of at most `most` values: the ends, and each stretch's extremes."""
    if len(values) <= most:
        return list(range(len(values)))
    kept = {0, len(values) - 1}
    # Two of each stretch, and the two ends.
    for start, end in _stretches(len(values), most // 2 - 1):
        numbered = zip(values[start:end], range(start, end), strict=True)
        known = [(value, index) for value, index in numbered if value is not None]
        # A stretch of unknowns keeps an index, so that the curve has a gap there.
        kept |= {min(known)[1], max(known)[1]} if known else {start}
    return sorted(kept)


def _clock(run: ReportedRun) -> Clock:
    """Return the federation's clock by step, 0 at the start; always None without a clock."""
    told = [(line.step, time_of(line)) for line in run.steps]
    if all(now is None for _, now in told):
        return lambda step: None
    return _interpolated([(0.0, 0.0), *told])


def _interpolated(known: Sequence[tuple[float, float | None]]) -> Clock:
    """Return a function that interpolates linearly between known values; None outside of them."""
    points = [(step, value) for step, value in known if value is not None]
    steps = [step for step, _ in points]

    def at(step: float) -> float | None:
        # The first known step that is not before this step.
        right = bisect_left(steps, step)
        if right == len(steps) or (right == 0 and steps[0] != step):
            return None
        high_step, high = points[right]
        if high_step == step:
            return high
        low_step, low = points[right - 1]
        return low + (high - low) * (step - low_step) / (high_step - low_step)

    return at


def _wide(series: Sequence[JSON], axis: str) -> bool:
    """Return whether an axis starts out logarithmic: the runs end at very different values."""
    ends = [max(filter(None, one["x"][axis]), default=0) for one in series]
    ends = [end for end in ends if end > 0]
    # Epochs are common to all runs: linear, whatever the ends are.
    return axis != "epoch" and bool(ends) and max(ends) > 10 * min(ends)


def _timeline(run: int, trace: RunTimeline, most: int) -> JSON:
    starts: dict[int, float] = {}
    for span in trace.spans:
        starts.setdefault(span.lane, span.start)
    # The first lanes to start, drawn in their own order: in a federation, the server and its first
    # clients.
    shown = sorted(sorted(starts, key=lambda lane: (starts[lane], lane))[:LANES])
    # Spans are sorted by start, so these are the earliest of all lanes.
    of_lanes = [span for span in trace.spans if span.lane in set(shown)]
    spans = of_lanes[:most]
    begin = spans[0].start
    end = max(span.start + span.duration for span in spans)
    window = _window(spans)
    per_unit, unit = (1000.0, "s") if window > 10_000 else (1.0, "ms")
    rows = {lane: row for row, lane in enumerate(shown)}
    bars: dict[str, list[list[Any]]] = {name: [] for name in (*CATEGORIES, "other")}
    for span in spans:
        # A late start needs more digits than a length for the same precision.
        start = short(span.start / per_unit, 8)
        length = short(span.duration / per_unit)
        name = html.escape(span.name, quote=False)
        bars[_category(span)].append([rows[span.lane], start, length, name])
    return {
        "run": run,
        "lanes": [html.escape(recorded(trace.lanes[lane]), quote=False) for lane in shown],
        "unit": unit,
        "range": [begin / per_unit, (begin + window) / per_unit],
        "end": end / per_unit,
        "spans": {name: drawn for name, drawn in bars.items() if drawn},
        "note": _timeline_note(trace, len(shown), len(spans), kept=len(of_lanes), end=end),
    }


def _timeline_note(trace: RunTimeline, lanes: int, drawn: int, kept: int, end: float) -> str:
    parts = []
    more = len(trace.lanes) - lanes
    if more > 0:
        parts.append(
            translated(
                "{drawn} of {all} lanes are drawn, the first to start; {more} more in trace.json.",
                drawn=lanes,
                all=count(len(trace.lanes)),
                more=count(more),
            )
        )
    if drawn < kept:
        parts.append(
            translated(
                "The first {drawn} of their {all} spans are drawn, to {end}.",
                drawn=count(drawn),
                all=count(kept),
                end=duration(end / 1000),
            )
        )
    if trace.dropped:
        parts.append(
            translated(
                "The run recorded only its first spans and dropped {count}.",
                count=count(trace.dropped),
            )
        )
    return " ".join(parts)


def _window(spans: Sequence[TimelineSpan]) -> float:
    """Return the milliseconds to show first: 300, but between 40 and 400 spans."""
    begin = spans[0].start

    def until(index: int) -> float:
        span = spans[min(index, len(spans)) - 1]
        return span.start + span.duration - begin

    return max(min(max(300.0, until(40)), until(400)), 0.001)


def _category(span: TimelineSpan) -> str:
    return span.category if span.category in CATEGORIES else "other"


def _partition(partition: PartitionSummary, users: Sequence[str]) -> JSON:
    clients = len(partition.counts)
    width = len(partition.classes) or 1
    # Whole clients are left out, never single classes.
    every = max(1, -(-clients * width // CELLS))
    shown = range(0, clients, every)
    ordered = sorted(partition.counts)
    facts = [
        translated("{count} clients", count=count(clients)),
        translated("{count} examples", count=count(sum(ordered))),
        translated(
            "{low} to {high} each, median {median}",
            low=count(ordered[0]),
            high=count(ordered[-1]),
            median=count(ordered[clients // 2]),
        ),
    ]
    if every > 1:
        facts.append(translated("every {number}th client is drawn", number=every))
    cells = None
    if partition.histograms:
        # A row for each class, over the clients.
        drawn = [partition.histograms[client] for client in shown]
        cells = list(map(list, zip(*drawn, strict=True)))
    return {
        "description": recorded(partition.description),
        "users": listed(users),
        "facts": ", ".join(facts) + ".",
        "clients": list(shown),
        "counts": [partition.counts[client] for client in shown],
        "names": [html.escape(partition.called(client), quote=False) for client in shown],
        "classes": [html.escape(name, quote=False) for name in partition.classes],
        "cells": cells,
    }


def _means(
    column: Sequence[float | None], stretches: Sequence[tuple[int, int]]
) -> list[float | None]:
    """Return the mean of the known values in each stretch."""
    means = []
    for start, end in stretches:
        known = [value for value in column[start:end] if value is not None]
        means.append(short(sum(known) / len(known)) if known else None)
    return means


def short(value: float | None, digits: int = 6) -> float | None:
    """Round to `digits` significant digits: six suffice for drawing, and keep the file small."""
    return None if value is None else float(f"{value:.{digits}g}")


def xy(x: str, y: str, series: Sequence[JSON], metric: str = "", log: bool = False) -> JSON:
    """Return a figure with two axes. metric: of the vertical axis; a share is drawn in percent."""
    return {
        "kind": "xy",
        "x": translated(x),
        "y": translated(y),
        "series": list(series),
        "share": is_share(metric),
        "log": log,
    }
