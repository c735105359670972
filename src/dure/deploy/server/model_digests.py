"""Digests of a run's models in order, with which models made again are compared.

    models.jsonl    {"checksum":"1a2b3c4d","model":3,"of":"sent","sha256":"…"}, a line a model

`of` is "sent" for the stream that clients fetched for training, whose SHA-256 the server has
anyway, and "made" for the weights and buffers of a model without training, such as the last model.
The checksum is the CRC-32 of the rest of the line.

A restarted server makes models again, and so does a replay: each model is compared with its line.
Damage, or a machine with other arithmetic, is therefore detected. The lines are not synced
individually: a power failure may lose the newest lines, which are then written again.
"""

from __future__ import annotations

from pathlib import Path
from typing import Literal

import msgspec

from dure.errors import RunFolderError, RunFolderWriteError, warn
from dure.record.disk import LineFile, retry_write
from dure.record.seal import sha256_of, with_checksum, without_checksum
from dure.record.untrusted_files import LARGE, contents

FILE = "models.jsonl"
"""Name of the file in a run folder."""

Of = Literal["sent", "made"]


class _Line(msgspec.Struct, frozen=True):
    model: int
    of: Of
    sha256: str


class ModelDigests:
    """Digests of a run's models. `path` is None to keep the digests in memory only.

    `met` has the numbers of the models that this process has made, `compared` the models among them
    with a line, and `differ` the models whose line has another digest. Raises RunFolderError for a
    damaged file.
    """

    def __init__(self, path: Path | None, writes: bool = True) -> None:
        self._path = path
        self._lines: LineFile | None = None
        there = path is not None and path.is_file()
        content = contents(path, most=LARGE) if path is not None and there else b""
        self.there = there
        """Whether an earlier process has written the file."""
        self._known = {(one.model, one.of): one.sha256 for one in _lines_in(content, path)}
        self.met: set[int] = set()
        self.compared: set[int] = set()
        self.differ: list[int] = []
        if path is not None and writes:
            self._lines = LineFile(path)

    @property
    def newest(self) -> int:
        """Number of the newest known model; 0 without models."""
        return max((model for model, _ in self._known), default=0)

    def note(self, model: int, of: Of, sha256: str) -> None:
        """Compare a model with its line, or write its line.

        Warns at the first model that differs. Raises RunFolderWriteError.
        """
        self.met.add(model)
        known = self._known.get((model, of))
        if known is not None:
            self.compared.add(model)
        if known == sha256:
            return
        if known is not None:
            self._differs(model)
        self._known[model, of] = sha256
        if self._lines is not None:
            self._add(self._lines, _written(_Line(model, of, sha256)))

    def _add(self, lines: LineFile, line: bytes) -> None:
        try:
            lines.add(line)
        except RunFolderWriteError:
            # The line stays in the buffer, and is written by the next call, which adds no line.
            retry_write(lambda: lines.add(b""))

    def _differs(self, model: int) -> None:
        if not self.differ:
            warn(
                f"model {model} has other bits than the model whose digest is in {self._path}: "
                "this machine computes differently than the previous one, or a file of the run "
                "has changed"
            )
        self.differ.append(model)

    def sync(self) -> None:
        """Sync the written lines to the disk. Raises RunFolderWriteError."""
        if self._lines is not None:
            self._lines.sync()

    def sha256(self) -> str | None:
        """Return the SHA-256 of the whole file; None if this object does not write it."""
        if self._lines is None:
            return None
        self.sync()
        return sha256_of(self._lines.path)

    def close(self) -> None:
        """Close the file."""
        if self._lines is not None:
            self._lines.close()
            self._lines = None


def _written(line: _Line) -> bytes:
    return with_checksum(msgspec.json.encode(line)[1:]) + b"\n"


def _lines_in(content: bytes, path: Path | None) -> list[_Line]:
    """Decode all complete lines. Raises RunFolderError for an invalid line."""
    found = []
    # A partial line that a kill has left has no line break.
    for number, text in enumerate(content.split(b"\n")[:-1], start=1):
        try:
            found.append(msgspec.json.decode(b"{" + without_checksum(text), type=_Line))
        except ValueError as error:
            raise RunFolderError(
                f"{path} is damaged: line {number}: {error}; restore it from a copy, or remove "
                "it: models are then not compared with digests"
            ) from error
    return found
