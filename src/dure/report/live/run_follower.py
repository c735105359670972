"""Follow run folders that other processes write.

    look    the current state of the runs; only new lines of a history are read

A folder is read again if any of its files has changed, by time and size; its lock shows whether a
process is training there (`dure.record.lock`). Nothing is written, and no code from a folder runs.

    starting   nothing is measured yet
    running    a process is training
    over       the summary has the limit that ended the run
    failed     the run has written its error
    stopped    no process is training, without a recorded reason: perhaps the run was killed
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from dure.errors import RunFolderError
from dure.record.live_status import NOW
from dure.record.lock import is_held
from dure.record.untrusted_files import contents
from dure.report.history_file import HistoryFile
from dure.report.json_values import mapping, text_of
from dure.report.read import distinct_labels, read_run, run_folders
from dure.report.runs import ReportedRun, ReportedRuns

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
class FollowedRun:
    """A run and its state.

    now: content of now.json, the run's last report. held: whether a process is training there.
    """

    run: ReportedRun
    held: bool
    now: Mapping[str, Any]

    @property
    def state(self) -> str:
        """The run's state: one of the five states of this module."""
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
class RunsSnapshot:
    """State of all runs at a moment.

    runs: for the report, each with a distinct label. followed: the same runs, in the same order.
    """

    runs: ReportedRuns
    followed: Sequence[FollowedRun]

    @property
    def goes_on(self) -> bool:
        """Whether changes are to be expected; true for a folder without runs, which may begin."""
        return not self.followed or any(one.goes_on for one in self.followed)

    def shows_the_same(self, other: RunsSnapshot) -> bool:
        """Return whether the page for this state would equal the page for another."""
        if self.runs.failed != other.runs.failed or len(self.followed) != len(other.followed):
            return False
        pairs = zip(self.followed, other.followed, strict=True)
        # A run that was not read again is the same object; comparing its values would be slow.
        return all(one is before for one, before in pairs)


@dataclass
class _Known:
    lines: HistoryFile
    seen: object = None
    found: FollowedRun | None = None


@dataclass
class RunFollower:
    """The runs in some folders."""

    folders: Sequence[Path]
    _known: dict[Path, _Known] = field(default_factory=dict)

    def look(self) -> RunsSnapshot:
        """Return the current state of all runs."""
        folders, failed = self._folders()
        followed = [self._run(folder) for folder in folders]
        labelled = distinct_labels([one.run for one in followed])
        return RunsSnapshot(ReportedRuns(labelled, failed), followed)

    def _folders(self) -> tuple[list[Path], Mapping[str, str]]:
        try:
            return run_folders(self.folders)
        # No run has begun there yet.
        except RunFolderError:
            return [], {}

    def _run(self, folder: Path) -> FollowedRun:
        known = self._known.setdefault(folder, _Known(HistoryFile(folder / "history.jsonl")))
        held = is_held(folder)
        # Before the files are read: changes during reading are noticed at the next look.
        seen = (held, [_stamp(folder / name) for name in _FILES])
        if known.found is None or seen != known.seen:
            run = replace(read_run(folder, known.lines), goes_on=held)
            known.found = FollowedRun(run, held, _now(folder))
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
