"""Parameter servers in the report.

Staleness of weights, the workers' waiting time, measured traffic against the formula, owners of
shards and lost members; and, under a virtual clock, busy times of workers and servers.

    formula, for d bytes of weights:    d up a push, or the codec's bytes for d;
                                        d down a pull
"""

from __future__ import annotations

import html
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from dure.report.charts import CATEGORIES, JSON, SPANS, SPANS_OF_ALL_RUNS, short, style, xy
from dure.report.document import section
from dure.report.federated_figures import ROWS
from dure.report.formatting import UNKNOWN, count, escape, plural, size
from dure.report.html_fragments import figure_of, grid, swatch, table
from dure.report.runs import (
    BusySpan,
    ParameterServerFacts,
    ReportedRun,
    WorkerTime,
    clock_of,
    time_of,
)
from dure.report.translation import recorded, translated

SHARDS = 40
"""Most shards in the table of owners."""


class ParameterServerRun(NamedTuple):
    """A run with parameter servers, and its place in the report."""

    place: int
    run: ReportedRun
    servers: ParameterServerFacts


def _told(runs: Sequence[ReportedRun]) -> list[ParameterServerRun]:
    return [
        ParameterServerRun(place, run, run.servers)
        for place, run in enumerate(runs)
        if run.servers is not None
    ]


# Data for page.js.


def figures(runs: Sequence[ReportedRun]) -> dict[str, JSON]:
    """Return the figures by name, with the run's place: clocks-0, waiting-0, busy-0.

    Empty figures are left out.
    """
    told = _told(runs)
    most = min(SPANS, SPANS_OF_ALL_RUNS // max(len(told), 1))
    drawn: dict[str, JSON | None] = {}
    for place, run, servers in told:
        drawn[f"clocks-{place}"] = _clocks(servers)
        drawn[f"waiting-{place}"] = _waiting(place, run)
        drawn[f"busy-{place}"] = _busy(servers.busy[:most], clock_of(run))
    return {name: figure for name, figure in drawn.items() if figure is not None}


def _clocks(servers: ParameterServerFacts) -> JSON | None:
    if not servers.staleness:
        return None
    x = sorted(servers.staleness)
    y = [servers.staleness[behind] for behind in x]
    bars = {"type": "bar", "name": translated("pulls"), "color": "var(--compute)", "x": x, "y": y}
    return xy(translated("staleness in {unit}", unit=recorded(servers.counts)), "pulls", [bars])


def _waiting(place: int, run: ReportedRun) -> JSON | None:
    known = [
        (line.step, waited)
        for line in run.steps
        if (waited := line.metrics.get("waiting")) is not None
    ]
    if len(known) < 2:
        return None
    x = [round for round, _ in known]
    y = [short(waited) for _, waited in known]
    curve = {"type": "lines", "name": translated("waiting"), **style(place), "x": x, "y": y}
    return {**xy("round", "share of the workers’ time", [curve]), "share": True}


def _busy(busy: Sequence[BusySpan], clock: str | None) -> JSON | None:
    """Return a lane for each server and worker, from the start of the run."""
    names = sorted({one.who for one in busy}, key=_in_order)[:ROWS]
    if not names:
        return None
    row = {name: place for place, name in enumerate(names)}
    series = []
    for category in CATEGORIES:
        spans = [
            [row[one.who], short(one.began, 8), short(one.seconds), _numbered(one.clock)]
            for one in busy
            if one.category == category and one.who in row
        ]
        if spans:
            series.append(
                {"name": translated(category), "color": f"var(--{category})", "spans": spans}
            )
    return {
        "kind": "lanes",
        "x": translated(f"{clock or 'virtual'} seconds"),
        "who": "",
        "unit": translated("clock"),
        "rows": [html.escape(recorded(name), quote=False) for name in names],
        "series": series,
    }


def _in_order(name: str) -> tuple[str, int]:
    """Return a sort key that puts servers before workers, each in order of their numbers."""
    kind, _, number = name.partition(" ")
    return kind, int(number) if number.isdigit() else 0


def _numbered(clock: int | None) -> int | None:
    # Clocks count from 1 for readers, from 0 in the records.
    return None if clock is None else clock + 1


# The section.


def parameter_servers(runs: Sequence[ReportedRun], drawn: Mapping[str, JSON]) -> str:
    """Return the section, a block for each run; empty without any. drawn: its figures."""
    told = _told(runs)
    if not told:
        return ""
    lead = (
        "Servers own the weights by ranges; workers push gradients and pull weights. The "
        "staleness of a pull is in clocks: by how many steps the slowest worker of the group was "
        "behind the step for which the weights were taken. (The staleness of FedAsync counts "
        "models that were made in between.)"
    )
    blocks = "".join(_block(one, drawn) for one in told)
    return section("servers", "Parameter servers", lead, blocks)


def _block(one: ParameterServerRun, drawn: Mapping[str, JSON]) -> str:
    place, run, servers = one

    def figure(key: str, heading: str, note: str = "") -> str:
        name = f"{key}-{place}"
        return figure_of(name, heading, note) if name in drawn else ""

    small = (
        figure("clocks", "Staleness of pulls"),
        figure("waiting", "Waiting", "The workers’ time in which they did not compute."),
    )
    first = (
        "From the start of the run, as far as it was recorded: workers compute, the links of "
        "servers send weights."
    )
    return (
        f'<div class="pipeline"><h3>{swatch(place)}<span>{escape(run.label)}</span></h3>'
        f"<p>{escape(_facts(run, servers))}</p>{grid(small)}{_traffic(run, servers)}"
        f"{_owners(servers)}{figure('busy', 'Who was busy when', first)}</div>"
    )


def _facts(run: ReportedRun, servers: ParameterServerFacts) -> str:
    workers = len(_workers(run))
    owners = {shard.owner for shard in servers.shards if shard.owner is not None}
    said = [
        translated(
            "{servers} with {shards}, {workers}",
            servers=plural(len(owners), "server"),
            shards=plural(len(servers.shards), "shard"),
            workers=plural(workers, "worker"),
        ),
        translated(
            "{pushes} pushes, {pulls} pulls",
            pushes=count(servers.pushes),
            pulls=count(servers.pulls),
        ),
    ]
    seconds, clock = _seconds(run)
    if seconds:
        said.append(
            translated(
                "{pushes} pushes and {pulls} pulls a second of {clock} time at each shard",
                pushes=count(round(servers.pushes / seconds, 1)),
                pulls=count(round(servers.pulls / seconds, 1)),
                clock=translated(clock),
            )
        )
    said += [
        translated("{name} was lost: it {reason}", name=recorded(name), reason=recorded(why))
        for name, why in servers.lost.items()
    ]
    return "; ".join(said) + "."


def _workers(run: ReportedRun) -> list[WorkerTime]:
    return [one for one in run.result.workers if one.name.startswith("worker")]


def _seconds(run: ReportedRun) -> tuple[float | None, str]:
    """Return the duration of the run, and the kind of clock."""
    now = next((at for line in reversed(run.steps) if (at := time_of(line)) is not None), None)
    return (now, clock_of(run) or "virtual") if now is not None else (run.result.seconds, "wall")


def _traffic(run: ReportedRun, servers: ParameterServerFacts) -> str:
    """Return a table of the workers' bytes, measured and by the formula."""
    workers = _workers(run)
    nbytes = servers.nbytes
    if nbytes is None or not workers:
        return ""
    pushed = nbytes if servers.push_bytes is None else servers.push_bytes
    rows = ""
    for way, each, times, measured in (
        ("up", pushed, servers.pushes, sum(one.sent for one in workers)),
        ("down", nbytes, servers.pulls, sum(one.received for one in workers)),
    ):
        formula = each * times
        more = f"{measured / formula:.4g}" if formula else UNKNOWN
        rows += (
            f'<tr><th scope="row">{translated(way)}</th><td>{count(each)} × {count(times)}</td>'
            f"<td>{size(formula)}</td><td>{size(measured)}</td><td>{more}</td></tr>"
        )
    head = ("of all workers", "bytes each × times", "formula", "measured", "ratio")
    return table("Bytes", "long", head, rows)


def _owners(servers: ParameterServerFacts) -> str:
    """Return a table of the shards' owners at the end."""
    rows = ""
    for number, shard in enumerate(servers.shards[:SHARDS]):
        number_of = translated("server {number}", number=shard.owner)
        owner = translated("lost") if shard.owner is None else number_of
        keys = translated("{low} to {high}", low=count(shard.start), high=count(shard.stop - 1))
        rows += (
            f'<tr><th scope="row">{number}</th><td class="text">{owner}</td>'
            f"<td>{keys}</td>"
            f"<td>{size(shard.nbytes)}</td></tr>"
        )
    left = len(servers.shards) - SHARDS
    more = translated("{count} more shards are not shown.", count=count(left))
    note = f'<p class="aside">{more}</p>' if left > 0 else ""
    head = ("shard", "owned by", "keys", "weights")
    return table("Owners of the weights", "narrow", head, rows, texts=["owned by"]) + note
