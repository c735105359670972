"""The report of runs, from dataclasses to HTML: header, time bars, places of charts, footer."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from dure.record.disk import disk_errors, write_atomically
from dure.report import charts
from dure.report.differences import differences
from dure.report.document import document, plotly_source, section, source
from dure.report.exposure import exposures
from dure.report.federated import fairness, federations
from dure.report.federated_figures import figures
from dure.report.formatting import count, duration, escape, size
from dure.report.html_fragments import bar, legend, percents, swatch
from dure.report.json_values import mapping, number
from dure.report.overview import overview, overview_section
from dure.report.pipeline import pipelines
from dure.report.prediction_tables import answers
from dure.report.prediction_tables import figures as figures_of_answers
from dure.report.privacy import figures as figures_of_privacy
from dure.report.privacy import promises
from dure.report.rank_memory import rank_memory_section
from dure.report.read import read_runs
from dure.report.repeat_command import command, setting_text, settings
from dure.report.runs import ReportedRun, ReportedRuns, WorkerTime, is_simulated
from dure.report.seeds import groups, over_seeds
from dure.report.servers import figures as figures_of_servers
from dure.report.servers import parameter_servers
from dure.report.split import divided_models, split_leakage_section
from dure.report.split_figures import figures as figures_of_split
from dure.report.table import filter_field, table
from dure.report.translation import (
    check_language,
    counted,
    in_language,
    recorded,
    translated,
    words,
)
from dure.report.update_leakage import update_leaks

_BARS = 6
"""Bars of a run with many workers: its first, and five of the others (`_chosen`)."""

_FACTS = 3
"""Most values of a fact in the header, if runs differ."""


def write_report(
    folders: Sequence[Path], out: Path, title: str | None = None, language: str = "en"
) -> Path:
    """Write a self-contained HTML page about the runs in `folders`, and return its path.

    Args:
        folders: run folders, comparison folders, or folders with runs directly below them.
        out: path of the page.
        title: of the page; None chooses a title.
        language: of the page, "en" or "ko".

    Raises:
        ValueError: if the language is unknown.
        ImportError: if plotly is not installed.
        RunFolderError: if a folder has no run or the page cannot be written.
    """
    check_language(language)
    # First: without plotly the runs need not be read.
    plotly = plotly_source("the report")
    runs = read_runs(folders)
    out = Path(out)
    with in_language(language):
        text = page(runs, title or title_of(runs), plotly)
    with disk_errors(out):
        out.parent.mkdir(parents=True, exist_ok=True)
    # Invalid Unicode, such as half of a surrogate pair, cannot be encoded, so it is replaced.
    write_atomically(out, text.encode("utf-8", errors="replace"))
    return out


def page(runs: ReportedRuns, title: str, plotly: str) -> str:
    """Return the whole HTML document. plotly: source of plotly.js."""
    sections, data = content(runs, title)
    return document(title, sections, data=data, plotly=plotly, script=page_script())


def content(runs: ReportedRuns, title: str) -> tuple[list[str], dict[str, Any]]:
    """Return (HTML of each section, "" for an empty section; data of the charts)."""
    curves = charts.curves(runs.runs)
    timelines = charts.timelines(runs.runs)
    partitions = charts.partitions(runs.runs)
    # Empty figures are missing here, and then have no place in the page either.
    drawn = figures(runs.runs) | figures_of_servers(runs.runs) | figures_of_split(runs.runs)
    drawn |= figures_of_privacy(runs.runs)
    compared = overview(runs.runs)
    # The filter is in the first section about several runs.
    controls = filter_field(runs.runs)
    data: dict[str, Any] = {
        "runs": [{"label": run.label, **charts.style(i)} for i, run in enumerate(runs.runs)],
        "overview": compared,
        "curves": curves,
        "timelines": timelines,
        "partitions": partitions,
        "figures": drawn,
        "answers": figures_of_answers(runs.runs),
        "groups": _groups(runs.runs),
    }
    if words():
        data["words"] = dict(words())
    sections = [
        _header(runs, title),
        overview_section(runs.runs, compared, controls),
        _curves(runs.runs) if curves else "",
        table(runs, "" if compared else controls),
        over_seeds(runs.runs),
        differences(runs.runs),
        answers(runs.runs),
        _time_bars(runs.runs),
        pipelines(runs.runs),
        rank_memory_section(runs.runs),
        _timelines(runs.runs, timelines),
        parameter_servers(runs.runs, drawn),
        divided_models(runs.runs, drawn),
        split_leakage_section(runs.runs, drawn),
        promises(runs.runs, drawn),
        update_leaks(runs.runs),
        federations(runs.runs, drawn),
        exposures(runs.runs),
        fairness(runs.runs, drawn),
        _partitions(partitions),
        _footer(runs.runs),
    ]
    return sections, data


def page_script() -> str:
    """Return the script that fills the sections and draws; it can run repeatedly."""
    # A block of its own, so that its names can be declared again in each run.
    return f"{{\n{source(__file__, 'tools.js')}{source(__file__, 'page.js')}}}\n"


def _groups(runs: Sequence[ReportedRun]) -> list[dict[str, Any]]:
    """Return groups of runs that differ only in their seed: label and places of the runs."""
    places = {id(run): place for place, run in enumerate(runs)}
    return [
        {"label": str(group[0].config.get("label")), "runs": [places[id(run)] for run in group]}
        for group in groups(runs)
    ]


# Header: the requests of the runs.


def title_of(runs: ReportedRuns) -> str:
    """Return the title of a page about these runs."""
    tasks = list(dict.fromkeys(_task(run) for run in runs.runs))
    task = translated("{count} tasks", count=len(tasks)) if tasks else translated("comparison")
    if len(tasks) == 1:
        task = tasks[0]
    several = translated("{count} runs", count=len(runs.runs))
    what = runs.runs[0].label if len(runs.runs) == 1 else several
    return f"{task}: {what}"


def _header(runs: ReportedRuns, title: str) -> str:
    asked: list[tuple[str, Callable[[ReportedRun], str | None]]] = [
        ("task", _task),
        ("stop", _stop),
        ("seed", lambda run: setting_text(run.config.get("seed"))),
        ("parameters", lambda run: _counted(run, "parameters")),
        ("training examples", lambda run: _counted(run, "train_examples")),
        ("test examples", lambda run: _counted(run, "test_examples")),
        ("versions", _versions),
    ]
    facts = []
    for name, fact in asked:
        # A value that all runs share is shown once.
        values = list(dict.fromkeys(filter(None, map(fact, runs.runs))))
        if values:
            text = " / ".join(values[:_FACTS])
            if len(values) > _FACTS:
                more = len(values) - _FACTS
                text = translated("{first} and {count} more", first=text, count=more)
            facts.append(f"<div><dt>{translated(name)}</dt><dd>{escape(text)}</dd></div>")
    return (
        f'<header><div class="top"><p class="mark">dure</p>'
        f'<button type="button" id="theme" '
        f'aria-label="{translated("Switch between light and dark")}">'
        f'<span aria-hidden="true">◐</span> {translated("Theme")}</button></div>'
        f"<h1>{escape(title)}</h1><dl>{''.join(facts)}</dl>{_repeat(runs.runs)}</header>"
    )


def _repeat(runs: Sequence[ReportedRun]) -> str:
    """Return how to repeat each run: its command if there is one, else its settings."""
    rows = []
    for run in runs:
        line = command(run)
        code = f"<code>{escape(line)}</code>" if line else f"<span>{escape(settings(run))}</span>"
        rows.append(f"<dt>{escape(run.label)}</dt><dd>{code}</dd>")
    # With many runs the commands would fill the page.
    opened = " open" if len(runs) == 1 else ""
    if not rows:
        return ""
    body = f"<dl>{''.join(rows)}</dl>"
    return f"<details{opened}><summary>{translated('Run it again')}</summary>{body}</details>"


def _task(run: ReportedRun) -> str:
    task = mapping(run.config.get("task"))
    return str(task.get("title") or task.get("name") or translated("a task created in Python"))


def _stop(run: ReportedRun) -> str | None:
    stop = {
        key: value for key, value in mapping(run.config.get("stop")).items() if value is not None
    }
    # Monitor and min_delta belong to patience, and mean nothing without it.
    measure, least = stop.pop("monitor", None), stop.pop("min_delta", None)
    said = {
        key: counted(str(setting_text(value)), key) or f"{setting_text(value)} {key}"
        for key, value in stop.items()
    }
    if "target" in stop:
        said["target"] = translated("target {value}", value=setting_text(stop["target"]))
    if "bytes" in stop:
        said["bytes"] = size(number(stop["bytes"]))
    if "patience" in stop:
        by = "" if measure is None else f" {setting_text(measure)}"
        more = translated(" by more than {least}", least=setting_text(least)) if least else ""
        said["patience"] = translated(
            "{count} evaluations without a better{metric}{more}",
            count=setting_text(stop["patience"]),
            metric=by,
            more=more,
        )
    return translated(" or ").join(said.values())


def _versions(run: ReportedRun) -> str:
    return ", ".join(
        f"{key} {setting_text(value)}" for key, value in mapping(run.config.get("versions")).items()
    )


def _counted(run: ReportedRun, key: str) -> str | None:
    value = number(run.config.get(key))
    return None if value is None else count(value)


# Charts: the places that page.js draws into.


def _curves(runs: Sequence[ReportedRun]) -> str:
    chips = "".join(
        f'<button type="button" aria-pressed="true" data-run="{index}">'
        f"{swatch(index)}<span>{escape(run.label)}</span></button>"
        for index, run in enumerate(runs)
    )
    seeds = (
        f'<label><input type="checkbox" id="join-seeds"> {translated("mean over seeds")}</label>'
        if groups(runs)
        else ""
    )
    body = (
        '<div class="controls">'
        '<div class="choice" id="curve-metric" role="group" '
        f'aria-label="{translated("Vertical axis")}"></div>'
        f'<span class="against">{translated("against")}</span>'
        '<div class="choice" id="curve-axis" role="group" '
        f'aria-label="{translated("Horizontal axis")}"></div>'
        f'<div class="checks"><label><input type="checkbox" id="log-x"> {translated("log x")}'
        f'</label><label><input type="checkbox" id="log-y"> {translated("log y")}</label>'
        f'{seeds}<label>{translated("smoothing")} <input type="range" id="smooth" min="0" '
        'max="0.98" step="0.02" value="0"></label></div></div>'
        '<div class="chart" id="curves" role="img" '
        f'aria-label="{translated("Curves of the runs")}"></div>'
        '<p class="aside" id="curve-note" aria-live="polite"></p>'
        f'<div class="legend" role="group" aria-label="{translated("Runs shown")}">{chips}</div>'
    )
    lead = (
        "The same runs by result and by cost. Click on a run below to hide or show it. <span "
        'class="mouse">Drag to zoom, double-click to go back.</span>'
    )
    return section("learning", "Curves", lead, body)


def _time_bars(runs: Sequence[ReportedRun]) -> str:
    """Return a stacked bar of time for each worker, each run to its own scale."""
    blocks = []
    for index, run in enumerate(runs):
        workers = _chosen(run.result.workers)
        if workers:
            virtual = f"<small>{translated(', in virtual seconds')}</small>"
            clock = virtual if is_simulated(run) else ""
            heading = f"<h3>{swatch(index)}<span>{escape(run.label)}{clock}</span></h3>"
            # Each run to its own scale: seconds of different runs are compared in the table.
            longest = max(worker.total for _, worker in workers)
            rows = "".join(_time_row(name, worker, longest) for name, worker in workers)
            blocks.append(f'<div class="bars">{heading}<ul>{rows}</ul></div>')
    if not blocks:
        return ""
    lead = legend(charts.CATEGORIES[:3]) + translated(
        "One bar per worker, to the scale of its run; seconds and "
        "shares on its right, the bytes that it sent (↑) and received (↓) below its name."
    )
    body = f'<div class="grid">{"".join(blocks)}</div>'
    return section("time", "Time by activity", lead, body)


def _time_row(name: str, worker: WorkerTime, longest: float) -> str:
    """Return a worker's bar. longest: seconds of the longest bar."""
    who = f'<span class="who">{escape(recorded(name))}{_moved(worker)}</span>'
    shares = f"<small>{percents(worker)}</small>"
    much = f'<span class="much">{duration(worker.total)}{shares}</span>'
    return f"<li>{who}{bar(worker, longest)}{much}</li>"


def _moved(worker: WorkerTime) -> str:
    """Return the bytes that passed through a worker, a master included."""
    if not worker.sent and not worker.received:
        return ""
    return f"<small>↑ {size(worker.sent)} ↓ {size(worker.received)}</small>"


def _chosen(workers: Sequence[WorkerTime]) -> list[tuple[str, WorkerTime]]:
    """Return the workers to show, with their names.

    All of a few; of many, the first (a federation's server), and five from the busiest to the least
    busy.
    """
    # Slightly more than the limit are all shown.
    if len(workers) <= _BARS + 2:
        return [(worker.name, worker) for worker in workers]
    rest = sorted(workers[1:], key=lambda worker: -(worker.compute + worker.communication))
    marks = ("busiest", "upper quartile", "median", "lower quartile", "least busy")
    chosen = [(workers[0].name, workers[0])]
    # The quartiles of busy time, both ends included.
    for quarter, mark in enumerate(marks):
        worker = rest[round(quarter * (len(rest) - 1) / 4)]
        chosen.append((f"{recorded(worker.name)}, {translated(mark)}", worker))
    return chosen


def _timelines(runs: Sequence[ReportedRun], timelines: Sequence[dict[str, Any]]) -> str:
    if not timelines:
        return ""
    # The first run with several lanes shows waiting, which is the most informative.
    chosen = next((place for place, one in enumerate(timelines) if len(one["lanes"]) > 1), 0)
    options = ""
    for place, one in enumerate(timelines):
        selected = " selected" if place == chosen else ""
        label = escape(runs[one["run"]].label)
        options += f'<option value="{place}"{selected}>{label}</option>'
    body = (
        f'<div class="controls"><label>{translated("run")} <select id="timeline-run">{options}'
        '</select></label><div class="choice" id="timeline-move" role="group" '
        f'aria-label="{translated("Part of the timeline")}">'
        f'<button type="button" data-move="earlier" aria-label="{translated("Earlier")}">←</button>'
        f'<button type="button" data-move="later" aria-label="{translated("Later")}">→</button>'
        f'<button type="button" data-move="out" aria-label="{translated("Zoom out")}">−</button>'
        f'<button type="button" data-move="in" aria-label="{translated("Zoom in")}">+</button>'
        f'<button type="button" data-move="all">{translated("all")}</button></div></div>'
        '<div class="chart" id="timeline" role="img" '
        f'aria-label="{translated("Timeline of the chosen run")}"></div>'
        '<p class="aside" id="timeline-note" aria-live="polite"></p>'
    )
    lead = legend(charts.CATEGORIES) + translated(
        "One lane per rank, thread, client or server, from the start of the run."
    )
    return section("timelines", "Timeline", lead, body)


def _partitions(partitions: Sequence[dict[str, Any]]) -> str:
    if not partitions:
        return ""
    figures = "".join(_partition_figure(place, one) for place, one in enumerate(partitions))
    lead = "The distribution of training examples over clients: number and classes."
    return section("data-clients", "Data per client", lead, f'<div class="grid">{figures}</div>')


def _partition_figure(place: int, one: dict[str, Any]) -> str:
    wide = " class=wide" if len(one["clients"]) > 20 else ""
    facts = translated(
        "{facts} Used by {runs}.", facts=escape(one["facts"]), runs=escape(one["users"])
    )
    chart = f'class="chart partition" data-partition="{place}"'
    return (
        f"<figure{wide}><figcaption><h3>{escape(one['description'])}</h3>"
        f'<p class="aside">{facts}</p></figcaption>'
        f'<div {chart} role="img" aria-label="{translated("Examples per client")}"></div></figure>'
    )


def _footer(runs: Sequence[ReportedRun]) -> str:
    versions = "; ".join(dict.fromkeys(filter(None, map(_versions, runs)))) or translated("unknown")
    meaning = translated(
        "<b>Batch</b> is the number of examples of a step of the optimizer; local steps are "
        "made on copies of the model that are combined later. <b>Steps</b> are steps of the "
        "optimizer, one after the other: steps on copies at the same time count once. "
        "<b>Epochs</b> are examples trained on, by all workers together, over training "
        "examples. <b>Time</b> is training wall time; evaluation and checkpoints are left out. "
        "<b>Compute</b> is forward, backward and update, <b>communication</b> is time in "
        "transfers, <b>idle</b> is waiting for the slowest peer to arrive: as a share of the time "
        "of all workers, and over the time in which they compute or transfer. <b>Bytes sent</b> "
        "are payload bytes handed to the network or its simulation; per worker means the mean over "
        "ranks, or over all clients of a federation; a worker, master or server that sent more "
        "than the mean is named. 1 MB is 10<sup>6</sup> bytes. <b>Peak "
        "memory</b> is the largest process’s. <b>Best</b> is the model that a validation set "
        "has chosen, or else the best evaluation, <b>final</b> the last. <b>To a target</b> counts "
        "steps or rounds on the best-so-far curve, interpolated "
        "between evaluations. Training loss is drawn as the mean of each stretch of the run; its "
        "bytes lie between those of two evaluations."
    )
    return (
        f"<footer><h2>{translated('What the words mean')}</h2><p>{meaning}</p>"
        f'<p class="aside">{escape(versions)}</p></footer>'
    )
