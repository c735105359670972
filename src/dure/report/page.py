"""The page around the charts, from dataclasses to HTML: header, table of runs, time bars, footer; `write_report`.

What can be read without drawing is plain HTML here (it prints, and a screen reader reads it). The charts' data goes
in as one JSON element, which page.js hands to plotly. A Content-Security-Policy in the page forbids every request.
"""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path
from typing import Any

from dure.report import charts
from dure.report.read import Result, Run, Runs, Worker, number, read_runs
from dure.report.words import (
    UNKNOWN,
    count,
    duration,
    escape,
    higher_is_better,
    metric_name,
    metric_value,
    plural,
    size,
)

_BARS = 6
_NO_NETWORK = (
    "default-src 'none'; script-src 'unsafe-inline'; style-src 'unsafe-inline'; img-src data: blob:; "
    "base-uri 'none'; form-action 'none'"
)


def write_report(folders: Sequence[Path], out: Path, title: str | None = None) -> Path:
    """Write one self-contained HTML page about the runs in `folders`; its path is returned.

    `folders`: run folders, comparison folders, or folders with runs right below them. `out`: the file to write.
    ImportError: plotly is not installed. RunFolderError: there is no run in one of the folders.
    """
    plotly = _plotly()
    runs = read_runs(folders)
    out = Path(out)
    out.parent.mkdir(parents=True, exist_ok=True)
    out.write_text(page(runs, title or _title(runs), plotly), encoding="utf-8")
    return out


def page(runs: Runs, title: str, plotly: str) -> str:
    """The whole HTML document; `plotly`: the source of plotly.js."""
    curves, timelines = charts.curves(runs.runs), charts.timelines(runs.runs)
    partitions = charts.partitions(runs.runs)
    data = {
        "runs": [{"label": run.label, **charts.style(i)} for i, run in enumerate(runs.runs)],
        "curves": curves,
        "timelines": timelines,
        "partitions": partitions,
    }
    sections = [
        _header(runs, title),
        _table(runs),
        _curves(runs.runs) if curves else "",
        _time_bars(runs.runs),
        _timelines(runs.runs, timelines),
        _partitions(partitions),
        _footer(runs.runs),
    ]
    return "\n".join(
        [
            "<!doctype html>",
            '<html lang="en"><head><meta charset="utf-8">',
            f'<meta http-equiv="Content-Security-Policy" content="{_NO_NETWORK}">',
            '<meta name="viewport" content="width=device-width, initial-scale=1">',
            f"<title>{escape(title)}</title>",
            f"<style>{_file('style.css')}</style></head>",
            '<body><span id="probe" hidden></span><main>',
            *filter(None, sections),
            "</main>",
            f'<script type="application/json" id="data">{_json(data)}</script>',
            f'<script id="plotly">{_script(plotly)}</script>',
            f"<script>{_script(_file('page.js'))}</script>",
            "</body></html>\n",
        ]
    )


def _plotly() -> str:
    try:
        from plotly.offline import get_plotlyjs
    except ImportError as error:
        raise ImportError("the report draws with plotly: pip install 'dure[report]'") from error
    return str(get_plotlyjs())


def _file(name: str) -> str:
    return (files("dure.report") / name).read_text(encoding="utf-8")


def _json(data: object) -> str:
    """JSON that may stand inside a script element: nothing in it can close the element or open another."""
    text = json.dumps(data, separators=(",", ":"), allow_nan=False)
    return text.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")


def _script(source: str) -> str:
    return re.sub(r"</(script)", r"<\\/\1", source, flags=re.IGNORECASE)


def _section(name: str, heading: str, lead: str, body: str) -> str:
    return f'<section aria-labelledby="{name}"><h2 id="{name}">{heading}</h2><p class="lead">{lead}</p>{body}</section>'


# Header: what was asked.


def _title(runs: Runs) -> str:
    tasks = list(dict.fromkeys(_task(run) for run in runs.runs))
    task = tasks[0] if len(tasks) == 1 else f"{len(tasks)} tasks" if tasks else "comparison"
    return f"{task}: {runs.runs[0].label}" if len(runs.runs) == 1 else f"{task}: {len(runs.runs)} runs"


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
            facts.append(f"<div><dt>{name}</dt><dd>{escape(' / '.join(values[:3]) + more)}</dd></div>")
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
    return f"<details{opened}><summary>To run it again</summary><dl>{''.join(rows)}</dl></details>" if rows else ""


def command(run: Run) -> str | None:
    """The shell command that repeats a run, or None where its configuration cannot be said in flags.

    A `command` in config.json is taken as it stands. Else: a named task, a strategy whose fields are numbers, words
    or null, and a world of processes or a simulated one. What was not set is left to its default.
    """
    given = run.config.get("command")
    if isinstance(given, str) and given:
        return given
    task, strategy, world, stop = (_dict(run.config.get(key)) for key in ("task", "strategy", "world", "stop"))
    names = [task.get("name"), strategy.get("name")]
    workers = world.get("ranks") if world.get("name") == "processes" else None
    if not all(isinstance(name, str) for name in names) or (workers is None and world.get("name") != "simulated"):
        return None
    flags = {key: value for key, value in strategy.items() if key != "name"} | _dict(task.get("options"))
    asked = {**stop, "workers": workers, **{key: run.config.get(key) for key in ("seed", "evaluate_every")}}
    asked["target"] = [f"{metric}={goal}" for metric, goal in _dict(stop.get("target")).items()] or None
    flags |= {key: value for key, value in asked.items() if value is not None}
    words = ["dure", "train", *map(str, names)]
    for key, value in flags.items():
        values = value if isinstance(value, list) else [value]
        # A bool would be a bare flag, which one depends on a default that is not known here.
        if any(isinstance(one, (bool, dict, list)) for one in values):
            return None
        words += [f"--{key.replace('_', '-')}", *(_plain(one) or "None" for one in values)]
    return shlex.join(words)


def _settings(run: Run) -> str:
    strategy = _dict(run.config.get("strategy"))
    parts = [str(strategy.get("name", "strategy unknown"))]
    parts += [f"{key.replace('_', ' ')} {_plain(value)}" for key, value in strategy.items() if key != "name"]
    return " · ".join([*parts, _world(run)])


def _task(run: Run) -> str:
    return str(_dict(run.config.get("task")).get("name") or "a task made in Python")


def _stop(run: Run) -> str | None:
    stop = {key: value for key, value in _dict(run.config.get("stop")).items() if value is not None}
    return " or ".join(
        f"{key} {_plain(value)}" if key == "target" else f"{_plain(value)} {key}" for key, value in stop.items()
    )


def _versions(run: Run) -> str:
    return ", ".join(f"{key} {_plain(value)}" for key, value in _dict(run.config.get("versions")).items())


def _counted(run: Run, key: str) -> str | None:
    value = number(run.config.get(key))
    return None if value is None else count(value)


def _world(run: Run) -> str:
    world = _dict(run.config.get("world"))
    name, ranks = str(world.get("name", UNKNOWN)), number(world.get("ranks"))
    return run.result.world or (f"{count(ranks)} {name}" if ranks else name)


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


# The table of runs.


@dataclass(frozen=True)
class Column:
    """One column: what a run shows in it, by what it sorts, and which way is better (0: neither)."""

    title: str
    html: Callable[[Run], str]
    value: Callable[[Run], float | str | None]
    better: int = 0
    finished_only: bool = True  # a killed run has sent few bytes: that makes it no winner


def _table(runs: Runs) -> str:
    columns = _columns(runs.runs)
    best = [_best(column, runs.runs) for column in columns]
    head = "".join(f'<th scope="col"><button type="button">{escape(column.title)}</button></th>' for column in columns)
    rows = []
    for index, run in enumerate(runs.runs):
        cells = [_cell(column, run, winner) for column, winner in zip(columns, best, strict=True)]
        who = f"<span>{escape(run.label)}<small>{escape(_world(run))}</small></span>"
        rows.append(f'<tr><th scope="row"><div>{_swatch(index)}{who}</div></th>{"".join(cells)}</tr>')
    failed = "".join(
        f'<tr><th scope="row"><span>{escape(name)}</span></th>'
        f'<td colspan="{len(columns)}">failed: {escape(reason)}</td></tr>'
        for name, reason in runs.failed.items()
    )
    notes = "".join(f"<li>{escape(run.label)}: {escape(note)}.</li>" for run in runs.runs for note in run.notes)
    table = (
        '<div class="scroll" role="region" aria-labelledby="runs" tabindex="0"><table id="table"><thead><tr>'
        f'<th scope="col"><button type="button">run, world</button></th>{head}</tr></thead>'
        f"<tbody>{''.join(rows)}</tbody>"
        + (f'<tbody class="failed">{failed}</tbody>' if failed else "")
        + "</table></div>"
        + (f'<ul class="notes">{notes}</ul>' if notes else "")
    )
    lead = f"{_key(charts.CATEGORIES[:3])}A heading sorts."
    if any(value is not None for value in best):
        lead += ' The best of a column is <span class="best">marked</span>; of costs, among the runs that ended.'
    return _section("runs", "Runs", lead, table)


def _columns(runs: Sequence[Run]) -> list[Column]:
    keys = charts.metrics(runs)
    columns: list[Column] = []
    if keys:
        columns += [_metric_column("best", keys[0]), _metric_column("final", keys[0])]
    if len(keys) > 1 and "test_loss" in keys:
        columns.append(_metric_column("", "test_loss"))
    else:
        columns.append(_number_column("train loss", lambda r: r.train_loss, lambda x: metric_value("loss", x), -1))
    columns += [
        _steps_column(runs),
        _number_column("epochs", lambda r: r.epochs, lambda x: UNKNOWN if x is None else f"{x:,.4g}"),
        _number_column("time", lambda r: r.seconds, duration, -1),
        Column("where it went", lambda run: _share_cell(run.result.everyone), _compute_share),
        _number_column("sent per worker", lambda r: r.bytes_per_worker, size, -1),
        _number_column("peak memory", lambda r: r.peak_memory, size, -1),
        *_target_columns(runs),
        Column("ended by", lambda run: escape(_ended(run)), _ended),
    ]
    return columns


def _number_column(
    title: str, pick: Callable[[Result], float | None], write: Callable[[float | None], str], better: int = 0
) -> Column:
    return Column(title, lambda run: write(pick(run.result)), lambda run: pick(run.result), better)


def _metric_column(which: str, key: str) -> Column:
    def value(run: Run) -> float | None:
        return (run.result.best if which == "best" else run.result.final).get(key)

    title = f"{which} {metric_name(key)}".strip()
    better = 1 if higher_is_better(key) else -1
    return Column(title, lambda run: metric_value(key, value(run)), value, better, finished_only=False)


def _steps_column(runs: Sequence[Run]) -> Column:
    one = _one_unit(runs)
    return Column(
        f"{one}s" if one else "steps or rounds",
        lambda run: count(run.result.steps) if one else plural(run.result.steps, escape(run.result.unit)),
        lambda run: run.result.steps,
    )


def _one_unit(runs: Sequence[Run]) -> str | None:
    """ "step" or "round" where all runs count the same, else None."""
    units = {run.result.unit for run in runs}
    return units.pop() if len(units) == 1 else None


def _target_columns(runs: Sequence[Run]) -> list[Column]:
    asked = dict.fromkeys((target.metric, target.value) for run in runs for target in run.result.targets)

    def column(metric: str, goal: float) -> Column:
        def reached(run: Run) -> float | None:
            return next((t.reached for t in run.result.targets if (t.metric, t.value) == (metric, goal)), None)

        def cell(run: Run) -> str:
            if not any((t.metric, t.value) == (metric, goal) for t in run.result.targets):
                return UNKNOWN
            steps = reached(run)
            return "not reached" if steps is None else plural(steps, escape(run.result.unit))

        title = f"to {metric_value(metric, goal).replace('.00', '')} {metric_name(metric)}"
        return Column(title, cell, reached, -1 if _one_unit(runs) else 0, finished_only=False)

    return [column(metric, goal) for metric, goal in asked]


def _best(column: Column, runs: Sequence[Run]) -> str | None:
    """The best of a column as it is written, where there is something to choose from.

    What reads the same is equally good: runs that compute the same differ in the last bits.
    """
    known = [
        (value, column.html(run))
        for run in runs
        if isinstance(value := column.value(run), float) and _competes(column, run)
    ]
    if not column.better or len({text for _, text in known}) < 2:
        return None
    return (max(known) if column.better > 0 else min(known))[1]


def _cell(column: Column, run: Run, best: str | None) -> str:
    value, body = column.value(run), column.html(run)
    sort = "" if value is None else f' data-value="{escape(value)}"'
    kind = ' class="text"' if isinstance(value, str) else ""
    if best == body and _competes(column, run):
        body = f'<span class="best">{body}<span class="unseen"> (best)</span></span>'
    return f"<td{kind}{sort}>{body}</td>"


def _competes(column: Column, run: Run) -> bool:
    return _finished(run) or not column.finished_only


def _finished(run: Run) -> bool:
    return run.result.ended not in (None, "interrupt")


def _ended(run: Run) -> str:
    """What ended the run: a limit, or a kill."""
    result = run.result
    if result.ended is None:
        return "kill" if result.steps is None else f"kill at {result.unit} {count(result.steps)}"
    return result.ended


def _compute_share(run: Run) -> float | None:
    everyone = run.result.everyone
    return everyone.compute / everyone.total if everyone else None


def _share_cell(worker: Worker | None) -> str:
    if worker is None:
        return UNKNOWN
    return f'<span class="share">{_bar(worker, worker.total)}<small>{_percents(worker)}</small></span>'


def _bar(worker: Worker, full: float) -> str:
    """A stacked bar; `full`: the seconds of the whole width."""
    parts = {"compute": worker.compute, "communication": worker.communication, "idle": worker.idle}
    segments = "".join(
        f'<i class="{name}" style="width:{100 * value / full:.2f}%"></i>' for name, value in parts.items() if value
    )
    text = ", ".join(f"{name} {duration(value)}" for name, value in parts.items())
    return f'<span class="bar" role="img" aria-label="{text}" title="{text}">{segments}</span>'


def _percents(worker: Worker) -> str:
    shares = [worker.compute, worker.communication, worker.idle]
    return " / ".join(f"{100 * value / worker.total:.0f}" for value in shares) + " %"


def _key(categories: Sequence[str]) -> str:
    """The legend of the categories, which begins a section's lead."""
    names = "".join(f'<span class="key"><i class="{name}"></i>{name}</span>' for name in categories)
    return f"{names}<br>"


def _swatch(index: int) -> str:
    """The line and marker of a run; page.js draws it, so that it looks as in the charts."""
    return f'<svg class="swatch" data-run="{index}" viewBox="0 0 28 12" aria-hidden="true"></svg>'


# Charts: the places that page.js draws into.


def _curves(runs: Sequence[Run]) -> str:
    chips = "".join(
        f'<button type="button" aria-pressed="true" data-run="{index}">'
        f"{_swatch(index)}<span>{escape(run.label)}</span></button>"
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
        "The same runs by what they reached and by what it cost. A click on a run below hides or shows it. "
        '<span class="mouse">Drag to zoom, double-click to go back.</span>'
    )
    return _section("learning", "Curves", lead, body)


def _time_bars(runs: Sequence[Run]) -> str:
    """Where the time went: one stacked bar a worker, each run to its own scale."""
    blocks = []
    for index, run in enumerate(runs):
        workers = _chosen(run.result.workers)
        if not workers:
            continue
        longest = max(worker.total for _, worker in workers)
        rows = "".join(
            f'<li><span class="who">{escape(name)}</span>{_bar(worker, longest)}'
            f'<span class="much">{duration(worker.total)}<small>{_percents(worker)}</small></span></li>'
            for name, worker in workers
        )
        blocks.append(
            f'<div class="bars"><h3>{_swatch(index)}<span>{escape(run.label)}</span></h3><ul>{rows}</ul></div>'
        )
    if not blocks:
        return ""
    lead = f"{_key(charts.CATEGORIES[:3])}One bar a worker, to the scale of its run; seconds and shares at its right."
    return _section("time", "Where the time went", lead, f'<div class="grid">{"".join(blocks)}</div>')


def _chosen(workers: Sequence[Worker]) -> list[tuple[str, Worker]]:
    """All of a few workers; of many, the first (a federation's server) and five from the busiest to the least busy."""
    if len(workers) <= _BARS + 2:
        return [(worker.name, worker) for worker in workers]
    rest = sorted(workers[1:], key=lambda worker: -(worker.compute + worker.communication))
    marks = ("busiest", "upper quartile", "median", "lower quartile", "least busy")
    places = [round(place * (len(rest) - 1) / 4) for place in range(5)]
    chosen = [(f"{rest[at].name}, {mark}", rest[at]) for at, mark in zip(places, marks, strict=True)]
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
    lead = f"{_key(charts.CATEGORIES)}One lane a rank, client or server, from the start of the run."
    return _section("timelines", "Timeline", lead, body)


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
    lead = "How the training examples lie with the clients: how many each has, and of which classes."
    return _section("data-clients", "Data per client", lead, f'<div class="grid">{figures}</div>')


def _footer(runs: Sequence[Run]) -> str:
    versions = "; ".join(dict.fromkeys(filter(None, map(_versions, runs)))) or "unknown"
    return (
        "<footer><h2>What the words mean</h2>"
        "<p><b>Epochs</b> are examples trained on, by all workers together, over training examples. <b>Time</b> is "
        "training wall time; evaluation and checkpoints are left out. <b>Compute</b> is forward, backward and update, "
        "<b>communication</b> is time in transfers, <b>idle</b> is waiting for the slowest peer to arrive. "
        "<b>Bytes sent</b> are payload bytes handed to the network or its simulation; per worker means the mean over "
        "ranks, or over all clients of a federation. 1 MB is 10<sup>6</sup> bytes. <b>Peak memory</b> is the largest "
        "process’s. <b>Best</b> is the best evaluation, <b>final</b> the last. <b>To a target</b> counts steps or "
        "rounds on the best-so-far curve, interpolated between evaluations. Training loss is drawn as the mean "
        "of each stretch of the run; its bytes lie between those of two evaluations.</p>"
        f'<p class="aside">{escape(versions)}</p></footer>'
    )
