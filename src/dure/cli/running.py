"""Shared parts of the commands that train: `dure train`, `compare`, `sweep` and `serve`.

The parts are: checks of names, the run folder, the progress display, the final output, and the
resumption of a run.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
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
"""Function that receives each progress event of a run."""


def _nothing(event: Mapping[str, Any]) -> None:
    pass


def resume_run(
    flags: list[str],
    command: str = "dure train",
    option_groups: Mapping[str, Any] | None = None,
    make_handler: Callable[[Mapping[str, Any]], EventHandler] = lambda options: _nothing,
) -> int:
    """Resume the run of the flag --resume, and return the exit status.

    The limits of the resumed run are the typed limits, or those of the earlier run if no limit is
    typed.

    Args:
        flags: flags of the command.
        command: command without flags, for help texts and messages.
        option_groups: further dataclasses of flags, by name of the group.
        make_handler: function that gets all parsed flags, by name of the group, and returns a
            further receiver of progress events.
    """
    options = parse_flags(
        command,
        {"limits": LimitOptions, "how": ResumeOptions, **(option_groups or {})},
        flags,
        "Resume a run.",
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
            device=options["place"].device if "place" in options else None,
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
    """Execute a run with a progress display, print its results, and return the exit status.

    The exit status is 0, or 130 for an interrupted run. Errors are raised.

    Args:
        run: function that trains; its parameter `on_progress` receives the progress events.
        stop: limits of the run, for the progress bar.
        quiet: whether progress, table and messages are left out.
        as_json: whether the summary is printed as JSON on standard output.
        folder: the run folder.
        command: command that resumes the run with --resume, for messages.
        on_event: further receiver of each progress event.
    """
    from dure.cli.show import Display, error_console, table

    try:
        with Display(stop, quiet) as display:

            def handle(event: dict[str, Any]) -> None:
                display("training", event)
                on_event(event)

            finished = run(on_progress=handle)
    except DureError as error:
        # Exit code 2 means that the user has to change the input: resuming would fail again.
        if error.exit_code == 1 and (folder / "checkpoint").is_dir():
            print(
                f"dure: the run has a checkpoint; resume with {command} --resume {folder}",
                file=sys.stderr,
            )
        raise
    if as_json:
        print(json.dumps({**finished.summary, "folder": str(folder)}))
    elif not quiet:
        console = error_console()
        console.print(table([finished.summary], console))
        if "facts" in finished.summary:
            _print_facts(folder, finished.summary["facts"])
        print(f"run folder: {folder}", file=sys.stderr)
    if finished.summary["ended"] != "interrupt":
        return 0
    if not quiet:
        print(f"interrupted; resume with: {command} --resume {folder}", file=sys.stderr)
    return 130


def _print_facts(folder: Path, facts: Sequence[Mapping[str, Any]]) -> None:
    """Print the facts of a run on standard error, a line for each kind.

    The kinds are: stages and bubble of a pipeline, messages of a pipeline that take longer than its
    work, outcomes of a federation's assignments, and promised privacy. facts: those of the summary.
    """
    from dure.report import federated, pipeline, privacy
    from dure.report.read import read_run

    run = read_run(folder)
    lines = (
        pipeline.in_a_line(run),
        note_on_messages(facts),
        federated.in_a_line(run),
        privacy.in_a_line(run),
    )
    for line in filter(None, lines):
        print(printable(line), file=sys.stderr)


def note_on_messages(facts: Sequence[Mapping[str, Any]]) -> str | None:
    """Return a note on a pipeline whose messages take longer than its work; None without one."""
    from dure.parallel.pipeline.message_cost import slow_message_note

    note = slow_message_note(facts)
    return None if note is None else f"pipeline: {note}"


def check_names(reference: str, systems: list[str]) -> None:
    """Check the names of a task and of systems before torch is loaded.

    Args:
        reference: name of a built-in task, or MODULE:NAME, or FILE.py:NAME.
        systems: names of built-in strategies, or references to strategies of the same form.

    Raises:
        ValueError: if a name is unknown, or a file is given without a name.
    """
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
        # Ranks run this module.
        server.import_at_start("dure.run.drive")
        server.start()


def one_line(text: str) -> str:
    """Return a text as a single line that is safe for a terminal."""
    # It may quote a server, or a folder from elsewhere.
    return printable(" ".join(line.strip() for line in text.splitlines() if line.strip()))


def file_name(task: Task) -> str:
    """Return the task's name as part of a folder name: other characters become hyphens."""
    return "".join(c if c.isalnum() or c in "-_" else "-" for c in task.name)


@contextmanager
def run_folder(requested: Path | None, name: str) -> Iterator[Path]:
    """Context manager that yields the run folder: `requested`, or else a new folder in runs/.

    The new folder is created at once, so that no other process takes it. An exception in the block
    removes a new folder in runs/ that is still empty. An interrupt also removes a requested folder
    that did not exist before the block, and a config.json that is alone in the folder: no training
    has happened, and there is nothing to resume.

    Args:
        requested: folder that the user has named; None for a new folder.
        name: first part of the name of a new folder.
    """
    with interrupts_raise():
        is_new = requested is None or not requested.exists()
        folder = _new_folder(name) if requested is None else requested
        try:
            yield folder
        except KeyboardInterrupt:
            with suppress(OSError):
                if [each.name for each in folder.iterdir()] == ["config.json"]:
                    (folder / "config.json").unlink()
            _remove_if_empty(folder, is_new)
            raise
        except BaseException:
            _remove_if_empty(folder, is_new and requested is None)
            raise


def _remove_if_empty(folder: Path, is_new: bool) -> None:
    """Remove a new folder if it is empty. is_new: whether the folder is new in this command."""
    if is_new:
        with suppress(OSError):  # The folder is not empty.
            folder.rmdir()
            if folder.parent == _RUNS:  # runs/ may be new as well
                folder.parent.rmdir()


_RUNS = Path("runs")
"""Parent folder of run folders that the user has not named."""


def _new_folder(name: str) -> Path:
    """Create a folder in runs/ whose name has the time; under torchrun only rank 0 creates it."""
    wanted = _RUNS / f"{name}-{time.strftime('%Y%m%d-%H%M%S')}"
    # Other ranks than rank 0 write no files: any path serves.
    if not is_leader_process():
        return wanted
    folder = wanted
    count = 1
    while True:
        try:
            # mkdir fails if another process was first: runs of the same second share no folder.
            folder.mkdir(parents=True)
        except FileExistsError:
            count += 1
            folder = wanted.with_name(f"{wanted.name}-{count}")
        else:
            return folder
