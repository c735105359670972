"""How many noised steps a run has done, on the disk before they are done.

A run that is killed goes on from its newest checkpoint, and does the steps after it again: with
other batches and other noise, which come from the system. What was shown of the lost steps, losses
or metrics, has told something all the same. So steps are charged before they are done, a block at a
time, in a file of the run folder:

    charge      {"charged": steps that may have been done}, synced, then the steps
    checkpoint  what was charged and not done is given back
    resume      goes on from what was charged, which may be more than the checkpoint has done

Steps take milliseconds, so that a line on the disk for each, as `dure.privacy.ledger` has it for
rounds, would take longer than they do. Without a folder nothing can be resumed, and the count is
kept in memory.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import msgspec

from dure.errors import RunFolderError
from dure.record.disk import write_atomically
from dure.record.inside import contents
from dure.record.seal import checksum

FILE = "privacy-steps.json"


class _Written(msgspec.Struct, forbid_unknown_fields=True):
    charged: Annotated[int, msgspec.Meta(ge=0, le=2**53)]
    checksum: str | None = None
    """Of the number; files of dure up to 0.1 have none."""

    @classmethod
    def of(cls, charged: int) -> _Written:
        return cls(charged, checksum(str(charged).encode()))


class StepCount:
    """The count of steps. folder: of the run; None keeps nothing. block: steps charged at once.

    spent: steps done, by lost parts of the run too. Raises RunFolderError for a file that is no
    count: a budget that cannot be read is no new one.
    """

    def __init__(self, folder: Path | None, block: int) -> None:
        self._path = None if folder is None else folder / FILE
        self._block = block
        self._charged = self._read()
        self.spent = self._charged

    def _read(self) -> int:
        if self._path is None or not self._path.exists():
            return 0
        try:
            written = msgspec.json.decode(contents(self._path), type=_Written)
            if written.checksum not in (None, _Written.of(written.charged).checksum):
                raise ValueError("its checksum is not that of its content")
            return written.charged
        except (OSError, ValueError, msgspec.MsgspecError, RecursionError) as error:
            raise RunFolderError(
                f"{self._path} cannot be read ({error}): it counts the noised steps of the run, "
                f"which cannot go on without; put back a copy of it"
            ) from error

    def begin(self) -> None:
        """A step is about to be done: it is charged, on the disk."""
        self.spent += 1
        if self.spent > self._charged:
            self._write(self.spent + self._block - 1)

    def settle(self) -> None:
        """What was charged and not done is given back: a checkpoint has the rest."""
        if self._charged != self.spent:
            self._write(self.spent)

    def restore(self, spent: int) -> None:
        """Goes on from a checkpoint that has done so many steps, or from more that were charged."""
        self.spent = max(spent, self._charged)

    def _write(self, charged: int) -> None:
        self._charged = charged
        if self._path is not None:
            write_atomically(self._path, msgspec.json.encode(_Written.of(charged)))
