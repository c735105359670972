"""What of a privacy budget is spent: a line before each noised release, and none is taken back.

    charge(7, rate 0.1, noise 1.2)      first this line is on the disk,
                                        then the noise of round 7 is drawn, then it is seen

So a process that dies in between has paid for something that nobody saw, and never the other way
round. Lines are only added. A run that goes on from an older checkpoint finds its ledger ahead and
goes on from there. Where noise is drawn from the run's seed (a simulation) the same round has the
same noise again, which tells nothing new and costs nothing; where it comes from the system, a round
that is done again is paid for again.

The file has one JSON object a line: {"number": 7, "rate": 0.1, "noise": 1.2, "times": 1,
"checksum": "1a2b3c4d"}, with the CRC-32 of the others. Lines of dure up to 0.1 have none.
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
from dure.record.disk import Lines, sync_folder
from dure.record.inside import contents
from dure.record.seal import checksum

FILE = "privacy.jsonl"
"""Its name in a run folder."""


class Entry(NamedTuple):
    """What was charged for a round or step."""

    number: int
    releases: Releases


class Ledger:
    """What was charged so far.

    delta: with which epsilon is said. folder: of the run, where it is written down; None keeps it
    in memory. repeats: whether the noise of a round is the same when it is drawn again. told: the
    epsilon of releases; by default of Gaussian ones, of a unit more or less. unit: what is charged.
    Raises RunFolderError for a file that is no ledger.
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
        self.entries: list[Entry] = []
        self._charged: set[int] = set()
        self._lines: Lines | None = None
        if folder is not None:
            path = folder / FILE
            self._lines = Lines(path)
            sync_folder(folder)
            self._take(_read(path))

    def charge(self, number: int, *releases: Releases) -> None:
        """Pays for a round, before its noise is drawn: on the disk when this returns."""
        if number in self._charged:
            if self.repeats:
                return
            warn(
                f"{self.unit} {number} was paid for already, and its noise is drawn anew, as of an "
                f"older copy of the run: it is paid for again"
            )
        self._add([Entry(number, one) for one in releases])

    @property
    def spent(self) -> list[Releases]:
        """All that was charged, counted by kind."""
        counted: dict[tuple[float, float], int] = {}
        for _, (rate, noise, times) in self.entries:
            counted[rate, noise] = counted.get((rate, noise), 0) + times
        return [Releases(rate, noise, times) for (rate, noise), times in counted.items()]

    def epsilon(self, *more: Releases) -> float:
        """What all that was charged tells of anybody; `more`: as if these were charged too."""
        return self._told([*self.spent, *more])

    def has(self, number: int) -> bool:
        """Whether this round was ever charged."""
        return number in self._charged

    def paid(self, number: int) -> bool:
        """Whether this round costs nothing any more."""
        return self.repeats and number in self._charged

    def state(self) -> list[list[Any]]:
        """What was charged, as a tree for checkpoints."""
        return [[one.number, *one.releases] for one in self.entries]

    def restore(self, state: Sequence[Sequence[Any]]) -> None:
        """Goes on from the larger of what is here and what the checkpoint says."""
        written = [Entry(number, Releases(*rest)) for number, *rest in state]
        # The file is ahead of each checkpoint, unless somebody has removed it.
        self._add(written[len(self.entries) :])

    def close(self) -> None:
        """Nothing more is charged."""
        if self._lines is not None:
            self._lines.close()
            self._lines = None

    def _add(self, entries: Sequence[Entry]) -> None:
        if self._lines is not None and entries:
            text = "".join(_written(one) + "\n" for one in entries)
            self._lines.add(text.encode())
            self._lines.sync()
        self._take(entries)

    def _take(self, entries: Sequence[Entry]) -> None:
        self.entries += entries
        self._charged.update([one.number for one in entries])


class _Line(msgspec.Struct):
    """What the file says of a round: nothing else could have been charged."""

    number: Annotated[int, msgspec.Meta(ge=0, le=2**53)]
    rate: Annotated[float, msgspec.Meta(ge=0, le=1)]
    noise: Annotated[float, msgspec.Meta(ge=0)]
    times: Annotated[int, msgspec.Meta(ge=0, le=2**53)]
    checksum: str | None = None

    def entry(self) -> Entry:
        """Raises ValueError for a line that is not as it was written."""
        entry = Entry(self.number, Releases(self.rate, self.noise, self.times))
        if self.checksum not in (None, _sum(_said(entry))):
            raise ValueError("its checksum is not that of its content")
        return entry


def _written(entry: Entry) -> str:
    said = _said(entry)
    return json.dumps({**said, "checksum": _sum(said)})


def _said(entry: Entry) -> dict[str, float]:
    # A whole number may come back as one of floating point, or the other way round.
    rate, noise, times = entry.releases
    return {
        "number": entry.number,
        "rate": float(rate),
        "noise": float(noise),
        "times": times,
    }


def _sum(said: dict[str, float]) -> str:
    return checksum(json.dumps(said).encode())


def _read(path: Path) -> list[Entry]:
    found = []
    for place, line in enumerate(contents(path).splitlines(), 1):
        try:
            found.append(msgspec.json.decode(line, type=_Line).entry())
        except (ValueError, msgspec.DecodeError, RecursionError) as error:
            raise RunFolderError(
                f"{path}, line {place}, is no line of a privacy ledger: what was spent is not "
                f"known, and the run cannot go on; take the file from a backup"
            ) from error
    return found
