"""The digests of a run's models, one after another: what later ones are compared with.

    models.jsonl    {"checksum":"1a2b3c4d","model":3,"of":"sent","sha256":"…"}, a line a model

`of` is "sent" for the stream that clients fetched to train from, whose SHA-256 the server has at
hand, and "made" for the weights and buffers of a model that nobody trained from, the last one among
them. The checksum is the CRC-32 of the line after it.

A server that goes on after a kill makes models again, and so does a replay: each is compared with
its line. So nothing that is damaged, or computes otherwise, gives other models unnoticed. The lines
are not synced one by one: a power failure may take the newest, which are then written again.
"""

from __future__ import annotations

from pathlib import Path
from typing import Literal

import msgspec

from dure.errors import RunFolderError, RunFolderWriteError, warn
from dure.record.disk import Lines, patiently
from dure.record.inside import LARGE, contents
from dure.record.seal import sha256_of, with_checksum, without_checksum

FILE = "models.jsonl"
"""Its name in a run folder."""

Of = Literal["sent", "made"]


class _Line(msgspec.Struct, frozen=True):
    model: int
    of: Of
    sha256: str


class ModelDigests:
    """The digests of one run's models. path: None keeps them in memory.

    met: the numbers of models that this process has made. compared: those of them that had a line.
    differ: those of them whose line has another digest.

    Raises RunFolderError for a damaged file.
    """

    def __init__(self, path: Path | None, writes: bool = True) -> None:
        self._path = path
        self._lines: Lines | None = None
        there = path is not None and path.is_file()
        content = contents(path, most=LARGE) if path is not None and there else b""
        self.there = there
        """Whether an earlier process has written them."""
        self._known = {(one.model, one.of): one.sha256 for one in _lines_in(content, path)}
        self.met: set[int] = set()
        self.compared: set[int] = set()
        self.differ: list[int] = []
        if path is not None and writes:
            self._lines = Lines(path)

    @property
    def newest(self) -> int:
        """The number of the newest model that is known; 0 without."""
        return max((model for model, _ in self._known), default=0)

    def note(self, model: int, of: Of, sha256: str) -> None:
        """Compare a model with its line, or write its line.

        Warns of the first model that differs. Raises RunFolderWriteError.
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

    def _add(self, lines: Lines, line: bytes) -> None:
        try:
            lines.add(line)
        except RunFolderWriteError:
            # It waits there, and is written by a call without lines.
            patiently(lambda: lines.add(b""))

    def _differs(self, model: int) -> None:
        if not self.differ:
            warn(
                f"model {model} has other bits than the one of which {self._path} has the digest: "
                f"this machine computes otherwise than the one before, or a file of the run has "
                f"changed"
            )
        self.differ.append(model)

    def sync(self) -> None:
        """Write what was noted to the disk. Raises RunFolderWriteError."""
        if self._lines is not None:
            self._lines.sync()

    def sha256(self) -> str | None:
        """SHA-256 of the whole file; None where it is not written here."""
        if self._lines is None:
            return None
        self.sync()
        return sha256_of(self._lines.path)

    def close(self) -> None:
        """Nothing more is noted."""
        if self._lines is not None:
            self._lines.close()
            self._lines = None


def _written(line: _Line) -> bytes:
    return with_checksum(msgspec.json.encode(line)[1:]) + b"\n"


def _lines_in(content: bytes, path: Path | None) -> list[_Line]:
    """All whole lines. Raises RunFolderError for one that is not as it was written."""
    found = []
    # What a kill cut off at the end has no line break.
    for number, text in enumerate(content.split(b"\n")[:-1], start=1):
        try:
            found.append(msgspec.json.decode(b"{" + without_checksum(text), type=_Line))
        except ValueError as error:
            raise RunFolderError(
                f"{path} is damaged: line {number}: {error}; put back a copy of it, or remove it: "
                f"then models are compared with no digests"
            ) from error
    return found
