"""Differential privacy in the report: promises of the runs, and the spent budget over time."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from dure.report.charts import JSON, style, xy
from dure.report.document import section
from dure.report.formatting import UNKNOWN, escape
from dure.report.html_fragments import figure_of, grid, swatch, table
from dure.report.json_values import listing, mapping, number, text_of
from dure.report.runs import ReportedRun
from dure.report.translation import recorded, translated

FIGURE = "epsilon"
"""Name of the figure."""


def figures(runs: Sequence[ReportedRun]) -> dict[str, JSON]:
    """Return epsilon over rounds or steps, of all runs that report epsilon."""
    series = []
    for place, run in enumerate(runs):
        points = [(line.step, line.metrics.get("epsilon")) for line in run.steps]
        told = [(step, value) for step, value in points if value is not None]
        if told:
            series.append(
                {
                    "type": "lines",
                    "name": run.label,
                    "x": [step for step, _ in told],
                    "y": [value for _, value in told],
                    **style(place),
                }
            )
    return {FIGURE: xy("rounds or steps", "epsilon", series)} if series else {}


def promises(runs: Sequence[ReportedRun], drawn: Mapping[str, JSON]) -> str:
    """Return the section; empty if no run has a promise. drawn: its figure."""
    rows = "".join(
        _row(place, run, mapping(one))
        for place, run in enumerate(runs)
        for one in listing(run.promises)
    )
    if not rows:
        return ""
    lead = (
        "One client or example changes the probability of any outcome of a run’s models by at "
        "most a factor of e to the power of epsilon, except with probability delta. The "
        "guarantee does not cover metrics, which are measured without noise, or a run that ends "
        "at a target of them; settings that were chosen by looking at data; and the list of "
        "enrolled clients. Secure aggregation hides single updates from the server, but cannot "
        "enforce that clients clip them."
    )
    head = ("run", "epsilon", "delta", "of any", "against", "neighbouring data", "sampling")
    words = ("of any", "against", "neighbouring data", "sampling")
    shown = [figure_of(FIGURE, "Epsilon over the run")] if FIGURE in drawn else []
    body = table("Promises", "long", head, rows, texts=words) + grid(shown)
    return section("privacy", "Differential privacy", lead, f'<div class="pipeline">{body}</div>')


def in_a_line(run: ReportedRun) -> str | None:
    """Return a run's promises in a line for a terminal; None without a promise."""
    said = [text_of(mapping(one).get("said")) for one in run.promises]
    return "; ".join(filter(None, said)) or None


def _row(place: int, run: ReportedRun, one: Mapping[str, Any]) -> str:
    who = f"<div>{swatch(place)}<span>{escape(run.label)}</span></div>"
    epsilon, delta = number(one.get("epsilon")), number(one.get("delta"))
    numbers = (
        f"<td>{_digits(epsilon, translated('no bound'))}</td><td>{_digits(delta, UNKNOWN)}</td>"
    )
    words = "".join(
        f'<td class="text">{escape(recorded(text_of(one.get(name)) or UNKNOWN))}</td>'
        for name in ("unit", "against", "neighbours", "sampling")
    )
    return f'<tr><th scope="row">{who}</th>{numbers}{words}</tr>'


def _digits(value: float | None, without: str) -> str:
    return without if value is None else f"{value:.4g}"
