"""The command line. `dure --help` says what there is.

Nothing heavy is imported before it is needed: the help, and a mistyped name, are answered without torch.
Exit status: 0 done, 1 a run failed, 2 the input has to change, 130 ended by Ctrl-C.
"""

from __future__ import annotations

import contextlib
import dataclasses
import io
import json
import os
import re
import sys
import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from dure import __version__, catalog
from dure.errors import DureError, WorkerFailedError

if TYPE_CHECKING:
    from dure.stop import Stop
    from dure.strategy import Strategy, World
    from dure.task import Task

USAGE = """\
dure trains one PyTorch model with many machines, by the system you name, and measures it.

  dure train TASK SYSTEM [options]   train; `dure train TASK SYSTEM --help` lists the options
  dure train --resume RUN            go on with a run that was interrupted or killed
  dure compare TASK [SYSTEM ...]     many systems on one task: a table and a report
  dure report RUN [RUN ...]          write the report of runs that are there already
  dure --version

Tasks
{tasks}
  path/to/file.py:name or package.module:name, a dure.Task of your own or a function that returns one

Systems
{systems}

Examples
  dure compare digits
  dure train digits data-parallel --workers 2 --all-reduce ring --epochs 5
  dure train mnist fed-avg --data mnist/ --clients 100 --fraction 0.1 --partition label-shards:2 --rounds 50
  torchrun --nproc-per-node 2 -m dure train digits data-parallel
"""

DEBUG = "--debug"


def usage() -> str:
    """The text of `dure --help`."""

    def listed(entries: dict[str, str]) -> str:
        return "\n".join(f"  {name:<14} {summary}" for name, summary in entries.items())

    systems = {name: summary for name, (_, _, summary) in catalog.SYSTEMS.items()}
    return USAGE.format(tasks=listed(catalog.TASKS), systems=listed(systems))


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the command line; returns the exit status."""
    given = list(sys.argv[1:] if arguments is None else arguments)
    debug = DEBUG in given
    given = [argument for argument in given if argument != DEBUG]
    try:
        return _dispatch(given)
    except KeyboardInterrupt:
        print("dure: interrupted", file=sys.stderr)
        return 130
    except SystemExit as end:  # --help
        return int(end.code or 0)
    except Exception as error:
        if debug:
            traceback.print_exc()
        if debug and isinstance(error, WorkerFailedError) and error.traceback:
            print(error.traceback, file=sys.stderr)
        foreseen = isinstance(error, (DureError, ValueError, ImportError))
        own = foreseen and not isinstance(error, WorkerFailedError)
        text = str(error) if foreseen else f"{type(error).__name__}: {error}"
        print(f"dure: {_one_line(text)}{'' if own or debug else f' ({DEBUG} shows the traceback)'}", file=sys.stderr)
        if isinstance(error, DureError):
            return error.exit_code
        return 2 if foreseen else 1


def _one_line(text: str) -> str:
    return " ".join(line.strip() for line in text.splitlines() if line.strip())


def _dispatch(given: list[str]) -> int:
    commands: dict[str, Callable[[list[str]], int]] = {"train": _train, "compare": _compare, "report": _report}
    if not given or given[0] in ("--help", "-h", "help"):
        print(usage(), end="")
        return 0
    if given[0] == "--version":
        print(f"dure {__version__}")
        return 0
    if given[0] not in commands:
        raise ValueError(f"there is no command {given[0]!r}{catalog.suggestion(given[0], commands)}")
    return commands[given[0]](given[1:])


@dataclass(frozen=True)
class Limits:
    """When the run ends, whichever comes first; ten epochs if nothing is said.

    Args:
        epochs: passes over the training data, counted in examples over all workers.
        steps: optimizer steps, for systems that count steps.
        rounds: federated rounds, for systems that count rounds.
        seconds: training time, evaluation and checkpoints left out.
        target: METRIC=VALUE, as test_accuracy=0.99; several must all be reached.
    """

    epochs: float | None = None
    steps: int | None = None
    rounds: int | None = None
    seconds: float | None = None
    target: tuple[str, ...] = ()

    def stop(self, epochs: float = 10) -> Stop:
        """The limits; `epochs` is the default if none is given."""
        from dure.stop import Stop

        target: dict[str, float] = {}
        for text in self.target:
            name, _, value = text.partition("=")
            try:
                target[name] = float(value)
            except ValueError:
                raise ValueError(f"--target {text}: it is METRIC=VALUE, as test_accuracy=0.99") from None
        limits = Stop(self.epochs, self.steps, self.rounds, self.seconds, target or None)
        return Stop(epochs=epochs) if limits == Stop() else limits


@dataclass(frozen=True)
class TrainOptions:
    """How to run it.

    Args:
        workers: ranks, for systems that divide the work; one a core by default.
        deadline: seconds that a rank waits for a silent peer.
        seed: of weights, order of examples, sampling and dropout; same seed, same bits.
        out: the run folder; by default a new one in runs/.
        evaluate_every: steps or rounds between evaluations; by default an epoch or a round.
        checkpoint_every: steps or rounds between checkpoints; by default an evaluation every 10 s or more.
        label: how tables call the run.
        json: print the summary as JSON on standard output, and no progress.
    """

    workers: int | None = None
    deadline: float = 60.0
    seed: int = 0
    out: Path | None = None
    evaluate_every: int | None = None
    checkpoint_every: int | None = None
    label: str | None = None
    json: bool = False


@dataclass(frozen=True)
class ResumeOptions:
    """Go on with a run; everything else is in its folder.

    Args:
        resume: the run folder.
        json: print the summary as JSON on standard output, and no progress.
    """

    resume: Path
    json: bool = False


@dataclass(frozen=True)
class CompareOptions:
    """How to compare.

    Args:
        workers: ranks, for systems that divide the work; one a core by default.
        seed: of weights, order of examples, sampling and dropout; same seed, same bits.
        out: the folder of the comparison; by default a new one in runs/.
        evaluate_every: steps or rounds between evaluations; by default an epoch or a round.
        json: print the summaries as JSON on standard output, and no progress.
    """

    workers: int | None = None
    seed: int = 0
    out: Path | None = None
    evaluate_every: int | None = None
    json: bool = False


COMPARED = (
    "single-worker",
    "single-worker,batch_size=null",
    "data-parallel,all_reduce=ring",
    "data-parallel,all_reduce=master",
    "data-parallel,all_reduce=native",
    "fed-avg",
    "fed-avg,partition=label-shards:2",
)
"""What `dure compare TASK` compares if no system is named."""


def _names_before_flags(given: list[str]) -> tuple[list[str], list[str]]:
    """The leading arguments that are no flags, and the rest."""
    count = next((i for i, argument in enumerate(given) if argument.startswith("-")), len(given))
    return given[:count], given[count:]


def _parse(prog: str, parts: dict[str, Any], arguments: list[str], description: str = "") -> dict[str, Any]:
    """Parses flags into instances of several dataclasses at once; their fields share one level of flags."""
    import tyro

    from dure.data.partition import Partition, parse

    registry = tyro.constructors.ConstructorRegistry()

    @registry.primitive_rule
    def partition_rule(info: tyro.constructors.PrimitiveTypeInfo) -> Any:
        if info.type is not Partition:
            return None
        return tyro.constructors.PrimitiveConstructorSpec(
            nargs=1,
            metavar="PARTITION",
            instance_from_str=lambda texts: parse(texts[0]),
            is_instance=lambda value: isinstance(value, Partition),
            str_from_instance=lambda value: [str(value)],
        )

    fields = [(name, Annotated[kind, tyro.conf.arg(name="")]) for name, kind in parts.items()]
    together = dataclasses.make_dataclass("Options", fields, frozen=True)
    together.__doc__ = description
    complaint = io.StringIO()
    try:
        with registry, contextlib.redirect_stderr(complaint):
            parsed: Any = tyro.cli(
                together, prog=prog, args=arguments, config=(tyro.conf.FlagCreatePairsOff,), description=description
            )
    except SystemExit as end:
        if not end.code:
            raise
        raise ValueError(f"{_complaint(complaint.getvalue())} ({prog} --help lists the options)") from None
    return {name: getattr(parsed, name) for name in parts}


def _complaint(box: str) -> str:
    """What tyro says in a box of many lines, in one: its first paragraph, and the flag that was perhaps meant."""
    plain = re.sub(r"\x1b\[[0-9;]*m", "", box)  # it colours a terminal, and draws in ASCII where it has to
    lines = [line.strip(" │") for line in plain.splitlines()[1:]]
    if not lines[0].strip("-"):
        del lines[0]
    end = next((i for i, line in enumerate(lines) if not line.strip("─-╰╯")), len(lines))
    meant = next((line.split()[0] for line in lines[end:] if re.match("--[a-z]", line)), None)
    is_guess = any(line.startswith("Perhaps you meant") for line in lines)
    return " ".join(lines[:end]) + (f", did you mean {meant}?" if is_guess and meant else "")


def _options_of_task(reference: str) -> type[Any]:
    """The task's own options as a dataclass: the parameters of the function that makes it.

    A parameter without default may be left out here: `load_task` says better what is missing.
    """
    import inspect

    from dure.tasks import hints_of, task_factory

    factory = task_factory(reference)
    fields: list[Any] = []
    if inspect.isfunction(factory):
        hints = hints_of(factory)
        for name, parameter in inspect.signature(factory).parameters.items():
            if parameter.kind in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD):
                continue
            if parameter.default is parameter.empty:
                fields.append((name, hints.get(name, str) | None, None))
            else:
                fields.append((name, hints.get(name, type(parameter.default)), parameter.default))
    options = dataclasses.make_dataclass("TaskOptions", fields, frozen=True)
    options.__doc__ = factory.__doc__ if fields else "The task has no options."
    return options


def _set_options(options: Any) -> dict[str, Any]:
    """The options that were given; those left out keep the default of the task's function."""
    values = {field.name: (getattr(options, field.name), field.default) for field in dataclasses.fields(options)}
    return {name: value for name, (value, default) in values.items() if value is not None or default is not None}


def _train(given: list[str]) -> int:
    names, flags = _names_before_flags(given)
    if not names and "--resume" in [flag.partition("=")[0] for flag in flags]:
        return _resume(flags)
    if len(names) != 2:
        if flags == ["--help"] or flags == ["-h"]:
            print(usage(), end="")
            return 0
        raise ValueError("dure train TASK SYSTEM [options]: name a task and a system (dure --help lists them)")
    reference, system = names
    _check_names(reference, [system])
    if system != "single-worker" and catalog.SYSTEMS[system][0].startswith("dure.parallel"):
        _start_fork_server()
    from dure.strategies import strategy_class
    from dure.tasks import load_task

    kind = strategy_class(system)
    parts = {"strategy": kind, "task": _options_of_task(reference), "limits": Limits, "how": TrainOptions}
    asked = _parse(f"dure train {reference} {system}", parts, flags, (kind.__doc__ or "").split("\n")[0])
    how: TrainOptions = asked["how"]
    task = load_task(reference, **_set_options(asked["task"]))
    strategy: Strategy = asked["strategy"]
    world = _world(strategy, how.workers, how.deadline)
    out = how.out if how.out is not None else _new_folder(f"{_file_name(task)}-{system}")
    return _show_run(
        lambda on_progress: _call_train(task, strategy, world, asked["limits"].stop(), how, out, on_progress),
        asked["limits"].stop(),
        how.json or not world.leads,
        how.json and world.leads,
        out,
    )


def _call_train(
    task: Task, strategy: Strategy, world: World, stop: Stop, how: TrainOptions, out: Path, on_progress: Any
) -> Any:
    from dure.train import train

    return train(
        task,
        strategy,
        world,
        stop,
        seed=how.seed,
        out=out,
        evaluate_every=how.evaluate_every,
        checkpoint_every=how.checkpoint_every,
        label=how.label,
        on_progress=on_progress,
    )


def _resume(flags: list[str]) -> int:
    asked = _parse("dure train", {"limits": Limits, "how": ResumeOptions}, flags, "Go on with a run.")
    folder: Path = asked["how"].resume
    from dure.train import asked_of, resume

    stop = asked["limits"].stop() if asked["limits"] != Limits() else asked_of(folder).stop
    return _show_run(
        lambda on_progress: resume(folder, stop=stop, on_progress=on_progress),
        stop,
        asked["how"].json,
        asked["how"].json,
        folder,
    )


def _show_run(run: Callable[[Any], Any], stop: Stop, quiet: bool, as_json: bool, folder: Path) -> int:
    """Runs with a display, then says what came out and where it lies."""
    from dure.show import Display, error_console, table

    try:
        with Display(stop, quiet) as display:
            done = run(lambda event: display("training", event))
    except DureError as error:
        if error.exit_code == 1 and (folder / "checkpoint").is_dir():
            print(f"dure: kept until its last checkpoint; go on with dure train --resume {folder}", file=sys.stderr)
        raise
    if as_json:
        print(json.dumps(done.summary))
    elif not quiet:
        error_console().print(table([done.summary]))
        print(f"run folder: {folder}", file=sys.stderr)
    if done.summary["ended"] != "interrupt":
        return 0
    if not quiet:
        print(f"interrupted; go on with: dure train --resume {folder}", file=sys.stderr)
    return 130


def _compare(given: list[str]) -> int:
    names, flags = _names_before_flags(given)
    if not names:
        raise ValueError("dure compare TASK [SYSTEM ...]: name a task (dure --help lists them)")
    reference, systems = names[0], names[1:] or list(COMPARED)
    _check_names(reference, [system.partition(",")[0] for system in systems])
    _start_fork_server()
    from dure.strategies import parse_strategy
    from dure.tasks import load_task

    parts = {"task": _options_of_task(reference), "limits": Limits, "how": CompareOptions}
    asked = _parse(f"dure compare {reference}", parts, flags, "Many systems on one task.")
    how: CompareOptions = asked["how"]
    stop: Stop = asked["limits"].stop(epochs=20)
    task = load_task(reference, **_set_options(asked["task"]))
    entries = []
    for system in systems:
        strategy = parse_strategy(system)
        workers = how.workers if strategy.kind == "ranks" and strategy.name != "single-worker" else None
        entries.append((strategy, _world(strategy, workers, 60.0)))
    out = how.out if how.out is not None else _new_folder(f"compare-{_file_name(task)}")
    from dure.compare import compare
    from dure.show import Display, error_console, table

    with Display(stop, how.json) as display:
        done = compare(
            task, entries, stop=stop, seed=how.seed, out=out, evaluate_every=how.evaluate_every, on_progress=display
        )
    summaries = [run.summary for run in done.runs]
    if how.json:
        failed = {label: str(error) for label, error in done.failed.items()}
        print(json.dumps({"runs": summaries, "failed": failed, "report": str(done.report)}))
    else:
        error_console().print(table(summaries))
    for label, error in done.failed.items():
        print(f"dure: {label}: {error}", file=sys.stderr)
    print(f"report: {done.report}", file=sys.stderr)
    interrupted = any(summary["ended"] == "interrupt" for summary in summaries)
    return 130 if interrupted else max((error.exit_code for error in done.failed.values()), default=0)


@dataclass(frozen=True)
class ReportOptions:
    """Where to write the page.

    Args:
        out: the page; by default report.html in the first run's folder.
    """

    out: Path | None = None


def _report(given: list[str]) -> int:
    names, flags = _names_before_flags(given)
    if not names:
        raise ValueError("dure report RUN [RUN ...]: name at least one run folder")
    asked = _parse("dure report RUN ...", {"how": ReportOptions}, flags, "Write a report.")
    from dure.report import write_report

    out = asked["how"].out if asked["how"].out is not None else Path(names[0]) / "report.html"
    print(write_report([Path(name) for name in names], out))
    return 0


def _check_names(reference: str, systems: list[str]) -> None:
    """Mistyped names are answered before torch is loaded."""
    if ":" not in reference and reference not in catalog.TASKS:
        raise ValueError(f"there is no task {reference!r}{catalog.suggestion(reference, catalog.TASKS)}")
    for system in systems:
        if system not in catalog.SYSTEMS:
            raise ValueError(f"there is no system {system!r}{catalog.suggestion(system, catalog.SYSTEMS)}")


def _start_fork_server() -> None:
    """It loads torch while this process does; under torchrun nobody forks."""
    if "RANK" not in os.environ:
        from dure.worlds.fork_server import server

        server.start()


def _world(strategy: Strategy, workers: int | None, deadline: float) -> World:
    """The world for a strategy and the flags --workers and --deadline."""
    from dure.worlds.here import under_torchrun
    from dure.worlds.processes import Processes
    from dure.worlds.simulated import Simulated
    from dure.worlds.torchrun import Torchrun

    if strategy.kind == "clients":
        if workers is not None:
            raise ValueError(f"{strategy.name} counts clients, not workers: use --clients {workers}")
        return Simulated()
    if under_torchrun():
        return Torchrun(deadline)
    if strategy.name == "single-worker":
        return Processes(1 if workers is None else workers, deadline)
    return Processes(workers, deadline)


def _file_name(task: Task) -> str:
    return "".join(c if c.isalnum() or c in "-_" else "-" for c in task.name)


def _new_folder(name: str) -> Path:
    """A folder in runs/ that is not there yet, named by time."""
    stamp = time.strftime("%Y%m%d-%H%M%S")
    folder, count = Path("runs") / f"{name}-{stamp}", 1
    while folder.exists():
        count += 1
        folder = Path("runs") / f"{name}-{stamp}-{count}"
    return folder


if __name__ == "__main__":
    sys.exit(main())
