"""Statistics over runs that differ only in their seed: a row for each system."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence

from dure.record.history import is_spread
from dure.record.spread import Spread, spread
from dure.report import charts
from dure.report.document import section
from dure.report.formatting import UNKNOWN, duration, escape, metric_name, metric_value, size
from dure.report.runs import ReportedRun, is_simulated, virtual_seconds
from dure.report.translation import translated

_SAME = ("label", "task", "strategy", "world", "stop")
"""Keys of config.json that are equal in runs that differ only in their seed."""


def groups(runs: Sequence[ReportedRun]) -> list[list[ReportedRun]]:
    """Return groups of runs that differ only in their seed, in the order of the runs."""
    found: dict[str, list[ReportedRun]] = {}
    for run in runs:
        same = {name: run.config.get(name) for name in _SAME}
        found.setdefault(json.dumps(same, sort_keys=True), []).append(run)
    return [
        group for group in found.values() if len({str(run.config.get("seed")) for run in group}) > 1
    ]


def over_seeds(runs: Sequence[ReportedRun]) -> str:
    """Return the section with a row for each system with several seeds; empty without any."""
    together = groups(runs)
    if not together:
        return ""
    several = [run for group in together for run in group]
    columns = _columns(several)
    head = "".join(
        f'<th scope="col">{escape(translated(name))}</th>'
        for name in ("system", "seeds", *(name for name, _, _ in columns))
    )
    rows = ""
    for group in together:
        label = group[0].config.get("label") or group[0].label
        seeds = f'<td data-value="{len(group)}">{len(group)}</td>'
        cells = "".join(_cell(group, value, text) for _, value, text in columns)
        rows += f'<tr><th scope="row"><span>{escape(label)}</span></th>{seeds}{cells}</tr>'
    body = (
        '<div class="scroll" role="region" aria-labelledby="over-seeds" tabindex="0">'
        f"<table><thead><tr>{head}</tr></thead><tbody>{rows}</tbody></table></div>"
    )
    lead = (
        "Runs that differ only in the seed: the mean, the standard deviation, and below them the "
        "interval that holds the mean of all seeds with a probability of 95 %. Two systems whose "
        "intervals do not overlap differ by more than their seeds."
    )
    return section("over-seeds", "Over seeds", lead, body)


SeedColumn = tuple[str, Callable[[ReportedRun], float | None], Callable[[float | None], str]]
"""Heading, value of a run, and its text."""


def _columns(runs: Sequence[ReportedRun]) -> list[SeedColumn]:
    columns: list[SeedColumn] = []
    for key in charts.metrics(runs):
        if not is_spread(key):
            columns.append(_metric(key))
    if not columns:
        columns.append(("train loss", lambda run: run.result.train_loss, _loss))
    columns.append(("time", _seconds, duration))
    columns.append(("virtual time", virtual_seconds, duration))
    columns.append(("sent per worker", lambda run: run.result.bytes_per_worker, size))
    return [one for one in columns if any(one[1](run) is not None for run in runs)]


def _loss(value: float | None) -> str:
    return metric_value("loss", value)


def _seconds(run: ReportedRun) -> float | None:
    """Return the training seconds; None for a simulation, whose real time means nothing."""
    return None if is_simulated(run) else run.result.seconds


def _metric(key: str) -> SeedColumn:
    return (
        metric_name(key),
        lambda run: run.result.final.get(key),
        lambda value: metric_value(key, value),
    )


def _cell(
    group: Sequence[ReportedRun],
    value: Callable[[ReportedRun], float | None],
    text: Callable[[float | None], str],
) -> str:
    found = spread([number for number in map(value, group) if number is not None])
    if found is None:
        return f"<td>{UNKNOWN}</td>"
    return f'<td data-value="{found.mean}">{escape(text(found.mean))}{_around(found, text)}</td>'


def _around(found: Spread, text: Callable[[float | None], str]) -> str:
    """Return deviation and interval; empty if the deviation is 0 or unknown."""
    if not found.deviation:
        return ""
    return (
        f" ±{escape(text(found.deviation))}"
        f"<small>{_between(escape(text(found.low)), escape(text(found.high)))}</small>"
    )


def _between(low: str, high: str) -> str:
    return translated("{low} to {high}", low=low, high=high)
