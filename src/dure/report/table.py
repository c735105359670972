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
from dure.report.translation import recorded, translated


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
        folds: whether the column is left out if all runs have the same value.
    """

    title: str
    html: Callable[[ReportedRun], str]
    value: Callable[[ReportedRun], float | str | None]
    better: int = 0
    finished_only: bool = True  # a killed run has sent few bytes: that makes it no winner
    of_model: bool = False
    folds: bool = True


def table(runs: ReportedRuns, controls: str = "") -> str:
    """Return the section with a row for each run, and a row for each run that failed.

    controls: HTML above the table.
    """
    columns, same = _folded(_columns(runs.runs), runs.runs)
    # The best of each column over all runs, before any row is written.
    best = [_best(column, runs.runs) for column in columns]
    head = _heading(translated("run, world")) + "".join(
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
            notes += f"<li>{escape(run.label)}: {escape(recorded(note))}.</li>"
    body = f"<tbody>{rows}</tbody>{_failed(runs.failed, len(columns))}"
    whole = controls + same
    whole += (
        '<div class="full"><div class="scroll" role="region" aria-labelledby="runs" tabindex="0">'
        f'<table id="table"><thead><tr>{head}</tr></thead>{body}</table></div></div>'
    )
    if notes:
        whole += f'<ul class="notes">{notes}</ul>'
    lead = legend(charts.CATEGORIES[:3]) + translated("A heading sorts.") + _baseline(runs.runs)
    if any(value is not None for value in best):
        lead += translated(
            ' The best of a column is <span class="best">marked</span>; of costs, among the runs '
            "that ended."
        )
    return section("runs", "Runs", lead, whole)


def _folded(
    columns: Sequence[TableColumn], runs: Sequence[ReportedRun]
) -> tuple[list[TableColumn], str]:
    """Return (columns that differ or are always shown, a line on the others).

    A column without any known value is left out. While a run goes on, all columns are shown: the
    live page would be drawn anew whenever one appears.
    """
    if len(runs) < 2 or any(run.goes_on for run in runs):
        return list(columns), ""
    shown: list[TableColumn] = []
    same: list[tuple[str, str]] = []
    for column in columns:
        cells = {column.html(run) for run in runs}
        if not column.folds or len(cells) > 1:
            shown.append(column)
        elif cells != {UNKNOWN}:
            same.append((translated(column.title), cells.pop()))
    if not same:
        return shown, ""
    facts = "".join(f"<span>{escape(title)} <b>{cell}</b></span>" for title, cell in same)
    return shown, f'<p class="same">{translated("The same in all runs: {facts}", facts=facts)}</p>'


def _about(run: ReportedRun) -> list[str]:
    """Describe a run's best model, its mean of models and missing clients, below the table."""
    told = []
    chosen = run.result.chosen
    if chosen is not None:
        told.append(
            translated(
                "best is the model of {unit} {best}, chosen by {metric}; final is that of {unit} "
                "{final}",
                unit=recorded(run.result.unit),
                best=count(chosen.step),
                metric=metric_name(chosen.monitor),
                final=count(run.result.steps),
            )
        )
    left = None if run.federation is None else run.federation.left
    if left:
        clients = plural(len(left), "client")
        told.append(translated("{clients} missing at the end, named below", clients=clients))
    if run.result.mean_of is not None:
        told.append(
            translated(
                "the metrics are of the mean of {models}, a model that no client has: "
                "they are not compared",
                models=recorded(run.result.mean_of),
            )
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
    return translated(
        " Always predicting the most frequent class reaches {metrics}.",
        metrics=escape(", ".join(sorted(told))),
    )


def filter_field(runs: Sequence[ReportedRun]) -> str:
    """Return the field that restricts the page to some of its runs; empty for a single run."""
    if len(runs) < 2:
        return ""
    return (
        f'<div class="controls"><label>{translated("show")} <input type="search" id="run-filter" '
        f'placeholder="{translated("part of a run’s name")}" autocomplete="off"></label></div>'
    )


def _heading(title: str, is_text: bool = False) -> str:
    kind = ' class="text"' if is_text else ""
    return f'<th scope="col"{kind}><button type="button">{escape(translated(title))}</button></th>'


def _reason(reason: str) -> str:
    return translated("failed: {reason}", reason=escape(recorded(reason)))


def _failed(failed: Mapping[str, str], columns: int) -> str:
    """Return a row for each run that failed."""
    if not failed:
        return ""
    rows = "".join(
        f'<tr><th scope="row"><span>{escape(name)}</span></th>'
        f'<td colspan="{columns}">{_reason(reason)}</td></tr>'
        for name, reason in failed.items()
    )
    return f'<tbody class="failed">{rows}</tbody>'


def _columns(runs: Sequence[ReportedRun]) -> list[TableColumn]:
    keys = charts.metrics(runs)
    columns: list[TableColumn] = []
    if keys:
        # The main metric has two columns; of the others the final value is enough.
        best, final = _metric_column("best", keys[0]), _metric_column("final", keys[0])
        if all(not run.goes_on and best.html(run) == final.html(run) for run in runs):
            # Every run is best at its end.
            columns.append(_metric_column("", keys[0]))
        else:
            columns += [best, final]
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
        TableColumn("batch", _batch_cell, lambda run: run.result.amount.batch),
        _steps_column(runs),
        _number_column(
            "epochs", lambda r: r.epochs, lambda x: UNKNOWN if x is None else f"{x:,.4g}"
        ),
        *clock_columns(runs),
        TableColumn(
            "sent per worker", _sent_cell, lambda run: run.result.bytes_per_worker, -1, folds=False
        ),
        *_shuffle_column(runs),
        _number_column("peak memory", lambda r: r.peak_memory, size, -1, folds=False),
        *_device_columns(runs),
        *_target_columns(runs),
        TableColumn("ended by", lambda run: escape(ended(run)), ended),
    ]
    return columns


def _device_columns(runs: Sequence[ReportedRun]) -> list[TableColumn]:
    """Return columns of accelerators, of those numbers that any run has."""
    columns = []
    if any(run.result.device_memory for run in runs):
        columns.append(
            _number_column("device memory", lambda r: r.device_memory, size, -1, folds=False)
        )
    if any(run.result.mfu for run in runs):
        columns.append(
            _number_column(
                "MFU", lambda r: r.mfu, lambda x: UNKNOWN if x is None else f"{100 * x:.1f} %", 1
            )
        )
    return columns


def _number_column(
    title: str,
    pick: Callable[[RunResult], float | None],
    write: Callable[[float | None], str],
    better: int = 0,
    folds: bool = True,
) -> TableColumn:
    return TableColumn(
        title,
        lambda run: write(pick(run.result)),
        lambda run: pick(run.result),
        better,
        folds=folds,
    )


def _batch_cell(run: ReportedRun) -> str:
    amount = run.result.amount
    return count(amount.batch) + (f"<small>{translated('local')}</small>" if amount.local else "")


def _sent_cell(run: ReportedRun) -> str:
    """Return the bytes per worker, and the worker that sent more than this mean."""
    told = size(run.result.bytes_per_worker)
    most = run.result.largest_sender
    if most is None:
        return told
    return f"{told}<small>{escape(recorded(most.name))}: {size(most.nbytes)}</small>"


def _shuffle_column(runs: Sequence[ReportedRun]) -> list[TableColumn]:
    """Return a column of shuffled bytes if any worker sent examples."""
    if not any(run.result.shuffle and run.result.shuffle[0] for run in runs):
        return []

    def cell(run: ReportedRun) -> str:
        if run.result.shuffle is None:
            return UNKNOWN
        nbytes, seconds = run.result.shuffle
        if not nbytes:
            return translated("nothing")
        return translated("{size} in {duration}", size=size(nbytes), duration=duration(seconds))

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
            _share_column("time by activity (idle over busy)", simulated=False),
        ]
    if simulated:
        columns += [
            _time_column("virtual time", lambda run: virtual_seconds(run), -1),
            _share_column("virtual time by activity (idle over busy)", simulated=True),
            _time_column(
                "simulated in", lambda run: run.result.seconds if is_simulated(run) else None, 0
            ),
        ]
    return columns


def _time_column(
    title: str, pick: Callable[[ReportedRun], float | None], better: int
) -> TableColumn:
    return TableColumn(title, lambda run: duration(pick(run)), pick, better, folds=not better)


def _share_column(title: str, simulated: bool) -> TableColumn:
    """Return a column of time shares, sorted by the idle share.

    No run is best, since slow computing lowers the idle share.
    """

    def of(run: ReportedRun) -> WorkerTime | None:
        return run.result.everyone if is_simulated(run) == simulated else None

    def idle(run: ReportedRun) -> float | None:
        worker = of(run)
        return None if worker is None else worker.idle_share

    return TableColumn(title, lambda run: _share_cell(of(run)), idle)


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
    name = metric_name(key)
    # One template each, since languages order these words differently.
    templates = {"best": "best {metric}", "final": "final {metric}"}
    title = translated(templates[which], metric=name) if which else name
    better = 1 if higher_is_better(key) else -1
    # The first column of the main metric stays, whatever its values are.
    stays = which == "best" or not which
    return TableColumn(
        title, cell, value, better, finished_only=False, of_model=of_model, folds=not stays
    )


def _step(run: ReportedRun, step: float) -> str:
    return f"{escape(recorded(run.result.unit))} {count(step)}"


def _steps_column(runs: Sequence[ReportedRun]) -> TableColumn:
    """Return the column of optimizer steps; rounds are below them."""

    def cell(run: ReportedRun) -> str:
        told = count(run.result.amount.steps)
        if run.result.unit == "step" or run.result.steps is None:
            return told
        return f"{told}<small>{plural(run.result.steps, escape(run.result.unit))}</small>"

    return TableColumn("steps", cell, lambda run: run.result.amount.steps)


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
        return (
            translated("not reached") if steps is None else plural(steps, escape(run.result.unit))
        )

    title = translated(
        "to {goal} {metric}",
        goal=metric_value(metric, goal).replace(".00", ""),
        metric=metric_name(metric),
    )
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
        body = (
            f'<span class="best">{body}<span class="unseen"> ({translated("best")})</span></span>'
        )
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
        if result.steps is None:
            return translated("kill")
        place = f"{recorded(result.unit)} {count(result.steps)}"
        return translated("kill at {place}", place=place)
    return recorded(result.ended)


def _share_cell(worker: WorkerTime | None) -> str:
    """Return the bar of a run's time, its shares in percent, and idle over busy time."""
    if worker is None:
        return UNKNOWN
    told = f"{percents(worker)} ({idleness.written_ratio(worker.idle_share)})"
    return f'<span class="share">{bar(worker, worker.total)}<small>{told}</small></span>'
