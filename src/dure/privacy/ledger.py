"""Ledger of the spent privacy budget: a line before each noisy release, never removed.

    charge(7, rate 0.1, noise 1.2)      first this line is on the disk,
                                        then the noise of round 7 is drawn, then it is released

So a process that dies in between has paid for a release that no observer saw, and never the other
way round. Lines are only appended. A run that resumes from an older checkpoint finds its ledger
ahead and continues from the ledger. If noise follows from the run's seed (a simulation), the same
round has the same noise again, which reveals nothing new and costs nothing; if noise comes from the
system, a repeated round is charged again.

The file has a JSON object per line: {"number": 7, "rate": 0.1, "noise": 1.2, "times": 1,
"checksum": "1a2b3c4d"}, with the CRC-32 of the other fields. Lines of dure up to 0.1 have no
checksum.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import msgspec

from dure.errors import RunFolderError, warn
from dure.privacy.accountant import Releases, epsilon
from dure.record.disk import LineFile, sync_folder
from dure.record.seal import checksum
from dure.record.untrusted_files import contents

FILE = "privacy.jsonl"
"""Name of the file in a run folder."""


class LedgerEntry(NamedTuple):
    """Charge for a round or step."""

    number: int
    releases: Releases


class Ledger:
    """Charges so far.

    Args:
        delta: delta of the stated epsilon.
        folder: folder of the run; None keeps the charges in memory.
        repeats: whether a repeated round has the same noise.
        told: returns the epsilon of releases; by default of Gaussian releases, for a unit added or
            removed.
        unit: name of the charged unit.

    Raises:
        RunFolderError: the file is not a valid ledger.
    """

    def __init__(
        self,
        delta: float,
        folder: Path | None = None,
        repeats: bool = False,
        told: Callable[[Sequence[Releases]], float] | None = None,
        unit: str = "round",
    ) -> None:
        self.delta = delta
        self.repeats = repeats
        self.unit = unit
        self._told = told if told is not None else partial(epsilon, delta=delta)
        self.entries: list[LedgerEntry] = []
        self._charged: set[int] = set()
        self._lines: LineFile | None = None
        if folder is not None:
            path = folder / FILE
            self._lines = LineFile(path)
            sync_folder(folder)
            self._take(_read(path))

    def charge(self, number: int, *releases: Releases) -> None:
        """Charge a round before its noise is drawn; the charge is on disk when this returns."""
        if number in self._charged:
            if self.repeats:
                return
            warn(
                f"{self.unit} {number} is already in the ledger and its noise is drawn again, as "
                "in an older copy of the run: its epsilon is counted again"
            )
        self._add([LedgerEntry(number, one) for one in releases])

    @property
    def spent(self) -> list[Releases]:
        """All charges, grouped by kind."""
        counted: dict[tuple[float, float], int] = {}
        for _, (rate, noise, times) in self.entries:
            counted[rate, noise] = counted.get((rate, noise), 0) + times
        return [Releases(rate, noise, times) for (rate, noise), times in counted.items()]

    def epsilon(self, *more: Releases) -> float:
        """Return the epsilon of all charges, and of `more` if these were charged too."""
        return self._told([*self.spent, *more])

    def has(self, number: int) -> bool:
        """Return whether this round was ever charged."""
        return number in self._charged

    def paid(self, number: int) -> bool:
        """Return whether a repetition of this round costs nothing."""
        return self.repeats and number in self._charged

    def state(self) -> list[list[Any]]:
        """Return the charges as a tree for checkpoints."""
        return [[one.number, *one.releases] for one in self.entries]

    def restore(self, state: Sequence[Sequence[Any]]) -> None:
        """Continue from the longer of this ledger and the checkpoint's."""
        written = [LedgerEntry(number, Releases(*rest)) for number, *rest in state]
        # The file is ahead of each checkpoint, unless the file was removed.
        self._add(written[len(self.entries) :])

    def close(self) -> None:
        """Close the file; no charges may follow."""
        if self._lines is not None:
            self._lines.close()
            self._lines = None

    def _add(self, entries: Sequence[LedgerEntry]) -> None:
        if self._lines is not None and entries:
            text = "".join(_written(one) + "\n" for one in entries)
            self._lines.add(text.encode())
            self._lines.sync()
        self._take(entries)

    def _take(self, entries: Sequence[LedgerEntry]) -> None:
        self.entries += entries
        self._charged.update([one.number for one in entries])


class _Line(msgspec.Struct, forbid_unknown_fields=True):
    """Line of the file for a round; the bounds exclude impossible charges.

    A misspelled `checksum` is an unknown field, and not a line without a checksum.
    """

    number: Annotated[int, msgspec.Meta(ge=0, le=2**53)]
    rate: Annotated[float, msgspec.Meta(ge=0, le=1)]
    noise: Annotated[float, msgspec.Meta(ge=0)]
    times: Annotated[int, msgspec.Meta(ge=0, le=2**53)]
    checksum: str | None = None

    def entry(self) -> LedgerEntry:
        """Return the charge. Raises ValueError for a line with a wrong checksum."""
        entry = LedgerEntry(self.number, Releases(self.rate, self.noise, self.times))
        if self.checksum not in (None, _sum(_said(entry))):
            raise ValueError("its checksum does not match its content")
        return entry


def _written(entry: LedgerEntry) -> str:
    said = _said(entry)
    return json.dumps({**said, "checksum": _sum(said)})


def _said(entry: LedgerEntry) -> dict[str, float]:
    # JSON may return an integer as a float, or vice versa: normalise before the checksum.
    rate, noise, times = entry.releases
    return {
        "number": entry.number,
        "rate": float(rate),
        "noise": float(noise),
        "times": times,
    }


def _sum(said: dict[str, float]) -> str:
    return checksum(json.dumps(said).encode())


def _read(path: Path) -> list[LedgerEntry]:
    found = []
    for place, line in enumerate(contents(path).splitlines(), 1):
        try:
            found.append(msgspec.json.decode(line, type=_Line).entry())
        except (ValueError, msgspec.DecodeError, RecursionError) as error:
            raise RunFolderError(
                f"{path}, line {place}, is not a line of a privacy ledger: the spent budget is "
                "unknown, and the run cannot continue; restore the file from a backup"
            ) from error
    return found
