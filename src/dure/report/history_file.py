"""Incremental reading of history.jsonl: lines that were read are not read again.

    read      the lines added since the last call; all lines if the file has been replaced

A resumed run truncates its history to its newest checkpoint, and adds other lines: then the file is
shorter, or the bytes before the last position have changed. An incomplete line at the end is being
written, or is left from a kill: it is read once it is complete. If a resumed run wrote a step
again, the newer line counts.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, BinaryIO

from dure.record.untrusted_files import opened
from dure.report.json_values import mapping, number
from dure.report.runs import HistoryLine

_KNOWN = 128
"""Bytes before the last position, which identify the file."""


class HistoryFile:
    """The lines of a history. steps, evaluations: in the order of their steps."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._begin()

    def _begin(self) -> None:
        self.steps: list[HistoryLine] = []
        self.evaluations: list[HistoryLine] = []
        self.damaged = 0
        """Number of lines that could not be parsed."""
        self._read = 0
        """Bytes of complete lines that were read."""
        self._last = b""
        """The last of those bytes."""

    def read(self) -> bool:
        """Read new lines; return whether anything has changed."""
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
            # A killed run leaves an incomplete line at the end, which is no damage.
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
        # A resumed run repeated the steps after its checkpoint: the newer lines count.
        while kind and kind[-1].step >= step:
            kind.pop()
        kind.append(line_of(step, raw))


def line_of(step: float, raw: Mapping[str, Any]) -> HistoryLine:
    """Return a line of the history, from its JSON."""
    return HistoryLine(
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
        device_memory=number(raw.get("peak_device_memory")),
    )
