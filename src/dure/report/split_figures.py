"""Figures of split learning, as plain JSON: rounds, and the leakage in each round."""

from __future__ import annotations

import html
from collections.abc import Sequence

from dure.report.charts import JSON, metrics, short, style, xy
from dure.report.federated_figures import ROWS
from dure.report.formatting import metric_name
from dure.report.runs import PartySpan, ReportedRun, SplitFacts, clock_of
from dure.report.translation import recorded, translated

PARTS = {"head": "compute", "tail": "checkpoint", "end": "evaluation", "link": "communication"}
"""Activities, and the names of their colours."""

_ABOVE = 1.03
"""End of an axis whose values end at 1."""

STEPS = 48
"""Spans in the figure of the first steps."""

LEAKS = {
    "norm_leak_auc": "Labels, by the length of gradients",
    "direction_leak_auc": "Labels, by the direction of gradients",
    "cluster_leak_auc": "Labels, by clusters of smashed data",
    "distance_correlation": "Inputs, by distance correlation",
}
"""Leakage metrics of a round, in words."""


def figures(runs: Sequence[ReportedRun]) -> dict[str, JSON]:
    """Return the figures by name, without empty figures.

    Figures of a run end in its place in the report: steps-0, round-0. Figures of all runs end in
    the metric: leaks-norm_leak_auc, trade-norm_leak_auc.
    """
    drawn: dict[str, JSON | None] = {}
    for place, run in enumerate(runs):
        if run.divided is not None:
            seconds = translated(f"{clock_of(run) or 'virtual'} seconds")
            drawn[f"steps-{place}"] = _lanes(run.divided.first[:STEPS], run.divided, seconds)
            drawn[f"round-{place}"] = _lanes(run.divided.newest, run.divided, seconds)
    for meter in LEAKS:
        drawn[f"leaks-{meter}"] = _curves(runs, meter)
        drawn[f"trade-{meter}"] = _trade(runs, meter)
    return {name: figure for name, figure in drawn.items() if figure is not None}


def _lanes(doings: Sequence[PartySpan], divided: SplitFacts, seconds: str) -> JSON | None:
    """Return a lane for the server and each client; None if no activity took time."""
    if not any(one.seconds for one in doings):
        return None
    everybody = [*divided.first, *divided.newest]
    names = sorted({one.who for one in everybody}, key=_in_order)[:ROWS]
    row = {name: place for place, name in enumerate(names)}
    series = []
    for what, colour in PARTS.items():
        spans = [
            [row[one.who], short(one.began, 8), short(one.seconds), None]
            for one in doings
            if one.what == what and one.who in row
        ]
        if spans:
            series.append({"name": translated(what), "color": f"var(--{colour})", "spans": spans})
    begin = min(one.began for one in doings)
    end = max(one.began + one.seconds for one in doings)
    margin = (end - begin) / 100
    return {
        "kind": "lanes",
        "x": seconds,
        "who": "",
        "range": [short(begin - margin, 8), short(end + margin, 8)],
        "rows": [html.escape(recorded(name), quote=False) for name in names],
        "series": series,
    }


def _in_order(name: str) -> tuple[bool, int, str]:
    """Return a sort key that puts the server first, then clients by number."""
    kind, _, number = name.partition(" ")
    return bool(number), int(number) if number.isdigit() else 0, kind


def _curves(runs: Sequence[ReportedRun], meter: str) -> JSON | None:
    """Return a curve of the leakage metric over rounds for each run that has it."""
    series = []
    for place, run in enumerate(runs):
        known = [
            (line.step, value)
            for line in run.steps
            if (value := line.metrics.get(meter)) is not None
        ]
        if known:
            x = [round for round, _ in known]
            y = [short(value) for _, value in known]
            kind = "lines" if len(known) > 1 else "markers"
            series.append({"type": kind, "name": _named(run), **style(place), "x": x, "y": y})
    if not series:
        return None
    whole = {"whole": True, "ranges": {"y": [0, _ABOVE]}}
    if meter == "distance_correlation":
        return {**xy("round", "distance correlation", series), **whole}
    return {**xy("round", "AUC", series), **whole, "guess": 0.5}


def _trade(runs: Sequence[ReportedRun], meter: str) -> JSON | None:
    """Return the runs' main metric over their leakage in the newest round, for several runs."""
    keys = [key for key in metrics(runs) if key.startswith("test_")]
    series = []
    for place, run in enumerate(runs):
        leaked = run.leakage.measured.get(meter) if run.leakage else None
        reached = run.result.final.get(keys[0]) if keys else None
        if leaked is not None and reached is not None:
            series.append(
                {
                    "type": "markers",
                    "name": _named(run),
                    **style(place),
                    "x": [short(leaked)],
                    "y": [short(reached)],
                }
            )
    if len(series) < 2:
        return None
    figure = xy("leak in the newest round", metric_name(keys[0]), series, metric=keys[0])
    return {**figure, "ranges": {"x": [0, _ABOVE]}}


def _named(run: ReportedRun) -> str:
    defence = run.leakage.defence if run.leakage else "none"
    more = "" if defence == "none" or defence in run.label else f", {defence}"
    return html.escape(f"{run.label}{more}", quote=False)
