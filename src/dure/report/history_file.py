"""history.jsonl as it grows: lines that were read are not read again.

    read      what was added since the last time; all of it where the file is another by now

A run that goes on cuts its history to its newest checkpoint, and adds other lines: then the file is
shorter, or what stood before the place where reading ended is not what stood there. Half a line at
the end is a line that is being written, or what a kill has left: it waits until it is whole. Where
a resumed run wrote a step again, the newer line stands.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, BinaryIO

from dure.record.inside import opened
from dure.report.runs import Line
from dure.report.values import mapping, number

_KNOWN = 128
"""Bytes before the place where reading ended, by which the same file is known again."""


class HistoryFile:
    """The lines of one history. steps, evaluations: in the order of their steps."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._begin()

    def _begin(self) -> None:
        self.steps: list[Line] = []
        self.evaluations: list[Line] = []
        self.damaged = 0
        """Lines that say nothing."""
        self._read = 0
        """Bytes of whole lines that were read."""
        self._last = b""
        """The last of them."""

    def read(self) -> bool:
        """Reads what is new; whether anything was."""
        try:
            with opened(self.path) as file:
                return self._go_on(file)
        except OSError:
            there = bool(self._read)
            self._begin()
            return there

    def _go_on(self, file: BinaryIO) -> bool:
        changed = False
        file.seek(self._read - len(self._last))
        if file.read(len(self._last)) != self._last:
            self._begin()
            file.seek(0)
            changed = True
        for text in file:
            # A killed run leaves half a line at the end, which is no damage.
            if text.endswith(b"\n"):
                self._read += len(text)
                self._last = (self._last + text)[-_KNOWN:]
                self._take(text)
                changed = True
        return changed

    def _take(self, text: bytes) -> None:
        try:
            raw = json.loads(text.decode(errors="replace"))
            step = number(raw["step"])
            kind = {"step": self.steps, "evaluation": self.evaluations}[raw["kind"]]
        except (ValueError, KeyError, TypeError, RecursionError):
            self.damaged += bool(text.strip())
            return
        if step is None:
            self.damaged += 1
            return
        # A resumed run did again what came after its checkpoint: the newer lines stand.
        while kind and kind[-1].step >= step:
            kind.pop()
        kind.append(line_of(step, raw))


def line_of(step: float, raw: Mapping[str, Any]) -> Line:
    """A line of the history, from its JSON."""
    return Line(
        step=step,
        epoch=number(raw.get("epoch")),
        seconds=number(raw.get("seconds")),
        loss=number(raw.get("loss")),
        bytes_sent=number(raw.get("bytes_sent")),
        compute=number(raw.get("compute_seconds")),
        communication=number(raw.get("communication_seconds")),
        idle=number(raw.get("idle_seconds")),
        peak_memory=number(raw.get("peak_memory")),
        metrics={
            str(key): number(value)
            for key, value in mapping(raw.get("metrics", raw.get("numbers"))).items()
        },
    )
