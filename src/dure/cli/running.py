"""What commands that run something share: names, the run folder, the display, how it ended."""

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
from dure.cli.flags import Limits, ResumeOptions, parse_flags
from dure.cli.interrupted import interrupts_raise
from dure.errors import DureError, suggestion
from dure.peer_text import printable
from dure.worlds.launched import leads_here, under_torchrun
from dure.worlds.processes.fork_server import server

if TYPE_CHECKING:
    from dure.contracts.stop import Stop
    from dure.contracts.task import Task


Hears = Callable[[Mapping[str, Any]], None]
"""Is told of each event of a run."""


def _nothing(event: Mapping[str, Any]) -> None:
    pass


def resumed(
    flags: list[str],
    command: str = "dure train",
    parts: Mapping[str, Any] | None = None,
    hears: Callable[[Mapping[str, Any]], Hears] = lambda asked: _nothing,
) -> int:
    """Goes on with a run.

    command: that was typed. parts: of more flags; hears: who is told, made of all flags.
    """
    asked = parse_flags(
        command,
        {"limits": Limits, "how": ResumeOptions, **(parts or {})},
        flags,
        "Go on with a run.",
    )
    how: ResumeOptions = asked["how"]
    folder = how.resume
    from dure.run.config import asked_of
    from dure.run.train import resume

    stop = asked["limits"].stop() if asked["limits"] != Limits() else asked_of(folder).stop
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
    hears: Hears = _nothing,
) -> int:
    """Runs with a display, then says what came out and where it lies.

    command: that goes on with what was interrupted. hears: who else is told of each event.
    """
    from dure.cli.show import Display, error_console, table

    try:
        with Display(stop, quiet) as display:

            def told(event: dict[str, Any]) -> None:
                display("training", event)
                hears(event)

            done = run(on_progress=told)
    except DureError as error:
        # Where the input has to change (2), going on would fail in the same way.
        if error.exit_code == 1 and (folder / "checkpoint").is_dir():
            print(
                f"dure: kept until its last checkpoint; go on with {command} --resume {folder}",
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
        print(f"interrupted; go on with: {command} --resume {folder}", file=sys.stderr)
    return 130


def _say_facts(folder: Path) -> None:
    """A line on what a run told of itself.

    A pipeline tells its stages and bubble, a federation what came of its clients and what it
    promises them.
    """
    from dure.report import federated, pipeline, privacy
    from dure.report.read import read_run

    run = read_run(folder)
    told = (pipeline.in_a_line(run), federated.in_a_line(run), privacy.in_a_line(run))
    for line in filter(None, told):
        print(printable(line), file=sys.stderr)


def check_names(reference: str, systems: list[str]) -> None:
    """Mistyped names are answered before torch is loaded."""
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
    """It loads torch while this process does; under torchrun nobody forks."""
    if not under_torchrun():
        server.begins_with("dure.run.drive")  # which a rank runs, and this process imports later
        server.start()


def one_line(text: str) -> str:
    """A text in one line, as it may stand in a terminal."""
    # A server or a folder that somebody sent may be quoted in it.
    return printable(" ".join(line.strip() for line in text.splitlines() if line.strip()))


def file_name(task: Task) -> str:
    return "".join(c if c.isalnum() or c in "-_" else "-" for c in task.name)


@contextmanager
def run_folder(asked: Path | None, name: str) -> Iterator[Path]:
    """The folder that was asked for, or a new one in runs/.

    The new one is made at once, so that nobody else takes it.
    """
    with interrupts_raise():
        made = asked is None or not asked.exists()
        folder = _new_folder(name) if asked is None else asked
        try:
            yield folder
        except KeyboardInterrupt:
            # Nothing was learned yet: there is nothing to go on with.
            with suppress(OSError):
                if [each.name for each in folder.iterdir()] == ["config.json"]:
                    (folder / "config.json").unlink()
            _remove_if_empty(folder, made)
            raise
        except BaseException:
            _remove_if_empty(folder, made and asked is None)
            raise


def _remove_if_empty(folder: Path, made: bool) -> None:
    """Removes a folder that was made here; what a run has written stays, and so does its folder."""
    if made:
        with suppress(OSError):  # something is in it
            folder.rmdir()
            if folder.parent == _RUNS:  # which may have been made with it
                folder.parent.rmdir()


_RUNS = Path("runs")
"""Where folders are made that nobody has named."""


def _new_folder(name: str) -> Path:
    wanted = _RUNS / f"{name}-{time.strftime('%Y%m%d-%H%M%S')}"
    # Under torchrun the others only need a path that is not None; they write nothing.
    if not leads_here():  # rank 0 makes it
        return wanted
    folder = wanted
    count = 1
    while True:
        try:
            # mkdir fails if somebody else made it first: two runs of one second do not share it.
            folder.mkdir(parents=True)
        except FileExistsError:
            count += 1
            folder = wanted.with_name(f"{wanted.name}-{count}")
        else:
            return folder
