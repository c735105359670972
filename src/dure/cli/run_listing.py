"""`dure list` and `dure show`: list runs, and show a run's settings and results.

Both read folders as data: no code of a task is imported, and no module that loads slowly. The lock
of a run shows whether a process is training it (`dure.record.lock`).
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dure.cli.flags import names_before_flags, parse_flags
from dure.errors import RunFolderError
from dure.peer_text import printable
from dure.record.history import is_spread, judging
from dure.record.lock import is_held
from dure.record.settings import LINEAGE, alteration_note, without_sums
from dure.record.untrusted_files import contents, opened
from dure.report.formatting import duration, metric_name, metric_value
from dure.report.json_values import mapping, number, text_of

if TYPE_CHECKING:
    from dure.report.runs import RunResult

_DEPTH = 3
"""Levels of subfolders that are searched for runs."""

_TAIL = 4096
"""Bytes at the end of a history that contain its last line."""


@dataclass(frozen=True)
class ListRunsOptions:
    """Options of the list of runs.

    Args:
        json: print a list of objects as JSON on standard output.
    """

    json: bool = False


@dataclass(frozen=True)
class ShowRunOptions:
    """Options of a run's description.

    Args:
        json: print settings and results as JSON on standard output.
    """

    json: bool = False


def list_runs(given: list[str]) -> int:
    """Run `dure list [FOLDER ...]`: print a line for each run, the newest last."""
    names, flags = names_before_flags(given)
    usage = "dure list [FOLDER ...]"
    how: ListRunsOptions = parse_flags(
        usage, {"how": ListRunsOptions}, flags, "List the runs in folders, by default in runs/."
    )["how"]
    roots = [Path(name) for name in names] or [Path("runs")]
    for root in roots:
        if names and not root.is_dir():
            raise RunFolderError(f"there is no folder {root}")
    found = sorted(
        (listed(folder) for root in roots for folder in runs_below(root)),
        key=lambda run: run["begun"],
    )
    if how.json:
        print(json.dumps(found))
        return 0
    if not found:
        print(f"no runs in {', '.join(map(str, roots))}", file=sys.stderr)
        return 0
    _print_table(found)
    return 0


def show(given: list[str]) -> int:
    """Run `dure show RUN`: print the settings, the results, and commands for the next step."""
    names, flags = names_before_flags(given)
    usage = "dure show RUN"
    how: ShowRunOptions = parse_flags(
        usage,
        {"how": ShowRunOptions},
        flags,
        "Show the settings and results of a run or a comparison.",
    )["how"]
    if len(names) != 1:
        raise ValueError(f"{usage}: name one run folder; dure list lists them")
    folder = Path(names[0])
    if (folder / "comparison.json").is_file():
        return _show_comparison(folder, how.json)
    if not (folder / "config.json").is_file():
        raise RunFolderError(f"{folder} is not a run folder: it has no config.json")
    if how.json:
        config = _read(folder / "config.json")
        lineage = mapping(_read(folder / LINEAGE).get("lineage"))
        wrong = alteration_note(config, lineage.get("config_sha256"))
        content = {**listed(folder), "config": without_sums(config), "altered": wrong}
        print(json.dumps({**content, "summary": _read(folder / "summary.json")}))
        return 0
    for name, value in _facts(folder):
        print(f"{name:<12} {printable(value)}")
    return 0


# A run


def runs_below(root: Path, depth: int = _DEPTH) -> Iterator[Path]:
    """Yield the run folders in a folder, or the folder itself if it is a run folder."""
    if (root / "config.json").is_file():
        yield root
        return
    if depth == 0 or not root.is_dir():
        return
    with suppress(OSError):  # a folder that may not be read
        for inside in sorted(root.iterdir()):
            if inside.is_dir() and not inside.is_symlink():
                yield from runs_below(inside, depth - 1)


def listed(folder: Path) -> dict[str, Any]:
    """Return a run as JSON: folder, label, task, system, seed, state, step, metric, seconds, begun.

    value: of the best model if one was chosen, else of the last.
    """
    config = _read(folder / "config.json")
    summary = _read(folder / "summary.json")
    last = {} if summary else _last_line(folder / "history.jsonl")
    metric = _metric(summary)
    return {
        "folder": str(folder),
        "label": text_of(config.get("label")) or folder.name,
        "task": _task(config),
        "system": text_of(mapping(config.get("strategy")).get("name")),
        "seed": config.get("seed"),
        "state": _state(folder, summary, last),
        "step": number(summary.get("steps", last.get("step"))),
        "metric": metric,
        "value": None if metric is None else _value(summary, metric),
        "seconds": number(summary.get("seconds", last.get("seconds"))),
        "begun": (folder / "config.json").stat().st_mtime,
    }


def _state(folder: Path, summary: Mapping[str, Any], last: Mapping[str, Any]) -> str:
    """Return "running", "interrupted", "done (epochs)", "killed" or "not begun"."""
    if is_held(folder):
        return "running"
    ended = text_of(summary.get("ended"))
    if ended is not None:
        return "interrupted" if ended == "interrupt" else f"done ({ended})"
    return "killed" if last else "not begun"


def _metric(summary: Mapping[str, Any]) -> str | None:
    """Return the main metric of a run; None without metrics."""
    names = [
        name
        for name in mapping(summary.get("best"))
        if not is_spread(name) and number(summary.get(name)) is not None
    ]
    return min(names, key=judging, default=None)


def _value(summary: Mapping[str, Any], metric: str) -> float | None:
    chosen = mapping(mapping(summary.get("best_model")).get("metrics"))
    return number(chosen.get(metric, summary.get(metric)))


def _task(config: Mapping[str, Any]) -> str:
    task = mapping(config.get("task"))
    return text_of(task.get("title")) or text_of(task.get("name")) or "created in Python"


def _read(path: Path) -> Mapping[str, Any]:
    """Return the content of a JSON file; {} if it is missing or damaged."""
    try:
        value = json.loads(contents(path))
    except (OSError, ValueError, RecursionError):
        return {}
    return mapping(value)


def _last_line(path: Path) -> Mapping[str, Any]:
    """Return the last complete line of a history; a killed run may leave an incomplete line."""
    try:
        with opened(path) as file:
            file.seek(max(os.fstat(file.fileno()).st_size - _TAIL, 0))
            lines = file.read().split(b"\n")
    except OSError:
        return {}
    for line in reversed(lines):
        with suppress(ValueError, RecursionError):
            found = mapping(json.loads(line))
            if found:
                return found
    return {}


def _print_table(found: Sequence[Mapping[str, Any]]) -> None:
    from rich.console import Console
    from rich.markup import escape
    from rich.table import Table

    table = Table(box=None, pad_edge=False, header_style="dim")
    for heading in (
        "folder",
        "task",
        "system",
        "seed",
        "state",
        "steps",
        "result",
        "time",
        "begun",
    ):
        right = heading in ("seed", "steps", "time")
        table.add_column(heading, justify="right" if right else "left", no_wrap=heading == "folder")
    for run in found:
        step = run["step"]
        table.add_row(
            *(
                escape(printable(text))
                for text in (
                    run["folder"],
                    run["task"],
                    run["label"],
                    str(run["seed"]),
                    run["state"],
                    "–" if step is None else f"{step:,.0f}",
                    _result(run),
                    duration(run["seconds"]),
                    time.strftime("%Y-%m-%d %H:%M", time.localtime(run["begun"])),
                )
            )
        )
    console = Console()
    # A file or a pipe has no width; rich would take 80 columns and wrap the table.
    (console if console.is_terminal else Console(width=200)).print(table)


def _result(run: Mapping[str, Any]) -> str:
    if run["metric"] is None:
        return "–"
    return f"{metric_name(run['metric'])} {metric_value(run['metric'], run['value'])}"


def _facts(folder: Path) -> Iterator[tuple[str, str]]:
    """Yield the description of a run: pairs of a name and a text."""
    from dure.report import federated, pipeline, privacy
    from dure.report.formatting import count, size
    from dure.report.read import read_run
    from dure.report.repeat_command import command, settings

    run = read_run(folder)
    told = listed(folder)
    result = run.result
    yield "run", run.label
    yield "folder", str(folder)
    yield "task", _with_options(run.config)
    yield "system", settings(run)
    yield "seed", str(told["seed"])
    yield "state", told["state"]
    steps = "–" if result.steps is None else f"{count(result.steps)} {result.unit}s"
    epochs = "" if result.epochs is None else f", {result.epochs:,.4g} epochs"
    yield "done", f"{steps}{epochs}, {duration(result.seconds)}"
    for name, value in result.final.items():
        if not is_spread(name):
            yield metric_name(name), _measured(result, name, value)
    yield from _about(result)
    yield "sent", f"{size(result.bytes_per_worker)} per worker"
    yield "memory", f"{size(result.peak_memory)} at the peak"
    if result.device_memory:
        yield "device", f"{size(result.device_memory)} of its memory at the peak"
    if result.mfu:
        yield "MFU", f"{result.mfu:.1%}"
    lines = (pipeline.in_a_line(run), federated.in_a_line(run), privacy.in_a_line(run))
    for line in filter(None, (*lines, *run.notes)):
        yield "told", line
    again = command(run)
    if again is not None:
        yield "again", again
    yield "next", _next(folder, told["state"])


def _measured(result: RunResult, name: str, last: float) -> str:
    """Return a metric of the best and the last model, or the last and its best evaluation."""
    told = metric_value(name, last)
    if result.chosen is None:
        return f"{told} (best evaluation {metric_value(name, result.best.get(name))})"
    chosen = metric_value(name, result.chosen.metrics.get(name))
    return f"{chosen} best model, {told} last"


def _about(result: RunResult) -> Iterator[tuple[str, str]]:
    """Yield notes on the metrics: the best model, a mean of models, the majority class."""
    chosen = result.chosen
    if chosen is not None:
        by = metric_name(chosen.monitor)
        steps = (
            "" if result.steps is None else f"; the last is from {result.unit} {result.steps:,.0f}"
        )
        yield "best model", f"from {result.unit} {chosen.step:,.0f}, chosen by {by}{steps}"
    if result.mean_of is not None:
        yield "told", f"the metrics are of the mean of {result.mean_of}, a model that no client has"
    for name, value in result.baseline.items():
        told = f"{metric_name(name)} {metric_value(name, value)}"
        yield (
            "majority",
            f"{told}, if the most frequent class of the training data is always predicted",
        )


def _with_options(config: Mapping[str, Any]) -> str:
    options = mapping(mapping(config.get("task")).get("options"))
    return " · ".join([_task(config), *(f"{name} {value}" for name, value in options.items())])


def _next(folder: Path, state: str) -> str:
    """Return commands that apply to a run in this state."""
    if state.startswith("done"):
        return f"dure predict {folder} INPUT, dure report {folder}"
    if state == "running":
        return f"dure report {folder}"
    return f"dure train --resume {folder}"


def _show_comparison(folder: Path, as_json: bool) -> int:
    comparison = _read(folder / "comparison.json")
    found = [listed(run) for run in runs_below(folder)]
    if as_json:
        print(json.dumps({"comparison": comparison, "runs": found}))
        return 0
    _print_table(found)
    for label, why in mapping(comparison.get("failed")).items():
        print(f"failed: {printable(f'{label}: {why}')}")
    if (folder / "report.html").is_file():
        print(f"report: {folder / 'report.html'}")
    if any(not run["state"].startswith(("done", "running")) for run in found):
        print(f"resume with: dure train --resume {folder}")
    return 0
