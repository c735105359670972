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
from dure.worlds.launcher_environment import is_leader_process, under_torchrun
from dure.worlds.processes.fork_server import server

if TYPE_CHECKING:
    from dure.contracts.stop import Stop
    from dure.contracts.task import Task


EventHandler = Callable[[Mapping[str, Any]], None]
"""Function that receives each event of a run."""


def _nothing(event: Mapping[str, Any]) -> None:
    pass


def resume_run(
    flags: list[str],
    command: str = "dure train",
    option_groups: Mapping[str, Any] | None = None,
    make_handler: Callable[[Mapping[str, Any]], EventHandler] = lambda options: _nothing,
) -> int:
    """Resume a run, and return the exit status.

    command: the typed command. option_groups: further flags. make_handler: makes the receiver of
    events from all flags.
    """
    options = parse_flags(
        command,
        {"limits": LimitOptions, "how": ResumeOptions, **(option_groups or {})},
        flags,
        "Go on with a run.",
    )
    resume_options: ResumeOptions = options["how"]
    folder = resume_options.resume
    from dure.run.config import run_request_of
    from dure.run.train import resume

    stop = (
        options["limits"].to_stop()
        if options["limits"] != LimitOptions()
        else run_request_of(folder).stop
    )
    return show_run(
        partial(
            resume,
            folder,
            task=resume_options.task,
            strategy=resume_options.strategy,
            world=resume_options.world,
            rules=resume_options.rules,
            weights=resume_options.weights,
            stop=stop,
            check=resume_options.check,
            track=resume_options.track,
        ),
        stop,
        quiet=resume_options.json or not is_leader_process(),
        as_json=resume_options.json and is_leader_process(),
        folder=folder,
        command=command,
        on_event=make_handler(options),
    )


def show_run(
    run: Callable[..., Any],
    stop: Stop,
    *,
    quiet: bool,
    as_json: bool,
    folder: Path,
    command: str = "dure train",
    on_event: EventHandler = _nothing,
) -> int:
    """Execute a run with a display, print its results and folder, and return the exit status.

    Args:
        run: function that trains, and takes `on_progress`.
        stop: limits of the run, for the progress bar.
        quiet: print no progress and no table.
        as_json: print the summary as JSON on standard output.
        folder: the run folder.
        command: command that resumes an interrupted run.
        on_event: further receiver of each event.
    """
    from dure.cli.show import Display, error_console, table

    try:
        with Display(stop, quiet) as display:

            def handle(event: dict[str, Any]) -> None:
                display("training", event)
                on_event(event)

            finished = run(on_progress=handle)
    except DureError as error:
        # If the input has to change (2), resuming would fail in the same way.
        if error.exit_code == 1 and (folder / "checkpoint").is_dir():
            print(
                f"dure: kept until its last checkpoint; go on with {command} --resume {folder}",
                file=sys.stderr,
            )
        raise
    if as_json:
        print(json.dumps({**finished.summary, "folder": str(folder)}))
    elif not quiet:
        console = error_console()
        console.print(table([finished.summary], console))
        if "facts" in finished.summary:
            _print_facts(folder)
        print(f"run folder: {folder}", file=sys.stderr)
    if finished.summary["ended"] != "interrupt":
        return 0
    if not quiet:
        print(f"interrupted; go on with: {command} --resume {folder}", file=sys.stderr)
    return 130


def _print_facts(folder: Path) -> None:
    """Print lines about a run's pipeline, federation and privacy.

    Stages and bubble of a pipeline, outcomes of a federation's assignments, and privacy promises.
    """
    from dure.report import federated, pipeline, privacy
    from dure.report.read import read_run

    run = read_run(folder)
    lines = (pipeline.in_a_line(run), federated.in_a_line(run), privacy.in_a_line(run))
    for line in filter(None, lines):
        print(printable(line), file=sys.stderr)


def check_names(reference: str, systems: list[str]) -> None:
    """Check names of task and systems before torch is loaded. Raises ValueError."""
    if reference.endswith(".py"):
        raise ValueError(f"{reference} is a file: say which task in it, {reference}:NAME")
    if ":" not in reference and reference.replace("_", "-") not in catalog.TASKS:
        raise ValueError(f"there is no task {reference!r}{suggestion(reference, catalog.TASKS)}")
    for system in systems:
        if system.endswith(".py"):
            raise ValueError(f"{system} is a file: say which strategy in it, {system}:NAME")
        if ":" not in system and system not in catalog.SYSTEMS:
            raise ValueError(f"there is no system {system!r}{suggestion(system, catalog.SYSTEMS)}")


def start_fork_server() -> None:
    """Start the fork server, which loads torch in parallel; under torchrun no process forks."""
    if not under_torchrun():
        server.import_at_start(
            "dure.run.drive"
        )  # which a rank runs, and this process imports later
        server.start()


def one_line(text: str) -> str:
    """Return a text as a single line that is safe for a terminal."""
    # It may quote a server, or a folder from elsewhere.
    return printable(" ".join(line.strip() for line in text.splitlines() if line.strip()))


def file_name(task: Task) -> str:
    return "".join(c if c.isalnum() or c in "-_" else "-" for c in task.name)


@contextmanager
def run_folder(requested: Path | None, name: str) -> Iterator[Path]:
    """Context manager: return the requested folder, or a new folder in runs/.

    The new folder is made at once, so that no other process takes it.
    """
    with interrupts_raise():
        is_new = requested is None or not requested.exists()
        folder = _new_folder(name) if requested is None else requested
        try:
            yield folder
        except KeyboardInterrupt:
            # No training has happened, so there is nothing to resume.
            with suppress(OSError):
                if [each.name for each in folder.iterdir()] == ["config.json"]:
                    (folder / "config.json").unlink()
            _remove_if_empty(folder, is_new)
            raise
        except BaseException:
            _remove_if_empty(folder, is_new and requested is None)
            raise


def _remove_if_empty(folder: Path, is_new: bool) -> None:
    """Remove a folder that this command made, unless a run has written files into it."""
    if is_new:
        with suppress(OSError):  # something is in it
            folder.rmdir()
            if folder.parent == _RUNS:  # which may have been made with it
                folder.parent.rmdir()


_RUNS = Path("runs")
"""Folder of run folders without a requested name."""


def _new_folder(name: str) -> Path:
    wanted = _RUNS / f"{name}-{time.strftime('%Y%m%d-%H%M%S')}"
    # Under torchrun the other ranks only need a path that is not None; they write nothing.
    if not is_leader_process():  # rank 0 makes it
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
