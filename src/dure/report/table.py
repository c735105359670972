"""The table of runs: a row a run, a column a measurement; the best of each column is marked."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from dure.record import idleness
from dure.record.history import is_spread
from dure.report import charts
from dure.report.document import section
from dure.report.formatting import (
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
from dure.report.html_fragments import bar, legend, percents, swatch, world
from dure.report.runs import (
    ReportedRun,
    ReportedRuns,
    RunResult,
    TargetResult,
    WorkerTime,
    is_simulated,
    virtual_seconds,
)


@dataclass(frozen=True)
class TableColumn:
    """A column of the table.

    Args:
        title: heading.
        html: function from a run to its cell.
        value: function from a run to its sort key.
        better: 1 if higher is better, -1 if lower is better, 0 for neither.
        finished_only: whether only finished runs can be the best.
        of_model: whether the column measures the model of the run, and not its cost.
    """

    title: str
    html: Callable[[ReportedRun], str]
    value: Callable[[ReportedRun], float | str | None]
    better: int = 0
    finished_only: bool = True  # a killed run has sent few bytes: that makes it no winner
    of_model: bool = False


def table(runs: ReportedRuns) -> str:
    """Return the section with a row for each run, and a row for each run that failed."""
    columns = _columns(runs.runs)
    # The best of each column over all runs, before any row is written.
    best = [_best(column, runs.runs) for column in columns]
    head = _heading("run, world") + "".join(
        _heading(column.title, any(isinstance(column.value(run), str) for run in runs.runs))
        for column in columns
    )
    rows = ""
    notes = ""
    for index, run in enumerate(runs.runs):
        who = f"<span>{escape(run.label)}<small>{escape(world(run))}</small></span>"
        rows += f'<tr data-key="{index}"><th scope="row"><div>{swatch(index)}{who}</div></th>'
        for column, winner in zip(columns, best, strict=True):
            rows += _cell(column, run, winner)
        rows += "</tr>"
        for note in (*_about(run), *run.notes):
            notes += f"<li>{escape(run.label)}: {escape(note)}.</li>"
    body = f"<tbody>{rows}</tbody>{_failed(runs.failed, len(columns))}"
    whole = _FILTER if len(runs.runs) > 1 else ""
    whole += (
        '<div class="scroll" role="region" aria-labelledby="runs" tabindex="0">'
        f'<table id="table"><thead><tr>{head}</tr></thead>{body}</table></div>'
    )
    if notes:
        whole += f'<ul class="notes">{notes}</ul>'
    lead = f"{legend(charts.CATEGORIES[:3])}A heading sorts.{_baseline(runs.runs)}"
    if any(value is not None for value in best):
        lead += (
            ' The best of a column is <span class="best">marked</span>; of costs, among the runs '
            "that ended."
        )
    return section("runs", "Runs", lead, whole)


def _about(run: ReportedRun) -> list[str]:
    """Describe a run's best model, its mean of models and missing clients, below the table."""
    told = []
    chosen = run.result.chosen
    if chosen is not None:
        told.append(
            f"best is the model of {run.result.unit} {count(chosen.step)}, chosen by "
            f"{metric_name(chosen.monitor)}; final is that of {run.result.unit} "
            f"{count(run.result.steps)}"
        )
    left = None if run.federation is None else run.federation.left
    if left:
        told.append(f"{plural(len(left), 'client')} missing at the end, named below")
    if run.result.mean_of is not None:
        told.append(
            f"the metrics are of the mean of {run.result.mean_of}, a model that no client has: "
            "they are not compared"
        )
    return told


def _baseline(runs: Sequence[ReportedRun]) -> str:
    """Describe the accuracy of always predicting the most frequent class, if runs report it."""
    told = {
        f"{metric_name(key)} {metric_value(key, value)}"
        for run in runs
        for key, value in run.result.baseline.items()
    }
    if not told:
        return ""
    return f" Always predicting the most frequent class reaches {escape(', '.join(sorted(told)))}."


_FILTER = (
    '<div class="controls"><label>show <input type="search" id="run-filter" '
    'placeholder="part of a run’s name" autocomplete="off"></label></div>'
)
"""Search field that restricts the page to some of its runs."""


def _heading(title: str, is_text: bool = False) -> str:
    kind = ' class="text"' if is_text else ""
    return f'<th scope="col"{kind}><button type="button">{escape(title)}</button></th>'


def _failed(failed: Mapping[str, str], columns: int) -> str:
    """Return a row for each run that failed."""
    if not failed:
        return ""
    rows = "".join(
        f'<tr><th scope="row"><span>{escape(name)}</span></th>'
        f'<td colspan="{columns}">failed: {escape(reason)}</td></tr>'
        for name, reason in failed.items()
    )
    return f'<tbody class="failed">{rows}</tbody>'


def _columns(runs: Sequence[ReportedRun]) -> list[TableColumn]:
    keys = charts.metrics(runs)
    columns: list[TableColumn] = []
    if keys:
        # The main metric has two columns; of the others the final value is enough.
        columns += [_metric_column("best", keys[0]), _metric_column("final", keys[0])]
    # The loss has a column of its own below; statistics over clients have a section.
    others = [key for key in keys[1:] if "loss" not in key and not is_spread(key)]
    columns += [_metric_column("final", key) for key in others]
    if len(keys) > 1 and "test_loss" in keys:
        columns.append(_metric_column("", "test_loss"))
    else:
        columns.append(
            _number_column(
                "train loss", lambda r: r.train_loss, lambda x: metric_value("loss", x), -1
            )
        )
    columns += [
        _steps_column(runs),
        _number_column(
            "epochs", lambda r: r.epochs, lambda x: UNKNOWN if x is None else f"{x:,.4g}"
        ),
        *clock_columns(runs),
        _number_column("sent per worker", lambda r: r.bytes_per_worker, size, -1),
        *_shuffle_column(runs),
        _number_column("peak memory", lambda r: r.peak_memory, size, -1),
        *_target_columns(runs),
        TableColumn("ended by", lambda run: escape(ended(run)), ended),
    ]
    return columns


def _number_column(
    title: str,
    pick: Callable[[RunResult], float | None],
    write: Callable[[float | None], str],
    better: int = 0,
) -> TableColumn:
    return TableColumn(
        title, lambda run: write(pick(run.result)), lambda run: pick(run.result), better
    )


def _shuffle_column(runs: Sequence[ReportedRun]) -> list[TableColumn]:
    """Return a column of shuffled bytes if any worker sent examples."""
    if not any(run.result.shuffle and run.result.shuffle[0] for run in runs):
        return []

    def cell(run: ReportedRun) -> str:
        if run.result.shuffle is None:
            return UNKNOWN
        nbytes, seconds = run.result.shuffle
        return f"{size(nbytes)} in {duration(seconds)}" if nbytes else "nothing"

    def nbytes(run: ReportedRun) -> float | None:
        return None if run.result.shuffle is None else run.result.shuffle[0]

    return [TableColumn("shuffled per worker", cell, nbytes)]


def clock_columns(runs: Sequence[ReportedRun]) -> list[TableColumn]:
    """Return columns of time and its shares; real and virtual seconds have separate columns.

    The real time of a simulation has no best: it measures no system.
    """
    simulated = [run for run in runs if is_simulated(run)]
    columns: list[TableColumn] = []
    if len(simulated) < len(runs):
        columns += [
            _time_column("time", lambda run: None if is_simulated(run) else run.result.seconds, -1),
            _share_column("time by activity", simulated=False),
            _idle_column("idle (over busy)", simulated=False),
        ]
    if simulated:
        columns += [
            _time_column("virtual time", lambda run: virtual_seconds(run), -1),
            _share_column("virtual time by activity", simulated=True),
            _idle_column("virtually idle (over busy)", simulated=True),
            _time_column(
                "simulated in", lambda run: run.result.seconds if is_simulated(run) else None, 0
            ),
        ]
    return columns


def _time_column(
    title: str, pick: Callable[[ReportedRun], float | None], better: int
) -> TableColumn:
    return TableColumn(title, lambda run: duration(pick(run)), pick, better)


def _share_column(title: str, simulated: bool) -> TableColumn:
    """Return a column of time shares, sorted by computing; no run is best."""

    def of(run: ReportedRun) -> WorkerTime | None:
        return run.result.everyone if is_simulated(run) == simulated else None

    def computing(run: ReportedRun) -> float | None:
        worker = of(run)
        return worker.compute / worker.total if worker else None

    return TableColumn(title, lambda run: _share_cell(of(run)), computing)


def _idle_column(title: str, simulated: bool) -> TableColumn:
    """Return a column of the idle share of time; no run is best, since slow computing lowers it."""

    def share(run: ReportedRun) -> float | None:
        worker = run.result.everyone
        if worker is None or is_simulated(run) != simulated:
            return None
        return idleness.idle_share(worker.compute + worker.communication, worker.idle)

    return TableColumn(title, lambda run: idleness.written(share(run)), share)


def _metric_column(which: str, key: str) -> TableColumn:
    def value(run: ReportedRun) -> float | None:
        if which == "best" and run.result.chosen is not None:
            return run.result.chosen.metrics.get(key)
        return (run.result.best if which == "best" else run.result.final).get(key)

    def cell(run: ReportedRun) -> str:
        # Which of its two models the number measures.
        chosen = run.result.chosen
        step = None if chosen is None else chosen.step if which == "best" else run.result.steps
        told = metric_value(key, value(run))
        return told if step is None else f"{told}<small>{_step(run, step)}</small>"

    # Clients' own models are measured separately from their mean.
    of_model = not key.startswith("personal_")
    title = f"{which} {metric_name(key)}".strip()
    better = 1 if higher_is_better(key) else -1
    return TableColumn(title, cell, value, better, finished_only=False, of_model=of_model)


def _step(run: ReportedRun, step: float) -> str:
    return f"{escape(run.result.unit)} {count(step)}"


def _steps_column(runs: Sequence[ReportedRun]) -> TableColumn:
    one = _one_unit(runs)
    return TableColumn(
        f"{one}s" if one else "steps or rounds",
        lambda run: (
            count(run.result.steps) if one else plural(run.result.steps, escape(run.result.unit))
        ),
        lambda run: run.result.steps,
    )


def _one_unit(runs: Sequence[ReportedRun]) -> str | None:
    """Return "step" or "round" if all runs count the same, else None."""
    units = {run.result.unit for run in runs}
    return units.pop() if len(units) == 1 else None


def _target_columns(runs: Sequence[ReportedRun]) -> list[TableColumn]:
    """Return a column for each target of any run."""
    asked: dict[tuple[str, float], None] = {}
    for run in runs:
        asked.update(dict.fromkeys((target.metric, target.value) for target in run.result.targets))
    # Steps and rounds are not comparable.
    better = -1 if _one_unit(runs) else 0
    return [_target_column(metric, goal, better) for metric, goal in asked]


def _target_column(metric: str, goal: float, better: int) -> TableColumn:
    def target_of(run: ReportedRun) -> TargetResult | None:
        same = (one for one in run.result.targets if (one.metric, one.value) == (metric, goal))
        return next(same, None)

    def reached(run: ReportedRun) -> float | None:
        target = target_of(run)
        return None if target is None else target.reached

    def cell(run: ReportedRun) -> str:
        if target_of(run) is None:
            return UNKNOWN
        steps = reached(run)
        return "not reached" if steps is None else plural(steps, escape(run.result.unit))

    title = f"to {metric_value(metric, goal).replace('.00', '')} {metric_name(metric)}"
    return TableColumn(title, cell, reached, better, finished_only=False)


def _best(column: TableColumn, runs: Sequence[ReportedRun]) -> str | None:
    """Return the best text of a column; None without differing values to compare.

    Equal texts are equally good: runs of the same computation differ in the last bits.
    """
    known: list[tuple[float, str]] = []
    for run in runs:
        value = column.value(run)
        # Compared by exact value, marked by text: all cells with the same text as the best.
        if isinstance(value, float) and _competes(column, run):
            known.append((value, column.html(run)))
    if not column.better or len({text for _, text in known}) < 2:
        return None
    _, text = max(known) if column.better > 0 else min(known)
    return text


def _cell(column: TableColumn, run: ReportedRun, best: str | None) -> str:
    value = column.value(run)
    body = column.html(run)
    sort = "" if value is None else f' data-value="{escape(value)}"'
    kind = ' class="text"' if isinstance(value, str) else ""
    if best == body and _competes(column, run):
        body = f'<span class="best">{body}<span class="unseen"> (best)</span></span>'
    return f"<td{kind}{sort}>{body}</td>"


def _competes(column: TableColumn, run: ReportedRun) -> bool:
    if column.of_model and run.result.mean_of is not None:
        return False
    return finished(run) or not column.finished_only


def finished(run: ReportedRun) -> bool:
    """Return whether a run has ended without an interruption."""
    return run.result.ended not in (None, "interrupt")


def ended(run: ReportedRun) -> str:
    """Return the reason for the run's end: a limit, or a kill; a dash while it is training."""
    result = run.result
    if run.goes_on:
        return UNKNOWN
    if result.ended is None:
        return "kill" if result.steps is None else f"kill at {result.unit} {count(result.steps)}"
    return result.ended


def _share_cell(worker: WorkerTime | None) -> str:
    if worker is None:
        return UNKNOWN
    return (
        f'<span class="share">{bar(worker, worker.total)}<small>{percents(worker)}</small></span>'
    )
