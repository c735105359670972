"""Compare several systems in one report.

Task, seed, initial weights and limits are the same for all systems, except where the caller says
otherwise: a system may have a task of its own, such as the same task with another learning rate,
and all systems may be trained under several seeds. Then each system has a run for each seed, in
folders `name-seed-0` and so on, all with the system's label; the report shows statistics over seeds
(`dure.record.spread`).

All folders are made, with their config.json, before the first run begins, so that an interrupted or
killed comparison can be resumed from its folder alone (`dure.run.existing_runs`).
"""

from __future__ import annotations

import dataclasses
import functools
import re
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
from torch import nn

from dure.arguments import check_path, shown
from dure.contracts.stop import Stop
from dure.contracts.strategy import Strategy
from dure.contracts.task import Task
from dure.contracts.world import World
from dure.errors import DureError, exit_is_a_failure, text_of
from dure.record.disk import write_atomically
from dure.record.run import Run, RunFolder
from dure.run.argument_checks import check_function, check_run_arguments, check_task
from dure.run.job import Job
from dure.run.progress import bars_here
from dure.run.registry import default_world
from dure.run.run_model import RunModel, new_model
from dure.run.train import all_callbacks, begun_here, prepare, run_job
from dure.worlds.processes.fork_server import server

server.keeps_here(__name__)

Entry = (
    Strategy
    | tuple[Strategy, World]
    | tuple[Strategy, World | None, Task]
    | tuple[Strategy, World | None, Task, str]
)

COMPARISON = "comparison.json"
"""File that marks the folder of a comparison, as config.json marks a run folder."""


@dataclass(frozen=True)
class Comparison:
    """Result of a comparison.

    runs: successful runs, in the requested order; runs of a system under several seeds share its
    label. failed: label to error. report: path of the page if `out` was given, else None.
    """

    runs: list[Run]
    failed: dict[str, DureError]
    report: Path | None = None


@dataclass(frozen=True)
class _Planned:
    """A planned run. name: of its folder. told: label for progress."""

    job: Job
    config: Mapping[str, Any]
    world: World
    name: str
    told: str


def _ignore(label: str, event: dict[str, Any]) -> None:
    pass


def compare(
    task: Task,
    systems: Sequence[Entry],
    *,
    stop: Stop | None = None,
    seed: int = 0,
    seeds: int = 1,
    out: str | Path | None = None,
    evaluate_every: int | None = None,
    check: bool = True,
    callbacks: Sequence[Any] = (),
    track: str | None = None,
    on_progress: Callable[[str, dict[str, Any]], None] = _ignore,
) -> Comparison:
    """Train `task` by each of `systems` in turn, and write one report.

    A failing system does not end the comparison; its error is in `failed`. Ctrl-C ends the
    comparison after the current step: the report covers the runs so far, and
    `dure.resume_comparison` resumes the comparison.

    Args:
        task: model, loss and data.
        systems: strategies, or pairs (strategy, world) for another world than the default, or
            (strategy, world or None, task) for a system with a task of its own, optionally with a
            label for tables as the fourth item.
        stop: limits for all systems; limits that a strategy does not count (rounds, steps) do not
            apply to that strategy.
        seed: first seed.
        seeds: number of seeds of each system, counted from `seed` on.
        out: a new or empty folder that gets a run folder for each system and seed, comparison.json
            and report.html.
        evaluate_every: as in `dure.train`, for every system.
        check: as in `dure.train`, for every system.
        callbacks: as in `dure.train`; they receive the events of all runs in turn.
        track: as in `dure.train`, for every run.
        on_progress: called with the label of the current system and the event of `dure.train`. By
            default a notebook draws a bar for each run.

    Returns:
        The runs, the errors and the path of the report.

    Raises:
        ValueError: before any work, if arguments do not fit.
        RunFolderError: before any work, if the folder is in use.
    """
    stop = stop if stop is not None else Stop(epochs=10)
    check_run_arguments(task, stop, seed=seed, evaluate_every=evaluate_every)
    check_seeds(seeds)
    check_path("out", out, optional=True)
    check_function("on_progress", on_progress)
    all_callbacks(callbacks, track)  # what is wrong with them is said before any work
    bars = bars_here(stop) if on_progress is _ignore else None
    on_progress = on_progress if bars is None else bars
    entries = _entries(task, systems)
    how = {"evaluate_every": evaluate_every, "check": check}
    planned = _planned(task, entries, stop, range(seed, seed + seeds), how)
    folder = Path(out) if out is not None else None
    is_leader = all(one.world.is_leader for one in planned)
    asked = {
        "task": task.name,
        "seed": seed,
        "seeds": seeds,
        "stop": msgspec.to_builtins(stop),
        "planned": [one.name for one in planned],
    }
    if folder is not None and is_leader:
        _make_folders(folder, asked, planned)
    for one in planned:
        one.world.ready()  # before anything is measured
    done = Comparison([], {})
    names: list[str] = []
    for one in planned:
        names.append(one.name)
        path = folder / one.name if folder is not None else None
        program = functools.partial(
            run_job,
            dataclasses.replace(one.job, folder=path, config=one.config),
            one.world,
            functools.partial(on_progress, one.told),
            all_callbacks(callbacks, track),
        )
        if execute_and_record(program, one.told, done) == "interrupt":
            break  # Ctrl-C is meant for the whole comparison
    if folder is None or not is_leader:
        return done
    return dataclasses.replace(done, report=write_comparison_files(folder, asked, names, done))


def check_seeds(seeds: Any) -> None:
    """Raise ValueError if `seeds` is no whole number of at least 1."""
    if not isinstance(seeds, int) or isinstance(seeds, bool) or seeds < 1:
        raise ValueError(
            f"seeds is {shown(seeds)}, but it is the number of seeds, counted from seed: 1 or more"
        )


class _Asked(NamedTuple):
    """A system of a comparison: strategy, world, task, and a label if the user gave one."""

    strategy: Strategy
    world: World
    task: Task
    label: str | None


def _entries(task: Task, systems: Any) -> list[_Asked]:
    """Return each system with its world and task. Raises ValueError for a malformed entry."""
    if isinstance(systems, (str, Strategy)) or not isinstance(systems, Iterable):
        raise ValueError(
            f"systems is {shown(systems)}: give a list of strategies, or of pairs (strategy, world)"
        )
    found: list[_Asked] = []
    for entry in systems:
        parts = entry if isinstance(entry, tuple) else (entry,)
        if not 1 <= len(parts) <= 4:
            raise ValueError(
                f"{shown(entry)} is not a pair: give (strategy, world), (strategy, world, task), "
                "or a strategy"
            )
        strategy: Strategy = parts[0]
        world: World | None = parts[1] if len(parts) > 1 else None
        own: Task = parts[2] if len(parts) > 2 else task
        label: str | None = parts[3] if len(parts) > 3 else None
        check_task(own)
        lives = default_world(strategy) if world is None else world
        found.append(_Asked(strategy, lives, own, label))
    if not found:
        raise ValueError("there is nothing to compare: give at least one strategy")
    return found


def _planned(
    task: Task,
    entries: Sequence[_Asked],
    stop: Stop,
    seeds: Sequence[int],
    how: Mapping[str, Any],
) -> list[_Planned]:
    """Return all runs, each checked as in `dure.train`. Raises ValueError if a run does not fit."""
    divided = all(_holds_parts(strategy, world) for strategy, world, *_ in entries)
    waits = divided and all(world.elsewhere for _, world, *_ in entries)
    models: dict[tuple[int, int], nn.Module] = {}

    def model(task: Task, seed: int) -> nn.Module:
        """Return the model that all runs of a task under a seed copy."""
        if (id(task), seed) not in models:
            with exit_is_a_failure("the task", "creating the model"):
                models[id(task), seed] = new_model(task, seed, divided, waits)
        return models[id(task), seed]

    prepared: list[list[tuple[Job, dict[str, Any]]]] = []
    for strategy, world, own, _ in entries:
        runs = []
        for seed in seeds:
            # A strategy's assumptions about a model are tested once, and not under every seed.
            tries = how["check"] and seed == seeds[0]
            runs.append(
                _prepared(
                    own,
                    strategy,
                    world,
                    stop,
                    seed,
                    **{**how, "check": tries},
                    model=model(own, seed),
                )
            )
        prepared.append(runs)
    # A label names the system in tables, and its folders.
    labels = _unique(
        [
            one.label or f"{runs[0][0].label}{_own_options(task, one.task)}"
            for runs, one in zip(prepared, entries, strict=True)
        ]
    )
    times = Counter((id(one.task), seed) for one in entries for seed in seeds)

    def fresh(own: Task, job: Job) -> RunModel | None:
        """Return the prepared model if several runs start from it; else drop it until needed."""
        if job.fresh is None or times[id(own), job.seed] > 1:
            return job.fresh
        return job.fresh.anew()

    return [
        _Planned(
            job=dataclasses.replace(job, label=label, check=how["check"], fresh=fresh(own, job)),
            config={**config, "label": label},
            world=world,
            name=_slug(label) + (f"-seed-{job.seed}" if len(seeds) > 1 else ""),
            told=label + (f", seed {job.seed}" if len(seeds) > 1 else ""),
        )
        for runs, (_, world, own, _), label in zip(prepared, entries, labels, strict=True)
        for job, config in runs
    ]


def _own_options(task: Task, own: Task) -> str:
    """Return the options in which a system's task differs from the comparison's, for its label."""
    common = (task.reference or {}).get("options", {})
    mine = (own.reference or {}).get("options", {})
    differs = {name: value for name, value in mine.items() if common.get(name) != value}
    return "".join(f", {name.replace('_', ' ')} {value}" for name, value in differs.items())


def _holds_parts(strategy: Strategy, world: World) -> bool:
    """Return whether no worker of a system needs the whole model."""
    # Objects of other types are refused later, when the run is prepared.
    known = isinstance(strategy, Strategy) and isinstance(world, World)
    return known and strategy.holds_parts(world.workers)


def _make_folders(folder: Path, asked: Mapping[str, Any], planned: Sequence[_Planned]) -> None:
    """Make a new folder for the comparison, and a folder in it for each run.

    Raises ImportError if the libraries of the report are missing.
    """
    from dure.report.document import check_plotly

    check_plotly("the report")  # now, and not after hours of training
    RunFolder.create(folder, asked)
    # A config.json would mark the comparison's folder as a run folder.
    (folder / "config.json").rename(folder / COMPARISON)
    for one in planned:
        RunFolder.create(folder / one.name, one.config)
        begun_here(folder / one.name, one.job.task, one.job.strategy, one.world)


def execute_and_record(program: Callable[[], Run], told: str, done: Comparison) -> str:
    """Execute a run and record it in `done`; return the reason for its end. told: its label."""
    try:
        run = program()
    # Only errors of dure: any other error is a bug, and must be visible.
    except DureError as error:
        done.failed[told] = error
        return "failed"
    done.runs.append(run)
    return str(run.summary["ended"])


def write_comparison_files(
    folder: Path, asked: Mapping[str, Any], names: Sequence[str], done: Comparison
) -> Path:
    """Write comparison.json and the page. names: folders of the runs that were started."""
    from dure.report import write_report

    failed = {label: text_of(error) for label, error in done.failed.items()}
    content = {**asked, "runs": list(names), "failed": failed}
    text = msgspec.json.format(msgspec.json.encode(content)) + b"\n"
    write_atomically(folder / COMPARISON, text)
    return write_report([folder], folder / "report.html")


def _prepared(
    task: Task, strategy: Strategy, world: World, stop: Stop, seed: int, **how: Any
) -> tuple[Job, dict[str, Any]]:
    """Return the result of `prepare`, with the system's name in the text of a ValueError."""
    try:
        return prepare(task, strategy, world, stop, seed, **how)
    except ValueError as error:
        name = strategy.name if isinstance(strategy, Strategy) else type(strategy).__name__
        raise ValueError(f"{name}: {error}") from error


def _slug(label: str) -> str:
    """Return a label as a folder name."""
    return re.sub(r"[^a-z0-9]+", "-", label.lower().replace("×", "x")).strip("-")


def _unique(labels: Sequence[str]) -> list[str]:
    """Return the labels, numbered if several would have the same folder."""
    result: list[str] = []
    for label in labels:
        # Labels that differ in punctuation only would share a folder.
        taken = set(map(_slug, result))
        numbered = label
        count = 1
        while _slug(numbered) in taken:
            count += 1
            numbered = f"{label} ({count})"
        result.append(numbered)
    return result
