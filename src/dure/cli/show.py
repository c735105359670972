"""Terminal output of runs: progress during a run, a table at its end.

A terminal shows a live line with bar, rate, loss, metrics and time left; other outputs get a plain
line every few seconds. All of this goes to standard error, so that standard output has only the
content of `--json`.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from functools import partial
from typing import Any, NamedTuple, cast

from rich.console import Console, RenderableType
from rich.markup import escape
from rich.progress import BarColumn, Progress, TaskID, TextColumn, TimeRemainingColumn
from rich.table import Table

from dure.cli.federation_view import FederationView
from dure.contracts.stop import Stop
from dure.peer_text import printable
from dure.record import idleness
from dure.record.history import is_spread, lower_is_better
from dure.record.largest_sender import largest_sender
from dure.record.training_amount import TrainingAmount, unlike
from dure.report.formatting import UNKNOWN, count, duration
from dure.report.json_values import mapping
from dure.run.progress import facts, fraction_done

PLAIN_SECONDS = 2.0
"""Seconds between two lines of progress, if standard error is no terminal."""

NAMES_WIDTH = 40
"""Least width of the names of systems and worlds, if there are many columns."""


def error_console() -> Console:
    """Return a console for standard error, wide enough for a table if it is no terminal."""
    console = Console(stderr=True)
    # A file or a pipe has no width; rich would take 80 columns and wrap the table.
    return console if console.is_terminal else Console(stderr=True, width=160)


class _Bars(Progress):
    """Progress bars, with a renderable `below` them."""

    def __init__(self, below: Callable[[], RenderableType | None], *columns: Any, **more: Any):
        self._below = below
        super().__init__(*columns, **more)

    def get_renderables(self) -> Iterable[RenderableType]:
        yield from super().get_renderables()
        below = self._below()
        if below is not None:
            yield below


class Display:
    """Shows the progress of runs, in sequence. quiet: show nothing."""

    def __init__(self, stop: Stop, quiet: bool = False) -> None:
        self.stop = stop
        self.quiet = quiet
        self.console = error_console()
        self.federation = FederationView()
        self.live = _Bars(
            self.federation.drawn,
            TextColumn("{task.description}"),
            BarColumn(bar_width=24),
            TextColumn("{task.percentage:>3.0f}%"),
            TextColumn("{task.fields[facts]}"),
            TimeRemainingColumn(compact=True),
            console=self.console,
        )
        self.tasks: dict[str, TaskID] = {}
        self._printed = 0.0
        self._proven: set[str] = set()

    def __enter__(self) -> Display:
        if not self.quiet and self.console.is_terminal:
            self.live.start()
        return self

    def __exit__(self, *error: object) -> None:
        if self.live.live.is_started:
            self.federation.ended = True
            # The terminal may be closed, but the run has ended successfully.
            with suppress(OSError):
                self.live.stop()

    def __call__(self, label: str, event: dict[str, Any]) -> None:
        """Show the progress of the run called `label`.

        A run continues if its output can no longer be written.
        """
        if self.quiet:
            return
        try:
            self._show(label, event)
        except OSError:  # the terminal or the reader is gone
            self.quiet = True

    def _show(self, label: str, event: dict[str, Any]) -> None:
        # News of a server about its clients, which is no progress of the run.
        if "unit" not in event:
            line = self.federation.hears(event)
            if line is not None and not self.console.is_terminal:
                self.console.print(printable(line), markup=False, highlight=False, soft_wrap=True)
            return
        if label not in self._proven:
            self._proven.add(label)
            for what, seconds in event["proofs"]:
                tried = printable(f"{label}: {what} (tried in {duration(seconds)})")
                self.console.print(tried, markup=False, highlight=False, soft_wrap=True)
        done = fraction_done(self.stop, event)
        if not self.console.is_terminal:
            self._line(label, event, done)
            return
        if label not in self.tasks:
            # Without a limit that is known in advance the bar is indeterminate.
            self.tasks[label] = self.live.add_task(
                escape(label), total=None if done is None else 1.0, facts=""
            )
        said = facts(event)
        if self.federation.serves:
            # A federation has many metrics, which get a line of their own.
            said, _, self.federation.model = said.partition(" · ")
        self.live.update(self.tasks[label], completed=done or 0.0, facts=said)

    def _line(self, label: str, event: dict[str, Any], done: float | None) -> None:
        ended = done is not None and done >= 1.0
        # The last line shows the final metrics, not those of an earlier evaluation.
        if ended and event["evaluated"] != event["step"]:
            return  # the last evaluation is still to come
        if ended or time.monotonic() - self._printed > PLAIN_SECONDS:
            self._printed = time.monotonic()
            share = "" if done is None else f"{done:4.0%} "
            print(f"{share}{label}: {facts(event)}", file=sys.stderr, flush=True)


def human_bytes(count: float) -> str:
    """Return bytes as text, 1,234,567 as "1.23 MB"; powers of 1000."""
    for unit in ("B", "kB", "MB", "GB"):
        if count < 999.5:  # which three digits would round to 1e+03
            return f"{count:.3g} {unit}"
        count /= 1000
    return f"{count:.3g} TB" if count < 999.5 else f"{count:,.0f} TB"


_ROW = "row"
"""Key of a summary that names the model of its row: "best" or "last"."""


def best_and_last(summaries: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return a summary for each row: two where a run's best model is not its last."""
    rows = []
    for summary in summaries:
        chosen = summary.get("best_model", {})
        if not chosen.get("metrics") or chosen["step"] == summary["steps"]:
            rows.append(summary)
            continue
        label, unit = summary["label"], summary["unit"]
        best = f"{label}: best, {unit} {chosen['step']:,}"
        last = f"{label}: last, {unit} {summary['steps']:,}"
        of_best = {**summary, **chosen["metrics"], _ROW: "best", "system": label}
        rows += [{**of_best, "label": best}, {**summary, "label": last, _ROW: "last"}]
    return rows


def is_last(summary: dict[str, Any]) -> bool:
    """Return whether a row shows a last model beside which a better model is kept."""
    return summary.get(_ROW) == "last"


def competes(summary: dict[str, Any], heading: str) -> bool:
    """Return whether a row can be marked as the best of a column."""
    # Clients' own models are measured separately from their mean.
    of_mean = _is_metric(heading, summary) and not heading.startswith("personal ")
    means = of_mean and "mean_of" in summary
    return not means and not is_last(summary)


def _is_metric(heading: str, summary: dict[str, Any]) -> bool:
    return heading.replace(" ", "_") in summary["best"]


def notes_on(summaries: Sequence[dict[str, Any]]) -> list[str]:
    """Return notes on the table: best models, means, missing clients, the majority class."""
    notes = []
    if any(_ROW in one for one in best_and_last(summaries)):
        monitors = {one["best_model"]["monitor"] for one in summaries if "best_model" in one}
        by = ", ".join(sorted(name.replace("_", " ") for name in monitors))
        notes.append(f"best: the model chosen by {by}, which dure predict uses; last: with --last")
    for one in summaries:
        if "mean_of" in one:
            notes.append(
                f"{one['label']}: the mean of {one['mean_of']}, a model that no client has: its "
                "metrics are not compared"
            )
    for one in summaries:
        facts: dict[str, Any] = next(iter(one.get("facts", ())), {})
        if facts.get("left"):
            notes.append(
                f"{one['label']}: {len(facts['left'])} of {facts['took_part']['clients']} clients "
                f"missing at the end (dure show names them)"
            )
    # A baseline belongs to a task; runs of different tasks show several.
    accuracies = {one.get("baseline", {}).get("test_accuracy") for one in summaries}
    known = sorted(accuracy for accuracy in accuracies if accuracy is not None)
    if known:
        told = ", ".join(f"{accuracy:.4f}" for accuracy in known)
        notes.append(f"majority class: test accuracy {told} without learning")
    differs = unlike([(one["label"], _amount(one)) for one in summaries])
    return notes if differs is None else [differs, *notes]


def _no_suffix(summary: dict[str, Any]) -> str:
    return ""


class SummaryColumn(NamedTuple):
    """A column of the table of summaries.

    Args:
        heading: heading.
        value: function from a summary to its number; None if the number is unknown.
        text: function from a number to its text.
        lower: whether a lower value is better; None if no value is better.
        suffix: function from a summary to a further text of its cell.
    """

    heading: str
    value: Callable[[dict[str, Any]], float | None]
    text: Callable[[float], str]
    lower: bool | None
    suffix: Callable[[dict[str, Any]], str] = _no_suffix


def _number(name: str, summary: dict[str, Any]) -> float | None:
    return cast("float | None", summary.get(name))


def _epsilon(summary: dict[str, Any]) -> float | None:
    """Return the epsilon of a run with differential privacy, else None."""
    return cast("float | None", (summary.get("numbers") or {}).get("epsilon"))


def _virtual(summary: dict[str, Any]) -> float | None:
    """Return a simulation's own clock; None for a run in real time."""
    return cast("float | None", (summary.get("numbers") or {}).get("virtual_seconds"))


def _clocks(summaries: Sequence[dict[str, Any]]) -> list[SummaryColumn]:
    """Return columns of time; real and virtual seconds never share a column.

    The real time of a simulation has no best value: it measures no system.
    """

    def real(summary: dict[str, Any]) -> float | None:
        return summary["seconds"] if _virtual(summary) is None else None

    def simulating(summary: dict[str, Any]) -> float | None:
        return None if _virtual(summary) is None else summary["seconds"]

    clocks = [
        SummaryColumn("time", real, duration, True),
        SummaryColumn("virtual time", _virtual, duration, True),
        SummaryColumn("simulated in", simulating, duration, None),
    ]
    return [column for column in clocks if any(column.value(one) is not None for one in summaries)]


def _shuffle(summaries: Sequence[dict[str, Any]]) -> list[SummaryColumn]:
    """Return columns of the cost of shuffling, if any run shuffled; 0 for systems without it."""
    if not any(summary.get("shuffle_bytes") for summary in summaries):
        return []

    def mean(key: str) -> Callable[[dict[str, Any]], float | None]:
        return lambda summary: summary.get(key, 0) / summary.get("workers", 1)

    return [
        SummaryColumn("shuffled per worker", mean("shuffle_bytes"), human_bytes, None),
        SummaryColumn("shuffle time", mean("shuffle_seconds"), duration, None),
    ]


def _amount(summary: dict[str, Any]) -> TrainingAmount:
    """Return the amount of training; unknown is what a run of another version of dure lacks."""
    told = mapping(summary.get("training_amount"))
    return TrainingAmount(**{name: told[name] for name in TrainingAmount._fields if name in told})


def _of_copies(summary: dict[str, Any]) -> str:
    return "local" if _amount(summary).local else ""


def _most_sent(summary: dict[str, Any]) -> str:
    """Return the worker that has sent the most, if it has sent more than the mean."""
    most = largest_sender(summary.get("per_worker", ()), summary["bytes_sent_per_worker"])
    return "" if most is None else f"({printable(most.name)}: {human_bytes(most.nbytes)})"


def _on_devices(summaries: Sequence[dict[str, Any]]) -> list[SummaryColumn]:
    """Return columns of accelerators, of those numbers that any run has."""
    known = (
        SummaryColumn("device memory", lambda s: s.get("peak_device_memory"), human_bytes, True),
        SummaryColumn("MFU", lambda s: s.get("mfu"), lambda v: f"{v:.1%}", False),
    )
    return [one for one in known if any(one.value(s) is not None for s in summaries)]


def _reached(name: str, summary: dict[str, Any]) -> float | None:
    """Return the steps or rounds until the target; None if the run did not reach or have it."""
    return cast("float | None", summary["to_target"].get(name, {}).get("reached"))


def _has_a_column(metric: str) -> bool:
    """Return whether a metric has a column; of statistics over clients, only the worst tenth."""
    return not is_spread(metric) or (metric.endswith("_p10") and "loss" not in metric)


def columns(summaries: Sequence[dict[str, Any]]) -> list[SummaryColumn]:
    """Return the columns of the table: metrics, then time, bytes and memory."""
    # In order of first appearance, without metrics that no run has at its end.
    named = dict.fromkeys(name for summary in summaries for name in summary["best"])
    metrics = [
        name
        for name in named
        if any(summary.get(name) is not None for summary in summaries) and _has_a_column(name)
    ]
    # Rising metrics, such as accuracies, come first; the sort is stable for the rest.
    metrics.sort(key=lower_is_better)
    result = [
        SummaryColumn(
            name.replace("_", " "),
            partial(_number, name),
            lambda v: f"{v:.4f}",
            lower_is_better(name),
        )
        for name in metrics
    ]
    if any(_epsilon(summary) is not None for summary in summaries):
        result.append(SummaryColumn("epsilon", _epsilon, lambda v: f"{v:.4g}", True))
    # Settings, of which none is best.
    settings = [
        SummaryColumn("batch", lambda s: _amount(s).batch, count, None, _of_copies),
        SummaryColumn("steps", lambda s: _amount(s).steps, count, None),
    ]
    result += [
        *(one for one in settings if any(one.value(s) is not None for s in summaries)),
        SummaryColumn("epochs", lambda s: s["epochs"], lambda v: f"{v:.3g}", True),
        *_clocks(summaries),
        SummaryColumn(
            "sent per worker", lambda s: s["bytes_sent_per_worker"], human_bytes, True, _most_sent
        ),
        *_shuffle(summaries),
        SummaryColumn("peak memory", lambda s: s["peak_memory"], human_bytes, True),
        *_on_devices(summaries),
        # No best value: a slower computation is less idle.
        SummaryColumn("idle (over busy)", lambda s: s.get("idle_share"), idleness.written, None),
    ]
    targets = list(dict.fromkeys(name for summary in summaries for name in summary["to_target"]))
    for name in targets:
        goal = next(s["to_target"][name]["target"] for s in summaries if name in s["to_target"])
        title = f"until {name.replace('_', ' ')} {goal:g}"
        result.append(SummaryColumn(title, partial(_reached, name), lambda v: f"{v:.1f}", True))
    return result


def table(summaries: Sequence[dict[str, Any]], console: Console | None = None) -> Table:
    """Return the table of runs; with several runs the best value of every column is in bold.

    A run with a chosen best model has two rows: its best model, and its last. console: bounds the
    width. Columns that do not fit are left out, and named below the table.
    """
    notes = notes_on(summaries)
    summaries = best_and_last(summaries)
    shown = columns(summaries)
    left_out: list[str] = []
    result = _table(summaries, shown)
    if (
        console is None
        or console.measure(result, options=console.options.update(width=10_000)).maximum
        <= console.width
    ):
        return with_notes(result, notes)
    # Column by column, until the names of systems and worlds have room.
    while (
        room := console.width - sum(_width(column, summaries) + 2 for column in shown)
    ) < NAMES_WIDTH:
        if len(shown) < 2:
            break
        left_out.append(shown.pop(_least(shown)).heading)
    result = _table(summaries, shown, room)
    if left_out:
        names = ", ".join(reversed(left_out))
        notes.append(f"no space to show {names}: see summary.json or the report")
    return with_notes(result, notes)


def with_notes(result: Table, notes: Sequence[str]) -> Table:
    """Return the table with notes below it."""
    if notes:
        result.caption = "\n".join(escape(printable(note)) for note in notes)
        result.caption_justify = "left"
    return result


def _width(column: SummaryColumn, summaries: Sequence[dict[str, Any]]) -> int:
    """Return the width that a column of numbers needs."""
    cells = [_cell(column, one, "\n") for one in summaries]
    lines = [line for cell in cells for line in cell.splitlines()]
    return max(map(len, [*column.heading.split(), *lines]))


def _cell(column: SummaryColumn, summary: dict[str, Any], between: str = " ") -> str:
    """Return the text of a cell. between: separates the number from its suffix."""
    found = column.value(summary)
    if found is None:
        return UNKNOWN
    return between.join(filter(None, [column.text(found), column.suffix(summary)]))


_NO_METRICS = (
    "epsilon",
    "batch",
    "steps",
    "epochs",
    "time",
    "virtual time",
    "simulated in",
    "sent per worker",
    "shuffled per worker",
    "shuffle time",
    "peak memory",
    "device memory",
    "MFU",
    "idle (over busy)",
)


_DETAILS = (
    "idle (over busy)",
    "simulated in",
    "shuffle time",
    "shuffled per worker",
)
"""Columns that are left out first, in this order."""


def _least(shown: Sequence[SummaryColumn]) -> int:
    """Return the index of the column to leave out first.

    The order: idle time, real time of simulations, shuffling, the last metric of clients, memory,
    the last metric of the model except for the first, steps, batch, epochs, bytes.
    """
    names = [column.heading for column in shown]
    metrics = [
        place for place, name in enumerate(names) if name not in _NO_METRICS and name[:5] != "until"
    ]
    of_clients = [names[place] for place in metrics if not names[place].startswith("test ")]
    order = [
        *_DETAILS,
        *reversed(of_clients),
        "peak memory",
        "device memory",
        *(names[place] for place in reversed(metrics[1:])),
        "steps",
        "batch",
        "epochs",
        "sent per worker",
        "MFU",
    ]
    return next((names.index(name) for name in order if name in names), len(names) - 1)


def _table(
    summaries: Sequence[dict[str, Any]], shown: Sequence[SummaryColumn], room: int | None = None
) -> Table:
    """Return the table. room: width of the names of systems and worlds, if numbers are packed."""
    result = Table(box=None, pad_edge=False, header_style="dim")
    places = list(map(_place, summaries))
    # The world gets a third of the room, or its longest word if that is longer, but no more than
    # it needs; the system gets the rest.
    where = (
        None
        if room is None
        else min(max(map(len, places)), max(room // 3, max(map(len, " ".join(places).split()))))
    )
    name = (
        None
        if where is None or room is None
        else min(max(len(s["label"]) for s in summaries), room - where - 2)
    )
    result.add_column("system", width=name, no_wrap=room is None)
    result.add_column("in", style="dim", width=where)
    for column in shown:
        result.add_column(
            column.heading,
            justify="right",
            width=None if room is None else _width(column, summaries),
        )
    best: list[float | None] = []
    for column in shown:
        competing = (one for one in summaries if competes(one, column.heading))
        present = [v for v in map(column.value, competing) if v is not None]
        # Equal values have no best.
        compares = column.lower is not None and len(set(present)) > 1
        best.append((min if column.lower else max)(present) if compares else None)
    for summary in summaries:
        cells = []
        for column, top in zip(shown, best, strict=True):
            found = column.value(summary)
            written = escape(_cell(column, summary, " " if room is None else "\n"))
            # The cost of a run is shown in the row of its best model.
            if is_last(summary) and not _is_metric(column.heading, summary):
                written = ""
            marked = found is not None and found == top and competes(summary, column.heading)
            cells.append(f"[bold]{written}[/bold]" if marked else written)
        result.add_row(
            escape(printable(summary["label"])), escape(printable(_place(summary))), *cells
        )
    return result


def _place(summary: dict[str, Any]) -> str:
    """Return the world of the run; the conditions of clients are in the label."""
    world = str(summary["world"])
    return "simulated" if world.startswith("simulated") else world
