"""Shared parts of commands that run something: names, run folder, display, final output."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dure import catalog
from dure.cli.flags import LimitOptions, ResumeOptions, parse_flags
from dure.cli.interrupts import interrupts_raise
from dure.errors import DureError, suggestion
from dure.peer_text import printable
from dure.worlds.launcher_environment import leads_here, under_torchrun
from dure.worlds.processes.fork_server import server

if TYPE_CHECKING:
    from dure.contracts.stop import Stop
    from dure.contracts.task import Task


EventHandler = Callable[[Mapping[str, Any]], None]
"""Function that receives each event of a run."""


def _nothing(event: Mapping[str, Any]) -> None:
    pass


def resumed(
    flags: list[str],
    command: str = "dure train",
    parts: Mapping[str, Any] | None = None,
    hears: Callable[[Mapping[str, Any]], EventHandler] = lambda asked: _nothing,
) -> int:
    """Resume a run, and return the exit status.

    command: the typed command. parts: further flags. hears: makes the receiver of events from all
    flags.
    """
    asked = parse_flags(
        command,
        {"limits": LimitOptions, "how": ResumeOptions, **(parts or {})},
        flags,
        "Resume a run.",
    )
    how: ResumeOptions = asked["how"]
    folder = how.resume
    from dure.run.config import run_request_of
    from dure.run.train import resume

    stop = (
        asked["limits"].stop() if asked["limits"] != LimitOptions() else run_request_of(folder).stop
    )
    return show_run(
        partial(
            resume,
            folder,
            task=how.task,
            strategy=how.strategy,
            world=how.world,
            rules=how.rules,
            weights=how.weights,
            stop=stop,
            check=how.check,
            track=how.track,
        ),
        stop,
        quiet=how.json or not leads_here(),
        as_json=how.json and leads_here(),
        folder=folder,
        command=command,
        hears=hears(asked),
    )


def show_run(
    run: Callable[..., Any],
    stop: Stop,
    *,
    quiet: bool,
    as_json: bool,
    folder: Path,
    command: str = "dure train",
    hears: EventHandler = _nothing,
) -> int:
    """Execute a run with a display, print its results and folder, and return the exit status.

    Args:
        run: function that trains, and takes `on_progress`.
        stop: limits of the run, for the progress bar.
        quiet: print no progress and no table.
        as_json: print the summary as JSON on standard output.
        folder: the run folder.
        command: command that resumes an interrupted run.
        hears: further receiver of each event.
    """
    from dure.cli.show import Display, error_console, table

    try:
        with Display(stop, quiet) as display:

            def told(event: dict[str, Any]) -> None:
                display("training", event)
                hears(event)

            done = run(on_progress=told)
    except DureError as error:
        # If the input has to change (2), resuming would fail in the same way.
        if error.exit_code == 1 and (folder / "checkpoint").is_dir():
            print(
                f"dure: the run is kept up to its last checkpoint; resume with {command} --resume "
                f"{folder}",
                file=sys.stderr,
            )
        raise
    if as_json:
        print(json.dumps({**done.summary, "folder": str(folder)}))
    elif not quiet:
        console = error_console()
        console.print(table([done.summary], console))
        if "facts" in done.summary:
            _say_facts(folder)
        print(f"run folder: {folder}", file=sys.stderr)
    if done.summary["ended"] != "interrupt":
        return 0
    if not quiet:
        print(f"interrupted; resume with: {command} --resume {folder}", file=sys.stderr)
    return 130


def _say_facts(folder: Path) -> None:
    """Print lines about a run's pipeline, federation and privacy.

    Stages and bubble of a pipeline, outcomes of a federation's assignments, and privacy promises.
    """
    from dure.report import federated, pipeline, privacy
    from dure.report.read import read_run

    run = read_run(folder)
    told = (pipeline.in_a_line(run), federated.in_a_line(run), privacy.in_a_line(run))
    for line in filter(None, told):
        print(printable(line), file=sys.stderr)


def check_names(reference: str, systems: list[str]) -> None:
    """Check names of task and systems before torch is loaded. Raises ValueError."""
    if reference.endswith(".py"):
        raise ValueError(f"{reference} is a file: name a task in it, {reference}:NAME")
    if ":" not in reference and reference.replace("_", "-") not in catalog.TASKS:
        raise ValueError(f"there is no task {reference!r}{suggestion(reference, catalog.TASKS)}")
    for system in systems:
        if system.endswith(".py"):
            raise ValueError(f"{system} is a file: name a strategy in it, {system}:NAME")
        if ":" not in system and system not in catalog.SYSTEMS:
            raise ValueError(f"there is no system {system!r}{suggestion(system, catalog.SYSTEMS)}")


def start_fork_server() -> None:
    """Start the fork server, which loads torch in parallel; under torchrun no process forks."""
    if not under_torchrun():
        server.begins_with("dure.run.drive")  # which a rank runs, and this process imports later
        server.start()


def one_line(text: str) -> str:
    """Return a text as a single line that is safe for a terminal."""
    # It may quote a server, or a folder from elsewhere.
    return printable(" ".join(line.strip() for line in text.splitlines() if line.strip()))


def file_name(task: Task) -> str:
    return "".join(c if c.isalnum() or c in "-_" else "-" for c in task.name)


@contextmanager
def run_folder(asked: Path | None, name: str) -> Iterator[Path]:
    """Context manager: return the requested folder, or a new folder in runs/.

    The new folder is made at once, so that no other process takes it.
    """
    with interrupts_raise():
        made = asked is None or not asked.exists()
        folder = _new_folder(name) if asked is None else asked
        try:
            yield folder
        except KeyboardInterrupt:
            # No training has happened, so there is nothing to resume.
            with suppress(OSError):
                if [each.name for each in folder.iterdir()] == ["config.json"]:
                    (folder / "config.json").unlink()
            _remove_if_empty(folder, made)
            raise
        except BaseException:
            _remove_if_empty(folder, made and asked is None)
            raise


def _remove_if_empty(folder: Path, made: bool) -> None:
    """Remove a folder that this command made, unless a run has written files into it."""
    if made:
        with suppress(OSError):  # something is in it
            folder.rmdir()
            if folder.parent == _RUNS:  # which may have been made with it
                folder.parent.rmdir()


_RUNS = Path("runs")
"""Folder of run folders without a requested name."""


def _new_folder(name: str) -> Path:
    wanted = _RUNS / f"{name}-{time.strftime('%Y%m%d-%H%M%S')}"
    # Under torchrun the other ranks only need a path that is not None; they write nothing.
    if not leads_here():  # rank 0 makes it
        return wanted
    folder = wanted
    count = 1
    while True:
        try:
            # mkdir fails if another process made it first: runs of the same second do not share it.
            folder.mkdir(parents=True)
        except FileExistsError:
            count += 1
            folder = wanted.with_name(f"{wanted.name}-{count}")
        else:
            return folder
