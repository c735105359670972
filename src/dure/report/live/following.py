"""Run folders that others write, looked at again and again.

    look    the runs as they are now; of a history only what was added is read

A folder is read again where one of its files is another than before, by its time and size; whether
somebody trains there is told by its lock (`dure.record.lock`). Nothing is written, and nothing that
lies in a folder is called.

    starting   nothing is measured yet
    running    somebody trains
    over       its summary says by which limit
    failed     it said why
    stopped    nobody trains, and nothing says why: it was killed, perhaps
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from dure.errors import RunFolderError
from dure.record.inside import contents
from dure.record.lock import is_held
from dure.record.now import NOW
from dure.report.history_file import HistoryFile
from dure.report.read import distinct_labels, read_run, run_folders
from dure.report.runs import Run, Runs
from dure.report.values import mapping, text_of

STARTING = "starting"
RUNNING = "running"
OVER = "over"
FAILED = "failed"
STOPPED = "stopped"

_FILES = (
    "config.json",
    "summary.json",
    "trace.json",
    "history.jsonl",
    "audit.json",
    "answers.json",
    NOW,
)


@dataclass(frozen=True)
class Followed:
    """A run and how it is.

    now: what it said of itself last, as in now.json. held: whether a process trains there.
    """

    run: Run
    held: bool
    now: Mapping[str, Any]

    @property
    def state(self) -> str:
        """One of the five above."""
        if self.held:
            return RUNNING if self.run.steps or self.run.evaluations else STARTING
        if self.run.result.ended is not None:
            return OVER
        if text_of(self.now.get("failed")) is not None:
            return FAILED
        return STOPPED if self.run.steps or self.run.evaluations else STARTING

    @property
    def goes_on(self) -> bool:
        return self.state in (STARTING, RUNNING)


@dataclass(frozen=True)
class Look:
    """What was seen.

    runs: for the report, each with a label of its own. followed: the same, in the same order.
    """

    runs: Runs
    followed: Sequence[Followed]

    @property
    def goes_on(self) -> bool:
        """Whether anything is to come; of a folder without runs, the first one."""
        return not self.followed or any(one.goes_on for one in self.followed)

    def shows_the_same(self, other: Look) -> bool:
        """Whether there is nothing else to show than in another look."""
        if self.runs.failed != other.runs.failed or len(self.followed) != len(other.followed):
            return False
        pairs = zip(self.followed, other.followed, strict=True)
        # What was not read again is the same object; its values are many.
        return all(one is before for one, before in pairs)


@dataclass
class _Known:
    lines: HistoryFile
    seen: object = None
    found: Followed | None = None


@dataclass
class Following:
    """The runs in some folders."""

    folders: Sequence[Path]
    _known: dict[Path, _Known] = field(default_factory=dict)

    def look(self) -> Look:
        """How all runs are now."""
        folders, failed = self._folders()
        followed = [self._run(folder) for folder in folders]
        labelled = distinct_labels([one.run for one in followed])
        return Look(Runs(labelled, failed), followed)

    def _folders(self) -> tuple[list[Path], Mapping[str, str]]:
        try:
            return run_folders(self.folders)
        # Nothing has begun there yet.
        except RunFolderError:
            return [], {}

    def _run(self, folder: Path) -> Followed:
        known = self._known.setdefault(folder, _Known(HistoryFile(folder / "history.jsonl")))
        held = is_held(folder)
        # Before the files are read: what is written meanwhile is seen at the next look.
        seen = (held, [_stamp(folder / name) for name in _FILES])
        if known.found is None or seen != known.seen:
            run = replace(read_run(folder, known.lines), goes_on=held)
            known.found = Followed(run, held, _now(folder))
            known.seen = seen
        return known.found


def _stamp(path: Path) -> object:
    try:
        found = path.stat()
    except OSError:
        return None
    return found.st_ino, found.st_mtime_ns, found.st_size


def _now(folder: Path) -> Mapping[str, Any]:
    try:
        return mapping(json.loads(contents(folder / NOW)))
    except (OSError, ValueError, RecursionError):
        return {}
