"""`dure compare`, and the other commands for many runs: `dure train --seeds`, `--resume`.

They share the output of a folder of runs (`show_comparison`): a display, a table over runs or over
seeds, the report, and the reason for the end.
"""

from __future__ import annotations

import dataclasses
import json
import sys
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dure.cli.flags import (
    CompareOptions,
    LearningOptions,
    LimitOptions,
    ResumeOptions,
    TrainOptions,
    given_options,
    names_before_flags,
    options_of_task,
    parse_flags,
)
from dure.cli.running import (
    check_names,
    file_name,
    one_line,
    run_folder,
    start_fork_server,
)
from dure.errors import text_of
from dure.worlds.launcher_environment import is_leader_process

if TYPE_CHECKING:
    from dure.contracts.stop import Stop
    from dure.contracts.strategy import Strategy
    from dure.contracts.task import Task
    from dure.contracts.world import World
    from dure.run.compare import Comparison

ABOUT = (
    "Train many systems on one task. A setting of a system, such as --clients 20, applies to all "
    "systems that have it; a setting after a system's name, as in fed-avg,clients=5 or "
    "single-worker,lr=0.01, overrides it. A system without a batch size makes steps of 32 "
    "examples, of all workers together if they make a joint step, and of each worker or client "
    "otherwise; --batch-size, or batch_size after a system's name, overrides this."
)

UNDER_ATTACK = "attack=sign-flip:3,attackers=2"
"""Conditions of the default comparison with malicious clients."""

COMPARED = (
    "single-worker",
    "data-parallel,all_reduce=ring",
    "zero",
    "pipeline",
    "tensor-parallel",
    "layers-per-core",
    "parallel,data=2,tensor=2",
    "local-sgd,period=20",
    "parameter-server",
    "downpour",
    "hogwild",
    "fed-avg",
    f"fed-avg,{UNDER_ATTACK}",
    "fed-avg,aggregate=median",
    f"fed-avg,aggregate=median,{UNDER_ATTACK}",
    "fed-avg,held_out=0.2,partition=label-shards:2",
    "fed-adam",
    "fed-async",
    "byzantine",
    f"byzantine,{UNDER_ATTACK}",
    "ditto,partition=label-shards:2",
    "local-only,partition=label-shards:2",
    "split",
)
"""Systems that `dure compare TASK` compares by default.

A system of every family, in the order of `dure systems`. Systems that resist malicious clients are
compared with FedAvg, all of them with and without an attack. The clients of Ditto and of local-only
have the data, and hold out the data, of the FedAvg with label shards. The period of local SGD
divides twenty epochs, so that its last round ends with them. Vertical split learning, with parties
that have features of the same people, is left out: its task is a table, such as `heart`.
"""


def compare(given: list[str]) -> int:
    """Run `dure compare TASK [SYSTEM ...]`, or `dure compare --resume FOLDER`."""
    names, flags = names_before_flags(given)
    if not names and "--resume" in [flag.partition("=")[0] for flag in flags]:
        return resumed(flags, "dure compare")
    if not names:
        raise ValueError("dure compare TASK [SYSTEM ...]: name a task (dure --help lists them)")
    reference = names[0]
    systems = names[1:] or list(COMPARED)
    check_names(reference, [system.partition(",")[0] for system in systems])
    start_fork_server()
    from dure.cli.comparison_entries import ComparisonEntries, without_options
    from dure.cli.equal_steps import with_equal_steps
    from dure.cli.shared_flags import shared

    parts: dict[str, Any] = {
        "task": options_of_task(reference),
        "limits": LimitOptions,
        "learning": LearningOptions,
        "how": CompareOptions,
    }
    own = {field.name for part in parts.values() for field in dataclasses.fields(part)}
    # Flags that are settings of systems go to the systems; options of the task are split off first.
    apart = [without_options(system, reference) for system in systems]
    given_to = shared([system for system, _ in apart], flags, {*own, "help"})
    about = f"{ABOUT} Such settings here are {', '.join(given_to.there)}."
    asked = parse_flags(f"dure compare {reference}", parts, given_to.flags, about)
    how: CompareOptions = asked["how"]
    stop: Stop = asked["limits"].to_stop(epochs=20)
    learning: LearningOptions = asked["learning"]
    entries = ComparisonEntries(
        reference,
        given_options(asked["task"]),
        lambda task: how.with_weights(learning.of(task)),
    )
    task = entries.task()
    asked_systems = [
        entries.entry(system, options, how.workers)
        for system, (_, options) in zip(given_to.systems, apart, strict=True)
    ]
    asked_systems, differences = with_equal_steps(given_to.systems, asked_systems)
    for note in [*given_to.notes, *differences]:
        print(f"dure: {note}", file=sys.stderr)
    with run_folder(how.out, f"compare-{file_name(task)}") as out:
        program = all_of(task, asked_systems, stop, out, how)
        return show_comparison(program, stop, out, as_json=how.json)


def over_seeds(task: Task, strategy: Strategy, world: World, stop: Stop, how: TrainOptions) -> int:
    """Run `dure train TASK SYSTEM --seeds N`: the same run under several seeds."""
    for name in ("label", "checkpoint_every", "peak_flops"):
        if getattr(how, name) is not None:
            flag = "--" + name.replace("_", "-")
            raise ValueError(f"{flag} is for a single run: leave it out, or --seeds")
    with run_folder(how.out, f"{file_name(task)}-{strategy.name}-seeds") as out:
        program = all_of(task, [(strategy, world)], stop, out, how)
        return show_comparison(program, stop, out, as_json=how.json, command="dure train")


def all_of(
    task: Task, systems: Sequence[Any], stop: Stop, out: Path, how: CompareOptions | TrainOptions
) -> Callable[..., Comparison]:
    """Return a function that trains all systems into a folder. how: flags of a run or of many."""
    from dure.run.compare import compare as compare_systems

    return partial(
        compare_systems,
        task,
        systems,
        stop=stop,
        seed=how.seed,
        seeds=how.seeds,
        out=out,
        evaluate_every=how.evaluate_every,
        check=how.check,
        track=how.track,
    )


ComparisonNotes = Callable[["Comparison"], Mapping[str, Any]]
"""Function from a comparison to further lines of output: name to value, JSON-able."""


def _nothing(done: Comparison) -> Mapping[str, Any]:
    return {}


def resumed(flags: list[str], command: str, judges: ComparisonNotes = _nothing) -> int:
    """Resume the comparison or sweep in a folder. judges: returns further lines of output."""
    asked = parse_flags(
        command, {"how": ResumeOptions}, flags, "Resume many runs; finished runs are kept."
    )
    how: ResumeOptions = asked["how"]
    unused = [name for name in ("strategy", "world", "weights") if getattr(how, name) is not None]
    if unused:
        raise ValueError(
            f"{how.resume} has runs of several systems: leave out --{unused[0]}, and name the "
            "code with --rules"
        )
    start_fork_server()
    from dure.run.existing_runs import resume_comparison, stop_of

    program = partial(
        resume_comparison,
        how.resume,
        task=how.task,
        rules=how.rules,
        check=how.check,
        track=how.track,
    )
    return show_comparison(
        program,
        stop_of(how.resume),
        how.resume,
        as_json=how.json,
        command=command,
        judges=judges,
    )


def show_comparison(
    program: Callable[..., Comparison],
    stop: Stop,
    folder: Path,
    *,
    as_json: bool,
    command: str = "dure compare",
    judges: ComparisonNotes = _nothing,
) -> int:
    """Execute runs with a display, print the results and their folder, and return the exit status.

    Args:
        program: function that trains, and takes `on_progress`.
        stop: limits of each run, for the progress bar.
        folder: folder of the runs.
        as_json: print JSON on standard output, and no progress.
        command: command that resumes an interrupted comparison.
        judges: returns further lines of output.
    """
    from dure.cli.show import Display

    with Display(stop, as_json or not is_leader_process()) as display:
        done = program(on_progress=display)
    worst = max((error.exit_code for error in done.failed.values()), default=0)
    # Under torchrun every rank gets here; only the leader prints.
    if not is_leader_process():
        return worst
    said = judges(done)
    _tell(done, folder, as_json, said)
    for name, value in said.items():
        print(f"{name}: {value}", file=sys.stderr)
    for label, error in done.failed.items():
        print(f"dure: {one_line(f'{label}: {text_of(error)}')}", file=sys.stderr)
    print(f"report: {done.report}", file=sys.stderr)
    if not any(run.summary["ended"] == "interrupt" for run in done.runs):
        return worst
    print(f"interrupted; resume with: {command} --resume {folder}", file=sys.stderr)
    return 130


def _tell(done: Comparison, folder: Path, as_json: bool, said: Mapping[str, Any]) -> None:
    """Print the table of a comparison, or its JSON."""
    from dure.cli.seed_table import groups, over_seeds, table_over_seeds
    from dure.cli.show import error_console, table

    summaries = [run.summary for run in done.runs]
    together = groups(summaries)
    if as_json:
        content = {
            "runs": [
                {**run.summary, "folder": None if run.folder is None else str(run.folder)}
                for run in done.runs
            ],
            "failed": {label: text_of(error) for label, error in done.failed.items()},
            "report": str(done.report),
            "folder": str(folder),
            **said,
        }
        if together:
            content["over_seeds"] = over_seeds(together)
        print(json.dumps(content))
    elif summaries:
        console = error_console()
        console.print(table_over_seeds(together) if together else table(summaries, console))
