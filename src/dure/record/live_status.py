"""now.json: the state of a run in progress, until summary.json replaces it.

    facts        the learner's facts, as in summary.json (docs/run-folder.md)
    federation   of a served run: connected, working and missing clients, from the server
    failed       reason for a failed run, in a line

Viewers of the run read it. It is written at most every `SECONDS`, and takes at most a fiftieth of
the time. A run does not need the file: a failed write is ignored, and the file is not synced.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import msgspec

from dure.record.disk import open_regular_file
from dure.record.untrusted_files import contents

NOW = "now.json"
"""Its name in a run folder."""

SECONDS = 2.0
"""Least seconds between two writes."""

_SHARE = 50
"""Least ratio of the pause to the duration of the last write."""


class LiveStatus:
    """State of a run in progress. facts: returns the learner's facts; None without any."""

    def __init__(self, folder: Path) -> None:
        self._path = folder / NOW
        self._due = 0.0
        self.facts: Callable[[], Mapping[str, Any] | None] = lambda: None
        self.federation: Mapping[str, Any] | None = None
        """Newest report of the federation's server."""

    def hears(self, event: Mapping[str, Any]) -> None:
        """Store an event of the run, if a server reports on its clients."""
        if "federation" in event:
            self.federation = event["federation"]
            self.write()

    def write(self) -> None:
        """Write the file, unless it was just written."""
        began = time.monotonic()
        if began < self._due:
            return
        facts = self.facts()
        told: dict[str, Any] = {} if facts is None else {"facts": [facts]}
        told |= {} if self.federation is None else {"federation": self.federation}
        # A run without any content writes nothing.
        if told:
            _replace(self._path, told)
        took = time.monotonic() - began
        self._due = began + max(SECONDS, _SHARE * took)


def record_failure(folder: Path, why: str) -> None:
    """Add the reason for a failure; the other content stays."""
    path = folder / NOW
    told: Any = None
    with suppress(OSError, ValueError, RecursionError):
        told = json.loads(contents(path))
    _replace(path, {**(told if isinstance(told, dict) else {}), "failed": why})


def delete_status(folder: Path) -> None:
    """Delete the file, since the summary replaces it or the run begins again."""
    with suppress(OSError):
        (folder / NOW).unlink(missing_ok=True)


def _replace(path: Path, content: Mapping[str, Any]) -> None:
    beside = path.with_name(f".{path.name}.{os.getpid()}")
    with suppress(OSError):
        try:
            with open(beside, "wb", opener=open_regular_file) as file:
                file.write(msgspec.json.encode(content))
            os.replace(beside, path)
        except OSError:
            beside.unlink(missing_ok=True)
            raise
