"""The `dure` command and its subcommands; `dure --help` lists them.

Heavy modules are imported on demand: the help, and the error for a mistyped name, need no torch.
Exit status: 0 success, 1 a failed run, 2 invalid input, 130 ended by Ctrl-C.
"""

from __future__ import annotations

import dataclasses
import errno
import json
import os
import sys
import textwrap
import traceback
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dure import __version__, catalog
from dure.cli import (
    audit,
    certificates,
    clients,
    comparing,
    drawing,
    network,
    predicting,
    roster,
    run_listing,
    served_runs,
    sweeping,
    systems,
    verify,
    watching,
)
from dure.cli.flags import (
    BenchOptions,
    CompareOptions,
    HelpPrinted,
    LearningOptions,
    LimitOptions,
    ReportOptions,
    ResumeDevice,
    TrainOptions,
    given_options,
    names_before_flags,
    options_of_task,
    parse_flags,
    value_of,
)
from dure.cli.interrupts import STATUS, interrupts_end_imports
from dure.cli.running import (
    check_names,
    file_name,
    one_line,
    resume_run,
    run_folder,
    show_run,
    start_fork_server,
)
from dure.errors import DureError, WorkerFailedError, described, suggestion, text_of
from dure.machine.memory import enable_huge_pages
from dure.machine.streams import open_streams, reader_is_gone
from dure.worlds.launcher_environment import under_torchrun
from dure.worlds.processes.fork_server import server

server.keeps_here("dure.cli")

if TYPE_CHECKING:
    from dure.contracts.stop import Stop
    from dure.contracts.strategy import Strategy

USAGE = """\
dure trains one PyTorch model with many machines, by the system you name, and measures it.

  dure train TASK SYSTEM [options]   train; `dure train TASK SYSTEM --help` lists the options
  dure train --resume RUN            resume an interrupted or killed run, or a folder of many runs
  dure serve TASK SYSTEM [options]   serve a federation to clients on a network; --local starts them
  dure join URL TASK [options]       take part in it as a client, with this machine's data
  dure personalise DIR TASK          train the newest model on this machine's data, offline
  dure replay RUN                    recompute a recorded federation's models, bit for bit
  dure backup RUN TO                 copy a run folder, even while it is served
  dure audit FILE                    check the log of all data that a client has sent
  dure audit RUN                     attack the updates of a simulation, to measure what they reveal
  dure verify RUN|MODEL              check a model's signature, and print its lineage
  dure compare TASK [SYSTEM ...]     train many systems on one task: a table and a report
  dure sweep TASK SYSTEM --grid ...  train one system with many settings, and rank them
  dure list [FOLDER]                 list runs and their progress
  dure show RUN                      show the settings and results of a run
  dure predict RUN INPUT             print the trained model's predictions for a file or examples
  dure systems                       print the systems as a family tree, and their worlds
  dure draw SUBJECT [options]        draw an idea in the terminal or as SVG: pipeline, split, ...
  dure watch RUN [RUN ...]           show the report of runs in a browser, live while they train
  dure report RUN [RUN ...]          write the report of existing runs
  dure bench all-reduce [options]    compare all-reduce by dure, gloo and Open MPI in one run
  dure certificates init|server      create files for TLS, signed by your own authority
  dure clients invite|list|... RUN   manage the clients of a run over a network
  dure roster key|sign|show|owner    manage the list of clients' public keys that the owner signs
  dure --version

Tasks
{tasks}
  path/to/file.py:name or package.module:name, your own dure.Task, or a function that returns one

Systems
{systems}
  path/to/file.py:Name or package.module:Name, your own dure.Strategy

Examples
  dure compare digits
  dure train digits data-parallel --workers 2 --all-reduce ring --epochs 5
  dure train digits data-parallel --world threads --workers 2
  dure train mnist fed-avg --data mnist/ --clients 100 --fraction 0.1 --rounds 50
  dure serve digits fed-avg --clients 3 --rounds 5 --local
  torchrun --nproc-per-node 2 -m dure train digits data-parallel
  dure bench all-reduce --quick --out runs/bench
"""

USAGE_OF_TRAIN = """\
dure train TASK SYSTEM [options]   train a task with a system, and measure it
dure train --resume RUN            resume a run, or many in one folder

The options are those of the system, the task, the world, the limits, the run and the output. Most
depend on the system and the task, so name both to see them:

  dure train digits fed-avg --help
  dure train mnist data-parallel --help

These are the same for all:

  --epochs N, --seconds N, --target METRIC=VALUE   limits of the run; by default ten epochs
  --seed N, --seeds N                              same seed, same bits; several: the variation
  --out DIR, --label TEXT, --json                  where results are written, and in which form
  --weights PATH                                   initial weights of the model

Tasks      {tasks}
Systems    {systems}
           dure systems draws them as a family tree; both may be your own, file.py:name
"""

DEBUG = "--debug"


def usage() -> str:
    """Return the text of `dure --help`."""

    def listed(entries: dict[str, str]) -> str:
        return "\n".join(f"  {name:<16} {summary}" for name, summary in entries.items())

    systems = {name: system.summary for name, system in catalog.SYSTEMS.items()}
    return USAGE.format(tasks=listed(catalog.TASKS), systems=listed(systems))


def usage_of_train() -> str:
    """Return the text of `dure train --help`."""

    def listed(names: Iterable[str]) -> str:
        # The first line is indented like the others, behind its word.
        return textwrap.fill(
            ", ".join(names),
            100,
            initial_indent=" " * 11,
            subsequent_indent=" " * 11,
            break_on_hyphens=False,
        ).lstrip()

    return USAGE_OF_TRAIN.format(tasks=listed(catalog.TASKS), systems=listed(catalog.SYSTEMS))


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line, and return the exit status."""
    given = list(sys.argv[1:] if arguments is None else arguments)
    debug = DEBUG in given
    # Removed here: the flag may be anywhere, and no command has to know it.
    given = [argument for argument in given if argument != DEBUG]
    # OpenMP's threads spin for milliseconds before they release their core, and starve others that
    # need it. Set before torch loads OpenMP, which reads it then, and inherited by ranks.
    os.environ.setdefault("GOMP_SPINCOUNT", "10000")
    enable_huge_pages(os.environ)
    # Without standard streams, as under a daemon, the first socket would get their number.
    open_streams()
    try:
        with interrupts_end_imports(), _warnings_in_a_line():
            return _dispatch(given)
    except KeyboardInterrupt:
        print("dure: interrupted", file=sys.stderr)
        return STATUS
    except HelpPrinted:  # --help
        return 0
    # Not only Exception: user code may raise SystemExit, which would end the process with the
    # status of success.
    except BaseException as error:
        if isinstance(error, BrokenPipeError) and reader_is_gone(1):  # `dure --help | head`
            # Python flushes standard output once more at its end, and would fail there.
            os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
            return 0
        if debug:
            traceback.print_exc()
        # The worker's own traceback, from the process in which it failed.
        if debug and isinstance(error, WorkerFailedError) and error.traceback:
            print(error.traceback, file=sys.stderr)
        # Expected errors say what to do. The error of a worker quotes the user's own code, whose
        # traceback says more.
        foreseen = isinstance(error, (DureError, ValueError, ImportError))
        own = foreseen and not isinstance(error, WorkerFailedError)
        text = (foreseen and text_of(error).strip()) or _said_of(error)
        print(
            f"dure: {one_line(text)}{'' if own or debug else f' ({DEBUG} shows the traceback)'}",
            file=sys.stderr,
        )
        if isinstance(error, DureError):
            return error.exit_code
        if isinstance(error, OSError) and not isinstance(error, UnicodeError):
            _forget_what_was_printed()
            return 2 if error.filename is not None else 1
        return 2 if foreseen else 1


def _said_of(error: BaseException) -> str:
    """Describe an unexpected error; for a file, by its shortened path and the reason."""
    if not isinstance(error, OSError) or not error.strerror:
        return described(error)
    if error.filename is not None:
        path = str(error.filename)
        shown = path if len(path) <= 120 else f"{path[:80]}…{path[-30:]}"
        return f"cannot use {shown}: {error.strerror}"
    if error.errno == errno.ENOSPC:
        return f"cannot write the output: {error.strerror}"
    return described(error)


def _forget_what_was_printed() -> None:
    """Redirect an unwritable standard output, so that Python's final flush does not fail again."""
    try:
        sys.stdout.flush()
    except (OSError, ValueError):
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)


@contextmanager
def _warnings_in_a_line() -> Iterator[None]:
    """Context manager: print dure's own warnings as a single line; leave others unchanged."""
    plain = warnings.formatwarning

    def told(
        message: Any, category: Any, filename: str, lineno: int, line: str | None = None
    ) -> str:
        # The reader typed a command, so a line of Python code would not help.
        own = Path(filename).is_relative_to(Path(__file__).parents[1])
        return f"dure: {message}\n" if own else plain(message, category, filename, lineno, line)

    warnings.formatwarning = told
    try:
        yield
    finally:
        warnings.formatwarning = plain


def _dispatch(given: list[str]) -> int:
    commands: dict[str, Callable[[list[str]], int]] = {
        "train": _train,
        "serve": network.serve,
        "join": network.join,
        "replay": served_runs.replay,
        "backup": served_runs.backup,
        "personalise": served_runs.personalise,
        "audit": audit.main,
        "verify": verify.main,
        "compare": comparing.compare,
        "sweep": sweeping.main,
        "list": run_listing.list_runs,
        "show": run_listing.show,
        "predict": predicting.main,
        "systems": systems.main,
        "draw": drawing.main,
        "report": _report,
        "watch": watching.main,
        "bench": _bench,
        "certificates": certificates.main,
        "clients": clients.main,
        "roster": roster.main,
    }
    if not given or given[0] in ("--help", "-h", "help"):
        print(usage(), end="")
        return 0
    if given[0] == "--version":
        print(f"dure {__version__}")
        return 0
    asks = given[1:] in (["--help"], ["-h"])
    if given[0] == "train" and asks:
        print(usage_of_train(), end="")
        return 0
    # The flags depend on the system and task, which are not named yet.
    if given[0] in ("serve", "join", "personalise", "replay") and asks:
        print(usage(), end="")
        return 0
    if given[0] in _NAMELESS and asks:
        what, parts, description = _NAMELESS[given[0]]
        # Prints the help and raises Shown, which `main` handles.
        parse_flags(f"dure {given[0]} {what}", parts, ["--help"], description)
    if given[0] not in commands:
        raise ValueError(f"there is no command {given[0]!r}{suggestion(given[0], commands)}")
    return commands[given[0]](given[1:])


_NAMELESS: dict[str, tuple[str, dict[str, Any], str]] = {
    "compare": (
        "TASK [SYSTEM ...]",
        {"limits": LimitOptions, "learning": LearningOptions, "how": CompareOptions},
        comparing.ABOUT,
    ),
    "report": ("RUN ...", {"how": ReportOptions}, "Write a report."),
    "bench": (
        "all-reduce",
        {"how": BenchOptions},
        "Compare implementations of all-reduce in one run.",
    ),
}
"""Commands whose flags do not depend on names: usage, parts of the flags, description."""

_UNFORKED = ("threads", "simulated")
"""Worlds of a single process, even for systems whose ranks are forked elsewhere."""


def _train(given: list[str]) -> int:
    names, flags = names_before_flags(given)
    # Everything else is in the run folder, so neither task nor system is named.
    if not names and "--resume" in [flag.partition("=")[0] for flag in flags]:
        if (Path(value_of("--resume", flags) or ".") / "comparison.json").is_file():
            return comparing.resumed(flags, "dure train")
        resumed = ["--help"] if flags == ["--resume", "--help"] else flags
        return resume_run(resumed, option_groups={"place": ResumeDevice})
    if len(names) != 2:
        raise ValueError(
            "dure train TASK SYSTEM [options]: name a task and a system (dure --help lists them)"
        )
    reference, system = names
    check_names(reference, [system])
    built_in = catalog.SYSTEMS.get(system)
    # Before the imports below: the server loads torch in parallel.
    if built_in is not None and built_in.forks and value_of("--world", flags) not in _UNFORKED:
        start_fork_server()
    from dure.cli.worlds import hidden_flags, options_of, world_of
    from dure.run.registry import strategy_class
    from dure.tasks.builtin import load_task

    # The class is enough to make flags; parsing creates the instance.
    kind = strategy_class(system)
    parts = {
        "strategy": kind,
        "task": options_of_task(reference),
        **options_of(kind, flags),
        "limits": LimitOptions,
        "learning": LearningOptions,
        "how": TrainOptions,
    }
    fields = {field.name for field in dataclasses.fields(kind)}  # type: ignore[arg-type]
    hidden = hidden_flags(kind, parts["world"]) - fields
    asked = parse_flags(
        f"dure train {reference} {system}",
        parts,
        flags,
        (kind.__doc__ or "").split("\n")[0],
        hidden,
    )
    how: TrainOptions = asked["how"]
    task = load_task(reference, **given_options(asked["task"]))
    task = how.with_weights(asked["learning"].of(task))
    strategy: Strategy = asked["strategy"]
    world = world_of(strategy, asked["world"])
    # The name of a new folder contains the time: a restarted job would not find it.
    if how.out is None and world.starts_again:
        raise ValueError(
            "torchrun may restart this job: give with --out the folder from which it resumes"
        )
    stop: Stop = asked["limits"].to_stop()
    if how.seeds != 1:
        return comparing.over_seeds(task, strategy, world, stop, how)
    from dure.run.train import train

    with run_folder(how.out, f"{file_name(task)}-{strategy.name}") as out:
        return show_run(
            partial(train, task, strategy, world, stop, out=out, **how.of_train()),
            stop,
            # Other ranks of torchrun train as well, and print nothing.
            quiet=how.json or not world.is_leader,
            as_json=how.json and world.is_leader,
            folder=out,
        )


def _report(given: list[str]) -> int:
    names, flags = names_before_flags(given)
    if not names:
        raise ValueError("dure report RUN [RUN ...]: name at least one run folder")
    asked = parse_flags("dure report RUN ...", {"how": ReportOptions}, flags, "Write a report.")
    from dure.report import write_report

    out = asked["how"].out if asked["how"].out is not None else Path(names[0]) / "report.html"
    print(write_report([Path(name) for name in names], out, language=asked["how"].language))
    return 0


def _bench(given: list[str]) -> int:
    names, flags = names_before_flags(given)
    if names != ["all-reduce"]:
        raise ValueError("dure bench all-reduce [options]: all-reduce is the only benchmark")
    asked = parse_flags(
        "dure bench all-reduce",
        {"how": BenchOptions},
        flags,
        "Compare implementations of all-reduce in one run.",
    )
    how: BenchOptions = asked["how"]
    # Checked first: under torchrun each rank would start ranks of its own.
    if under_torchrun():
        raise ValueError("dure bench starts its own ranks: call it without torchrun")
    from dure.bench import options

    plan = options.plan(how.sizes, how.ranks, how.contenders, how.repeats, how.quick, how.fit)
    if how.out is not None and how.out.exists() and not how.out.is_dir():
        raise ValueError(f"{how.out} is a file, but the result needs a folder: give another path")
    start_fork_server()
    from dure.bench.page import write
    from dure.bench.run import BenchProgress, run
    from dure.bench.table import shown
    from dure.cli.show import error_console

    with BenchProgress(plan, how.json) as progress:
        result = run(plan, progress)
    if how.fit:
        from dure.bench.fit import calibrate

        calibrate(result, _cache_folder())
    if how.json:
        print(json.dumps(result.as_json()), flush=True)
    else:
        error_console().print(shown(result))
    if how.out is not None:
        print(f"benchmark: {write(result, how.out)}", file=sys.stderr)
    return 130 if result.interrupted else 0


def _cache_folder() -> Path:
    """Return the folder of dure's measurements of this machine."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "dure"


if __name__ == "__main__":
    sys.exit(main())
