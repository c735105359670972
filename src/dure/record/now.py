"""now.json: what a run that goes on says of itself, until summary.json says it for good.

    facts        what the learner knows of who did what, as in summary.json (docs/run-folder.md)
    federation   of a run that is served: who is there, at work and missing, as the server tells
    failed       why the run failed, in one line

Whoever watches the run reads it. It is written at most every `SECONDS`, and takes at most a
fiftieth of the time. A run does not need it: a disk that does not take it is no failure, and it is
not synced.
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

from dure.record.disk import opened_itself
from dure.record.inside import contents

NOW = "now.json"
"""Its name in a run folder."""

SECONDS = 2.0
"""Between two writings at the least."""

_SHARE = 50
"""Times as long as it took to write is waited before it is written again."""


class Now:
    """What one run says of itself. facts: asked for what the learner knows; None: nothing yet."""

    def __init__(self, folder: Path) -> None:
        self._path = folder / NOW
        self._due = 0.0
        self.facts: Callable[[], Mapping[str, Any] | None] = lambda: None
        self.federation: Mapping[str, Any] | None = None
        """What the server of the federation has told last."""

    def hears(self, event: Mapping[str, Any]) -> None:
        """An event of the run, as whoever watches it is told."""
        if "federation" in event:
            self.federation = event["federation"]
            self.write()

    def write(self) -> None:
        """Writes it, unless it was just written."""
        began = time.monotonic()
        if began < self._due:
            return
        facts = self.facts()
        told: dict[str, Any] = {} if facts is None else {"facts": [facts]}
        told |= {} if self.federation is None else {"federation": self.federation}
        # A run of which nothing is to be said writes nothing.
        if told:
            _replace(self._path, told)
        took = time.monotonic() - began
        self._due = began + max(SECONDS, _SHARE * took)


def failed(folder: Path, why: str) -> None:
    """The run has failed. What it said of itself stays."""
    path = folder / NOW
    told: Any = None
    with suppress(OSError, ValueError, RecursionError):
        told = json.loads(contents(path))
    _replace(path, {**(told if isinstance(told, dict) else {}), "failed": why})


def forget(folder: Path) -> None:
    """The summary says it by now, or the run begins again."""
    with suppress(OSError):
        (folder / NOW).unlink(missing_ok=True)


def _replace(path: Path, content: Mapping[str, Any]) -> None:
    beside = path.with_name(f".{path.name}.{os.getpid()}")
    with suppress(OSError):
        try:
            with open(beside, "wb", opener=opened_itself) as file:
                file.write(msgspec.json.encode(content))
            os.replace(beside, path)
        except OSError:
            beside.unlink(missing_ok=True)
            raise
