"""Runs that are there already: an ended one with its model, and a comparison that goes on.

A comparison's folder says which runs were planned, and each of their folders what was asked of it.
So to go on is to pass over those that have ended, and to resume the others, each from its newest
checkpoint or from the start: the result has the same bits as if nothing had come between. What
failed is tried again. A folder is data, as in `dure.run.begun`.
"""

from __future__ import annotations

import dataclasses
import functools
import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec

from dure.arguments import check_path
from dure.contracts.stop import Stop
from dure.contracts.task import Task
from dure.errors import RunFolderError
from dure.record.inside import contents
from dure.record.run import Run, RunFolder, load_run
from dure.record.settings import SUMS
from dure.run.asked import check_function
from dure.run.begun import Asks
from dure.run.compare import COMPARISON, Comparison, noted, reported
from dure.run.config import asked_in
from dure.run.train import heard, resume, task_again
from dure.worlds.launched import leads_here


def _ignore(label: str, event: dict[str, Any]) -> None:
    pass


def is_comparison(folder: Path) -> bool:
    """Whether a comparison, or a sweep, was written into this folder."""
    return (folder / COMPARISON).is_file()


def task_of(folder: Path, task: Task | str | None = None) -> Task:
    """The task of a run folder. task: in place of the one that config.json names.

    Raises RunFolderError if it was made in Python, or names code that must not be run.
    """
    if isinstance(task, Task):
        return task
    config = RunFolder.open(folder).config()
    return task_again(folder, asked_in(folder, config), task, Asks(folder, config))


def ended_run(folder: Path, task: Task | str | None = None) -> Run:
    """The ended run in a folder, with its model. task: as in `task_of`.

    Raises RunFolderError if there is none.
    """
    return load_run(folder, task_of(folder, task).model)


def resume_comparison(
    folder: str | Path,
    *,
    task: Task | str | None = None,
    rules: Sequence[str] = (),
    check: bool = True,
    callbacks: Sequence[Any] = (),
    track: str | None = None,
    on_progress: Callable[[str, dict[str, Any]], None] = _ignore,
) -> Comparison:
    """Goes on with the comparison, or the sweep, in `folder`, and writes its report again.

    Runs that have ended stay as they are; the others are resumed. task, rules, check: as in
    `dure.resume`. callbacks, track, on_progress: as in `dure.compare`.

    Raises RunFolderError if there is no comparison in the folder, or it is damaged.
    """
    check_path("folder", folder)
    check_function("on_progress", on_progress)
    heard(callbacks, track)  # what is wrong with them is said before any work
    path = Path(folder)
    asked = _asked(path)
    done = Comparison([], {})
    names: list[str] = []
    for name in asked["planned"]:
        names.append(name)
        told = _told(path / name, asked["seeds"])
        program: Callable[[], Run] = functools.partial(ended_run, path / name, task)
        if not _has_ended(path / name):
            program = functools.partial(
                resume,
                path / name,
                task=task,
                rules=rules,
                check=check,
                callbacks=callbacks,
                track=track,
                on_progress=functools.partial(on_progress, told),
            )
        if noted(program, told, done) == "interrupt":
            break
    if not leads_here():
        return done
    return dataclasses.replace(done, report=reported(path, asked, names, done))


def _asked(folder: Path) -> dict[str, Any]:
    """What comparison.json says was asked. Raises RunFolderError if it says nothing of the kind."""
    if not is_comparison(folder):
        raise RunFolderError(f"{folder} holds no comparison: it has no {COMPARISON}")
    asked = RunFolder(folder).read_json(COMPARISON)
    planned = asked.get("planned")
    seeds = asked.get("seeds")
    if not isinstance(planned, list) or not isinstance(seeds, int):
        raise RunFolderError(
            f"{folder / COMPARISON} does not say which runs were planned: an older dure wrote it, "
            f"or it is damaged"
        )
    # Folders in this one: what somebody sent is not to train in others of the reader's.
    away = [name for name in planned if not isinstance(name, str) or Path(name).name != name]
    if away:
        raise RunFolderError(f"{folder / COMPARISON} is damaged: {away[0]!r} is no folder in it")
    # Checksums are of what was planned, and go when its end is written.
    came = ("runs", "failed", SUMS)
    return {key: value for key, value in asked.items() if key not in came}


def stop_of(folder: Path) -> Stop:
    """The limits of a comparison. Raises RunFolderError if its folder does not say them."""
    try:
        return msgspec.convert(_asked(folder).get("stop"), Stop)
    except (msgspec.ValidationError, ValueError) as error:
        raise RunFolderError(f"{folder / COMPARISON} is damaged: {error}") from error


def _told(folder: Path, seeds: int) -> str:
    """How a run is called, as `dure.compare` did."""
    config = RunFolder.open(folder).read_json("config.json")
    seed = f", seed {config.get('seed')}" if seeds > 1 else ""
    return f"{config.get('label', folder.name)}{seed}"


def _has_ended(folder: Path) -> bool:
    """Whether a run came to its end, and was not interrupted on the way."""
    summary = _summary(folder)
    return bool(summary) and summary.get("ended") != "interrupt"


def _summary(folder: Path) -> Mapping[str, Any]:
    # It is written last and at once; what is damaged counts as none, and is written again.
    try:
        summary = json.loads(contents(folder / "summary.json"))
    except (OSError, ValueError, RecursionError):
        return {}
    return summary if isinstance(summary, dict) else {}
