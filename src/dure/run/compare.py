"""Many systems side by side, and one report.

Task, seed, initial weights and limits are the same for all of them.
"""

from __future__ import annotations

import dataclasses
import functools
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from dure.arguments import check_path, shown
from dure.contracts.stop import Stop
from dure.contracts.strategy import Strategy, World
from dure.contracts.task import Task
from dure.errors import DureError, exit_is_a_failure, text_of
from dure.record.disk import write_atomically
from dure.record.run import Run, RunFolder
from dure.run.asked import check_asked, check_function
from dure.run.fresh import fresh_model
from dure.run.job import Job
from dure.run.registry import default_world
from dure.run.train import Progress, begun_here, heard, prepare, run_job
from dure.worlds.processes.fork_server import server

server.keeps_here(__name__)

Entry = Strategy | tuple[Strategy, World]


@dataclass(frozen=True)
class Comparison:
    """What a comparison came to.

    runs: those that ended, in the order asked. failed: label to error. report: the page, if `out`
    was given.
    """

    runs: list[Run]
    failed: dict[str, DureError]
    report: Path | None = None


def _ignore(label: str, event: dict[str, Any]) -> None:
    pass


def compare(
    task: Task,
    systems: Sequence[Entry],
    *,
    stop: Stop | None = None,
    seed: int = 0,
    out: str | Path | None = None,
    evaluate_every: int | None = None,
    check: bool = True,
    callbacks: Sequence[Any] = (),
    track: str | None = None,
    on_progress: Callable[[str, dict[str, Any]], None] = _ignore,
) -> Comparison:
    """Trains `task` by each of `systems`, one after another, and writes one report.

    systems: strategies, or pairs (strategy, world) where the default world is not what is wanted.
    stop: the same limits for all; limits that a strategy does not count (rounds, steps) do not
        concern it.
    out: a new or empty folder that gets a run folder for each system, comparison.json and
        report.html.
    check: as in `dure.train`, for every system.
    callbacks, track: as in `dure.train`; they hear of one run after another.
    on_progress: called with the label of the system at work and the event that `dure.train`
        reports.

    A system that fails does not end the comparison; it is in `failed`. Ctrl-C ends it after the
    step at hand: the report is written of what there is.

    Raises ValueError or RunFolderError, before any work, if anything asked does not fit.
    """
    stop = stop if stop is not None else Stop(epochs=10)
    check_asked(task, stop, seed=seed, evaluate_every=evaluate_every)
    check_path("out", out, optional=True)
    check_function("on_progress", on_progress)
    if isinstance(systems, (str, Strategy)) or not isinstance(systems, Iterable):
        raise ValueError(
            f"systems is {shown(systems)}: give a list of strategies, or of pairs (strategy, world)"
        )
    heard(callbacks, track)  # what is wrong with them is said before any work
    systems = list(systems)
    for entry in systems:
        if isinstance(entry, tuple) and len(entry) != 2:
            raise ValueError(f"{shown(entry)} is no pair: give (strategy, world), or a strategy")
    pairs = [
        entry if isinstance(entry, tuple) else (entry, default_world(entry)) for entry in systems
    ]
    if not pairs:
        raise ValueError("there is nothing to compare: give at least one strategy")
    with exit_is_a_failure("the task", "making the model"):
        # Every run in this process begins with a copy of it.
        divided = all(_holds_parts(*pair) for pair in pairs)
        waits = divided and all(world.elsewhere for _, world in pairs)
        model = fresh_model(task, seed, divided, waits)
    prepared = [
        _prepared(
            task,
            strategy,
            world,
            stop,
            seed,
            evaluate_every=evaluate_every,
            check=check,
            model=model,
        )
        for strategy, world in pairs
    ]
    # A label names the run in tables, and its folder.
    labels = _unique([job.label for job, _ in prepared])
    folder = Path(out) if out is not None else None
    leads = all(world.leads for _, world in pairs)
    asked = {"task": task.name, "seed": seed, "stop": msgspec.to_builtins(stop)}
    if folder is not None and leads:
        _make_folder(folder, asked)
    for _, world in pairs:
        world.ready()  # before anything is measured
    done = Comparison([], {})
    names: list[str] = []
    for (job, config), (_, world), label in zip(prepared, pairs, labels, strict=True):
        names.append(_slug(label))
        path = folder / names[-1] if folder is not None else None
        if path is not None and leads:
            RunFolder.create(path, {**config, "label": label})
            begun_here(path, job.task, job.strategy, world)
        job = dataclasses.replace(job, label=label, folder=path, config={**config, "label": label})
        hearing = heard(callbacks, track)
        if _run(job, world, functools.partial(on_progress, label), hearing, done) == "interrupt":
            break  # Ctrl-C is meant for the whole comparison
    if folder is None or not leads:
        return done
    return dataclasses.replace(done, report=_report(folder, asked, names, done))


def _holds_parts(strategy: Strategy, world: World) -> bool:
    """Whether no worker of a system needs the whole model."""
    # What is neither is refused when it is prepared.
    known = isinstance(strategy, Strategy) and isinstance(world, World)
    return known and strategy.holds_parts(world.workers)


def _make_folder(folder: Path, asked: Mapping[str, Any]) -> None:
    """A new folder for the comparison. Raises what says that no report can be drawn in the end."""
    from dure.report.document import check_plotly

    check_plotly("the report")  # now, and not after hours of training
    RunFolder.create(folder, asked)
    # A config.json would make the folder of the comparison look like one of a run.
    (folder / "config.json").rename(folder / "comparison.json")


def _run(
    job: Job, world: World, on_progress: Progress, hearing: Sequence[Any], done: Comparison
) -> str:
    """Does a job and notes it in `done`; how it ended."""
    try:
        run = run_job(job, world, on_progress, hearing)
    # Errors of dure alone: anything else is a bug, which has to be seen.
    except DureError as error:
        done.failed[job.label] = error
        return "failed"
    done.runs.append(run)
    return str(run.summary["ended"])


def _report(folder: Path, asked: Mapping[str, Any], names: list[str], done: Comparison) -> Path:
    """Writes comparison.json and the page. names: the runs' folders."""
    from dure.report import write_report

    failed = {label: text_of(error) for label, error in done.failed.items()}
    content = {**asked, "runs": names, "failed": failed}
    text = msgspec.json.format(msgspec.json.encode(content)) + b"\n"
    write_atomically(folder / "comparison.json", text)
    return write_report([folder], folder / "report.html")


def _prepared(
    task: Task, strategy: Strategy, world: World, stop: Stop, seed: int, **how: Any
) -> tuple[Job, dict[str, Any]]:
    """As `prepare`, whose complaints are told with the system's name."""
    try:
        return prepare(task, strategy, world, stop, seed, **how)
    except ValueError as error:
        name = strategy.name if isinstance(strategy, Strategy) else type(strategy).__name__
        raise ValueError(f"{name}: {error}") from error


def _slug(label: str) -> str:
    """A label as the name of a folder."""
    return re.sub(r"[^a-z0-9]+", "-", label.lower().replace("×", "x")).strip("-")


def _unique(labels: Sequence[str]) -> list[str]:
    """The labels, numbered where several would have the same folder."""
    result: list[str] = []
    for label in labels:
        # Labels that differ in signs only would share a folder.
        taken = set(map(_slug, result))
        numbered = label
        count = 1
        while _slug(numbered) in taken:
            count += 1
            numbered = f"{label} ({count})"
        result.append(numbered)
    return result
