"""Overview of several runs: the main metric against time, bytes and memory, a point a run.

The families of systems have colours and markers of their own. Real and virtual seconds have
separate charts, since they are not comparable.
"""

from __future__ import annotations

import html
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from dure.catalog import family_names
from dure.record.training_amount import unlike
from dure.report import charts
from dure.report.document import section
from dure.report.formatting import (
    duration,
    escape,
    higher_is_better,
    is_share,
    metric_name,
    metric_value,
    size,
)
from dure.report.json_values import mapping, text_of
from dure.report.runs import ReportedRun, is_simulated, virtual_seconds
from dure.report.translation import recorded, translated

JSON = dict[str, Any]

_OTHER = "other"
"""Family of a system of the user."""

_LOOKS = {
    "single worker": ("var(--run-7)", "diamond"),
    "data parallel": ("var(--run-0)", "circle"),
    "model parallel": ("var(--run-5)", "square"),
    "averaging": ("var(--run-2)", "triangle-up"),
    "parameter server": ("var(--run-1)", "cross"),
    "shared memory": ("var(--run-4)", "x"),
    "federated": ("var(--run-3)", "circle"),
    "split learning": ("var(--run-6)", "triangle-down"),
    _OTHER: ("var(--soft)", "circle"),
}
"""Colour and marker of each family."""


class OverviewAxis(NamedTuple):
    """A horizontal axis of the overview.

    Args:
        key: identifies the axis.
        heading: words for the heading of the chart, after "against".
        pick: function from a run to its value; None if unknown.
        text: function from a value to its text.
    """

    key: str
    heading: str
    pick: Callable[[ReportedRun], float | None]
    text: Callable[[float | None], str]


_VIRTUAL = "virtual"

_AXES = (
    OverviewAxis("seconds", "time", lambda run: _real(run), duration),
    OverviewAxis(_VIRTUAL, "virtual time", virtual_seconds, duration),
    OverviewAxis("bytes", "bytes sent", lambda run: run.result.bytes_per_worker, size),
    OverviewAxis("memory", "peak memory", lambda run: run.result.peak_memory, size),
    OverviewAxis("device", "device memory", lambda run: run.result.device_memory, size),
)


def overview(runs: Sequence[ReportedRun]) -> JSON | None:
    """Return the data of the charts; None for a single run, or without anything to draw."""
    key = _metric(runs)
    if len(runs) < 2 or key is None:
        return None
    names = family_names()
    families = [_family(run, names) for run in runs]
    shown = [one for one in _LOOKS if one in families]
    drawn = [_chart(axis, runs, key, [shown.index(one) for one in families]) for axis in _AXES]
    found = [chart for chart in drawn if chart["points"]]
    if not found:
        return None
    return {
        "metric": _named(key),
        "share": is_share(key),
        "rises": higher_is_better(key),
        "range": _range([point["y"] for chart in found for point in chart["points"]]),
        "families": [
            {"name": translated(name), "color": _LOOKS[name][0], "symbol": _LOOKS[name][1]}
            for name in shown
        ],
        "charts": found,
    }


def overview_section(runs: Sequence[ReportedRun], data: JSON | None, controls: str) -> str:
    """Return the section; empty without data. controls: HTML above the charts."""
    if data is None:
        return ""
    figures = "".join(
        f"<figure><figcaption><h4>{escape(chart['heading'])}</h4></figcaption>"
        f'<div class="chart" data-overview="{place}" role="img" '
        f'aria-label="{escape(chart["heading"])}"></div></figure>'
        for place, chart in enumerate(data["charts"])
    )
    keys = "".join(
        f'<span class="key"><svg class="family" data-family="{place}" viewBox="7 -1 14 14" '
        f'aria-hidden="true"></svg>{escape(translated(one["name"]))}</span>'
        for place, one in enumerate(data["families"])
    )
    differs = unlike([(_system(run), run.result.amount) for run in runs], translated)
    note = "" if differs is None else f'<p class="unlike">{escape(differs)}</p>'
    corner = "top" if data["rises"] else "bottom"
    lead = translated(
        "A point a run; the best runs are in the {corner} left corner of each chart. Bytes are "
        "the mean over workers.",
        corner=translated(corner),
    )
    if any(chart["key"] == _VIRTUAL for chart in data["charts"]):
        lead += translated(
            " Virtual time is the time on the clock of a simulation, and has a chart of its own."
        )
    body = (
        f'{controls}{note}<div class="families">{keys}</div><div class="overview">{figures}</div>'
    )
    return section("overview", "Overview", lead, body)


def _metric(runs: Sequence[ReportedRun]) -> str | None:
    """Return the main metric; without test data the training loss, None without losses."""
    keys = charts.metrics(runs)
    if keys:
        return keys[0]
    return "train_loss" if any(run.result.train_loss is not None for run in runs) else None


def _named(key: str) -> str:
    return translated("training loss") if key == "train_loss" else metric_name(key)


def _real(run: ReportedRun) -> float | None:
    return None if is_simulated(run) else run.result.seconds


def _system(run: ReportedRun) -> str:
    """Return the label without the name of a folder, so that seeds of a system share it."""
    return text_of(run.config.get("label")) or run.label


def _family(run: ReportedRun, names: dict[str, str]) -> str:
    strategy = mapping(run.config.get("strategy"))
    name = _OTHER if "from" in strategy else names.get(str(strategy.get("name")), _OTHER)
    return name if name in _LOOKS else _OTHER


def _chart(
    axis: OverviewAxis, runs: Sequence[ReportedRun], key: str, families: Sequence[int]
) -> JSON:
    points: list[JSON] = []
    for place, (run, family) in enumerate(zip(runs, families, strict=True)):
        x = axis.pick(run)
        y = run.result.train_loss if key == "train_loss" else run.result.metric(key)
        if x is None or y is None:
            continue
        points.append(
            {
                "run": place,
                "family": family,
                "x": charts.short(x),
                "y": charts.short(y),
                "text": _text(run, key, y, axis, x),
                # A mean of models that no client has is no result of the run.
                "open": run.result.mean_of is not None,
            }
        )
    name = _named(key)
    return {
        "key": axis.key,
        "heading": translated(
            "{metric} against {cost}",
            metric=f"{name[0].upper()}{name[1:]}",
            cost=translated(axis.heading),
        ),
        "log": _is_wide([point["x"] for point in points]),
        "points": points,
    }


def _text(run: ReportedRun, key: str, y: float, axis: OverviewAxis, x: float) -> str:
    """Return what the pointer shows: run, metric, cost. Escaped, since plotly reads HTML."""
    lines = [
        f"<b>{html.escape(run.label, quote=False)}</b>",
        f"{html.escape(_named(key), quote=False)} {metric_value(key, y)}",
        f"{translated(axis.heading)} {axis.text(x)}",
    ]
    most = run.result.largest_sender
    if axis.key == "bytes" and most is not None:
        lines.append(f"{html.escape(recorded(most.name), quote=False)} {size(most.nbytes)}")
    if run.result.mean_of is not None:
        models = html.escape(recorded(run.result.mean_of), quote=False)
        lines.append(translated("mean of {models}", models=models))
    return "<br>".join(lines)


def _range(values: Sequence[float]) -> list[float]:
    """Return the range of the vertical axis, the same in all charts."""
    low, high = min(values), max(values)
    # Half a marker is beyond each end.
    around = 0.07 * (high - low) or 0.1 * abs(high) or 1.0
    return [low - around, high + around]


def _is_wide(values: Sequence[float]) -> bool:
    """Return whether an axis is logarithmic: the values differ by more than ten times."""
    known = [value for value in values if value > 0]
    return bool(known) and max(known) > 10 * min(known)
