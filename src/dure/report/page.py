"""The report of runs, from dataclasses to HTML: header, time bars, the places of charts, footer;
`write_report`."""

from __future__ import annotations

import json
import shlex
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from dure.report import charts
from dure.report.document import document, plotly_source, section, source
from dure.report.federated import fairness, federations, figures
from dure.report.parts import bar, legend, percents, swatch, world
from dure.report.pipeline import pipelines
from dure.report.ranks import holdings
from dure.report.read import number, read_runs
from dure.report.runs import Run, Runs, Worker
from dure.report.table import table
from dure.report.words import count, duration, escape, size

_BARS = 6


def write_report(folders: Sequence[Path], out: Path, title: str | None = None) -> Path:
    """Write one self-contained HTML page about the runs in `folders`; its path is returned.

    `folders`: run folders, comparison folders, or folders with runs right below them. `out`: the
        file to write.
    ImportError: plotly is not installed. RunFolderError: there is no run in one of the folders.
    """
    plotly = plotly_source("the report")
    runs = read_runs(folders)
    out = Path(out)
    out.parent.mkdir(parents=True, exist_ok=True)
    out.write_text(page(runs, title or _title(runs), plotly), encoding="utf-8")
    return out


def page(runs: Runs, title: str, plotly: str) -> str:
    """The whole HTML document; `plotly`: the source of plotly.js."""
    curves, timelines = charts.curves(runs.runs), charts.timelines(runs.runs)
    partitions, drawn = charts.partitions(runs.runs), figures(runs.runs)
    data = {
        "runs": [{"label": run.label, **charts.style(i)} for i, run in enumerate(runs.runs)],
        "curves": curves,
        "timelines": timelines,
        "partitions": partitions,
        "figures": drawn,
    }
    sections = [
        _header(runs, title),
        table(runs),
        _curves(runs.runs) if curves else "",
        _time_bars(runs.runs),
        pipelines(runs.runs),
        holdings(runs.runs),
        _timelines(runs.runs, timelines),
        federations(runs.runs, drawn),
        fairness(runs.runs, drawn),
        _partitions(partitions),
        _footer(runs.runs),
    ]
    return document(title, sections, data, plotly, source(__file__, "page.js"))


# Header: what was asked.


def _title(runs: Runs) -> str:
    tasks = list(dict.fromkeys(_task(run) for run in runs.runs))
    task = tasks[0] if len(tasks) == 1 else f"{len(tasks)} tasks" if tasks else "comparison"
    return (
        f"{task}: {runs.runs[0].label}" if len(runs.runs) == 1 else f"{task}: {len(runs.runs)} runs"
    )


def _header(runs: Runs, title: str) -> str:
    asked: list[tuple[str, Callable[[Run], str | None]]] = [
        ("task", _task),
        ("stop", _stop),
        ("seed", lambda run: _plain(run.config.get("seed"))),
        ("parameters", lambda run: _counted(run, "parameters")),
        ("training examples", lambda run: _counted(run, "train_examples")),
        ("test examples", lambda run: _counted(run, "test_examples")),
        ("versions", _versions),
    ]
    facts = []
    for name, fact in asked:
        values = list(dict.fromkeys(value for run in runs.runs if (value := fact(run))))
        if values:
            more = f" and {len(values) - 3} more" if len(values) > 3 else ""
            facts.append(
                f"<div><dt>{name}</dt><dd>{escape(' / '.join(values[:3]) + more)}</dd></div>"
            )
    return (
        f'<header><div class="top"><p class="mark">dure</p>'
        f'<button type="button" id="theme" aria-label="Switch between light and dark">'
        f'<span aria-hidden="true">◐</span> Theme</button></div>'
        f"<h1>{escape(title)}</h1><dl>{''.join(facts)}</dl>{_repeat(runs.runs)}</header>"
    )


def _repeat(runs: Sequence[Run]) -> str:
    """How to do the same again: the command where it can be told, else the settings."""
    rows = []
    for run in runs:
        line = command(run)
        code = f"<code>{escape(line)}</code>" if line else f"<span>{escape(_settings(run))}</span>"
        rows.append(f"<dt>{escape(run.label)}</dt><dd>{code}</dd>")
    opened = " open" if len(runs) == 1 else ""
    return (
        f"<details{opened}><summary>To run it again</summary><dl>{''.join(rows)}</dl></details>"
        if rows
        else ""
    )


def command(run: Run) -> str | None:
    """The shell command that repeats a run, or None where its configuration cannot be said in
    flags.

    A `command` in config.json is taken as it stands. Else: a named task, a strategy whose fields
    are numbers, words or null, and a world of processes or a simulated one. What was not set is
    left to its default.
    """
    given = run.config.get("command")
    if isinstance(given, str) and given:
        return given
    task, strategy, world, stop = (
        _dict(run.config.get(key)) for key in ("task", "strategy", "world", "stop")
    )
    names = [task.get("name"), strategy.get("from", strategy.get("name"))]
    workers = {"processes": world.get("ranks"), "threads": world.get("threads")}.get(
        str(world.get("name"))
    )
    if not all(isinstance(name, str) for name in names) or (
        workers is None and world.get("name") != "simulated"
    ):
        return None
    flags = _fields(strategy) | _dict(task.get("options"))
    asked = {
        **stop,
        "workers": workers,
        **_of_threads(world),
        **_conditions(world),
        **{key: run.config.get(key) for key in ("seed", "evaluate_every")},
    }
    asked["target"] = [
        f"{metric}={goal}" for metric, goal in _dict(stop.get("target")).items()
    ] or None
    flags |= {key: value for key, value in asked.items() if value is not None}
    words = ["dure", "train", *map(str, names)]
    for key, value in flags.items():
        values = value if isinstance(value, list) else [value]
        # A bool would be a bare flag, which one depends on a default that is not known here.
        if any(isinstance(one, (bool, dict, list)) for one in values):
            return None
        words += [f"--{key.replace('_', '-')}", *(_plain(one) or "None" for one in values)]
    return shlex.join(words)


USUAL = {
    "processes": {"deadline": "60.0", "backend": "dure"},
    "simulated": {
        "devices": "equal:100.0",
        "availability": "always",
        "arrival": "still",
        "drop_out": "0.0",
        "attack": "none",
        "attackers": "0.0",
        "attackers_change": "False",
        "engine": "auto",
        "processes": "None",
    },
}
"""What worlds are where nothing is said, as config.json has it; a report does without torch, and so
without them."""


def _conditions(world: dict[str, Any]) -> dict[str, Any]:
    """What was set of a world of processes or a simulated one."""
    usual = USUAL.get(str(world.get("name")), {})
    return {
        name: world[name]
        for name, value in usual.items()
        if name in world and str(world[name]) != value
    }


def _of_threads(world: dict[str, Any]) -> dict[str, Any]:
    """The flags of a world of threads; systems at home there take the first without harm."""
    if world.get("name") != "threads":
        return {}
    devices = world.get("devices")
    return {
        "world": "threads",
        "devices": devices if isinstance(devices, list) and set(devices) != {"cpu"} else None,
    }


def _fields(strategy: dict[str, Any]) -> dict[str, Any]:
    """What was set of a strategy: all but its name, and where one of a user's own is found."""
    return {key: value for key, value in strategy.items() if key not in ("name", "from")}


def _settings(run: Run) -> str:
    strategy = _dict(run.config.get("strategy"))
    parts = [str(strategy.get("name", "strategy unknown"))]
    parts += [
        f"{key.replace('_', ' ')} {_plain(value)}" for key, value in _fields(strategy).items()
    ]
    return " · ".join([*parts, world(run)])


def _task(run: Run) -> str:
    task = _dict(run.config.get("task"))
    return str(task.get("title") or task.get("name") or "a task made in Python")


def _stop(run: Run) -> str | None:
    stop = {key: value for key, value in _dict(run.config.get("stop")).items() if value is not None}
    return " or ".join(
        f"{key} {_plain(value)}" if key == "target" else f"{_plain(value)} {key}"
        for key, value in stop.items()
    )


def _versions(run: Run) -> str:
    return ", ".join(
        f"{key} {_plain(value)}" for key, value in _dict(run.config.get("versions")).items()
    )


def _counted(run: Run, key: str) -> str | None:
    value = number(run.config.get(key))
    return None if value is None else count(value)


def _plain(value: object) -> str | None:
    if value is None:
        return None
    if isinstance(value, dict):
        return ", ".join(f"{key} {_plain(inner)}" for key, inner in value.items())
    if isinstance(value, float) and value.is_integer():
        return str(int(value))
    return json.dumps(value) if isinstance(value, (bool, list)) else str(value)


def _dict(value: object) -> dict[str, Any]:
    return value if isinstance(value, dict) else {}


# Charts: the places that page.js draws into.


def _curves(runs: Sequence[Run]) -> str:
    chips = "".join(
        f'<button type="button" aria-pressed="true" data-run="{index}">'
        f"{swatch(index)}<span>{escape(run.label)}</span></button>"
        for index, run in enumerate(runs)
    )
    body = (
        '<div class="controls"><div class="choice" id="curve-metric" role="group" aria-label="Vertical axis"></div>'
        '<span class="against">against</span>'
        '<div class="choice" id="curve-axis" role="group" aria-label="Horizontal axis"></div>'
        '<div class="checks"><label><input type="checkbox" id="log-x"> log x</label>'
        '<label><input type="checkbox" id="log-y"> log y</label></div></div>'
        '<div class="chart" id="curves" role="img" aria-label="Curves of the runs"></div>'
        '<p class="aside" id="curve-note" aria-live="polite"></p>'
        f'<div class="legend" role="group" aria-label="Runs shown">{chips}</div>'
    )
    lead = (
        "The same runs by what they reached and by what it cost. A click on a run below hides or "
        "shows it. "
        '<span class="mouse">Drag to zoom, double-click to go back.</span>'
    )
    return section("learning", "Curves", lead, body)


def _time_bars(runs: Sequence[Run]) -> str:
    """Where the time went: one stacked bar a worker, each run to its own scale."""
    blocks = []
    for index, run in enumerate(runs):
        workers = _chosen(run.result.workers)
        if not workers:
            continue
        longest = max(worker.total for _, worker in workers)
        rows = "".join(
            f'<li><span class="who">{escape(name)}{_moved(worker)}</span>{bar(worker, longest)}'
            f'<span class="much">{duration(worker.total)}<small>{percents(worker)}</small></span></li>'
            for name, worker in workers
        )
        blocks.append(
            f'<div class="bars"><h3>{swatch(index)}<span>{escape(run.label)}</span></h3><ul>{rows}</ul></div>'
        )
    if not blocks:
        return ""
    lead = (
        f"{legend(charts.CATEGORIES[:3])}One bar a worker, to the scale of its run; seconds and "
        f"shares at its right, "
        "the bytes that it sent (↑) and received (↓) below its name."
    )
    return section(
        "time", "Where the time went", lead, f'<div class="grid">{"".join(blocks)}</div>'
    )


def _moved(worker: Worker) -> str:
    """What passed through a worker: a master's bytes beside those of its workers."""
    if not worker.sent and not worker.received:
        return ""
    return f"<small>↑ {size(worker.sent)} ↓ {size(worker.received)}</small>"


def _chosen(workers: Sequence[Worker]) -> list[tuple[str, Worker]]:
    """All of a few workers; of many, the first (a federation's server) and five from the busiest to
    the least busy."""
    if len(workers) <= _BARS + 2:
        return [(worker.name, worker) for worker in workers]
    rest = sorted(workers[1:], key=lambda worker: -(worker.compute + worker.communication))
    marks = ("busiest", "upper quartile", "median", "lower quartile", "least busy")
    places = [round(place * (len(rest) - 1) / 4) for place in range(5)]
    chosen = [
        (f"{rest[at].name}, {mark}", rest[at]) for at, mark in zip(places, marks, strict=True)
    ]
    return [(f"{workers[0].name}", workers[0]), *chosen]


def _timelines(runs: Sequence[Run], timelines: Sequence[dict[str, Any]]) -> str:
    if not timelines:
        return ""
    # The first run where somebody waits for somebody says the most.
    chosen = next((place for place, one in enumerate(timelines) if len(one["lanes"]) > 1), 0)
    options = "".join(
        f'<option value="{place}"{" selected" if place == chosen else ""}>{escape(runs[one["run"]].label)}</option>'
        for place, one in enumerate(timelines)
    )
    body = (
        f'<div class="controls"><label>run <select id="timeline-run">{options}</select></label>'
        '<div class="choice" id="timeline-move" role="group" aria-label="Part of the timeline">'
        '<button type="button" data-move="earlier" aria-label="Earlier">←</button>'
        '<button type="button" data-move="later" aria-label="Later">→</button>'
        '<button type="button" data-move="out" aria-label="Zoom out">−</button>'
        '<button type="button" data-move="in" aria-label="Zoom in">+</button>'
        '<button type="button" data-move="all">all</button></div></div>'
        '<div class="chart" id="timeline" role="img" aria-label="Timeline of the chosen run"></div>'
        '<p class="aside" id="timeline-note" aria-live="polite"></p>'
    )
    lead = f"{legend(charts.CATEGORIES)}One lane a rank, thread, client or server, from the start of the run."
    return section("timelines", "Timeline", lead, body)


def _partitions(partitions: Sequence[dict[str, Any]]) -> str:
    figures = "".join(
        f"<figure{' class=wide' if len(one['clients']) > 20 else ''}><figcaption>"
        f'<h3>{escape(one["description"])}</h3><p class="aside">{escape(one["facts"])} '
        f"Used by {escape(one['users'])}.</p></figcaption>"
        f'<div class="chart partition" data-partition="{place}" role="img" '
        'aria-label="Examples per client"></div></figure>'
        for place, one in enumerate(partitions)
    )
    if not figures:
        return ""
    lead = (
        "How the training examples lie with the clients: how many each has, and of which classes."
    )
    return section("data-clients", "Data per client", lead, f'<div class="grid">{figures}</div>')


def _footer(runs: Sequence[Run]) -> str:
    versions = "; ".join(dict.fromkeys(filter(None, map(_versions, runs)))) or "unknown"
    return (
        "<footer><h2>What the words mean</h2>"
        "<p><b>Epochs</b> are examples trained on, by all workers together, over training "
        "examples. <b>Time</b> is "
        "training wall time; evaluation and checkpoints are left out. <b>Compute</b> is forward, "
        "backward and update, "
        "<b>communication</b> is time in transfers, <b>idle</b> is waiting for the slowest peer to "
        "arrive. "
        "<b>Bytes sent</b> are payload bytes handed to the network or its simulation; per worker "
        "means the mean over "
        "ranks, or over all clients of a federation. 1 MB is 10<sup>6</sup> bytes. <b>Peak "
        "memory</b> is the largest "
        "process’s. <b>Best</b> is the best evaluation, <b>final</b> the last. <b>To a target</b> "
        "counts steps or "
        "rounds on the best-so-far curve, interpolated between evaluations. Training loss is drawn "
        "as the mean "
        "of each stretch of the run; its bytes lie between those of two evaluations.</p>"
        f'<p class="aside">{escape(versions)}</p></footer>'
    )
