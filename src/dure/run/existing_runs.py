"""Load ended runs with their models, and resume comparisons.

A comparison's folder lists the planned runs, and each run's folder has its request. Resuming a
comparison skips ended runs, and resumes the others from the newest checkpoint or from the start:
the result has the same bits as an uninterrupted comparison. Failed runs are retried. A folder is
data, as in `dure.run.trusted_code`.
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
from dure.record.run import Run, RunFolder, load_run
from dure.record.settings import SUMS
from dure.record.untrusted_files import contents
from dure.run.argument_checks import check_function
from dure.run.compare import COMPARISON, Comparison, execute_and_record, write_comparison_files
from dure.run.config import run_request_in
from dure.run.train import all_callbacks, reload_task, resume
from dure.run.trusted_code import ReferenceGuard
from dure.worlds.launcher_environment import is_leader_process


def _ignore(label: str, event: dict[str, Any]) -> None:
    pass


def is_comparison(folder: Path) -> bool:
    """Return whether the folder contains a comparison or a sweep."""
    return (folder / COMPARISON).is_file()


def task_of(folder: Path, task: Task | str | None = None) -> Task:
    """Return the task of a run folder. task: replaces the task that config.json names.

    Raises RunFolderError if the task was made in Python, or names code that must not run.
    """
    if isinstance(task, Task):
        return task
    config = RunFolder.open(folder).config()
    return reload_task(folder, run_request_in(folder, config), task, ReferenceGuard(folder, config))


def ended_run(folder: Path, task: Task | str | None = None) -> Run:
    """Return the ended run in a folder, with its model. task: as in `task_of`.

    Raises RunFolderError if the folder has no ended run.
    """
    return load_run(folder, task_of(folder, task).new_model)


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
    """Resume the comparison or sweep in `folder`, and write its report again.

    Ended runs stay unchanged; the other runs are resumed.

    Args:
        folder: folder of the comparison.
        task: as in `dure.resume`.
        rules: as in `dure.resume`.
        check: as in `dure.resume`.
        callbacks: as in `dure.compare`.
        track: as in `dure.compare`.
        on_progress: as in `dure.compare`.

    Raises:
        RunFolderError: if the folder has no comparison, or the comparison is damaged.
    """
    check_path("folder", folder)
    check_function("on_progress", on_progress)
    all_callbacks(callbacks, track)  # what is wrong with them is said before any work
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
        if execute_and_record(program, told, done) == "interrupt":
            break
    if not is_leader_process():
        return done
    return dataclasses.replace(done, report=write_comparison_files(path, asked, names, done))


def _asked(folder: Path) -> dict[str, Any]:
    """Return the request in comparison.json. Raises RunFolderError if there is none."""
    if not is_comparison(folder):
        raise RunFolderError(f"{folder} does not contain a comparison: it has no {COMPARISON}")
    asked = RunFolder(folder).read_json(COMPARISON)
    planned = asked.get("planned")
    seeds = asked.get("seeds")
    if not isinstance(planned, list) or not isinstance(seeds, int):
        raise RunFolderError(
            f"{folder / COMPARISON} does not list the planned runs: an older dure wrote it, or it "
            "is damaged"
        )
    # Only subfolders: a comparison from another user must not write to other folders of the reader.
    away = [name for name in planned if not isinstance(name, str) or Path(name).name != name]
    if away:
        raise RunFolderError(f"{folder / COMPARISON} is damaged: it has no folder {away[0]!r}")
    # The checksums cover the plan, and become stale when the results are written.
    came = ("runs", "failed", SUMS)
    return {key: value for key, value in asked.items() if key not in came}


def stop_of(folder: Path) -> Stop:
    """Return the limits of a comparison. Raises RunFolderError if its folder has none."""
    try:
        return msgspec.convert(_asked(folder).get("stop"), Stop)
    except (msgspec.ValidationError, ValueError) as error:
        raise RunFolderError(f"{folder / COMPARISON} is damaged: {error}") from error


def _told(folder: Path, seeds: int) -> str:
    """Return the label of a run, as in `dure.compare`."""
    config = RunFolder.open(folder).read_json("config.json")
    seed = f", seed {config.get('seed')}" if seeds > 1 else ""
    return f"{config.get('label', folder.name)}{seed}"


def _has_ended(folder: Path) -> bool:
    """Return whether a run has ended without an interruption."""
    summary = _summary(folder)
    return bool(summary) and summary.get("ended") != "interrupt"


def _summary(folder: Path) -> Mapping[str, Any]:
    # Written last and atomically; a damaged file counts as missing, and is written again.
    try:
        summary = json.loads(contents(folder / "summary.json"))
    except (OSError, ValueError, RecursionError):
        return {}
    return summary if isinstance(summary, dict) else {}
