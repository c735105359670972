"""Persistent count of a run's noisy steps, charged on disk before the steps.

A run that is killed resumes from its newest checkpoint, and repeats the steps after it: with other
batches and other noise, which come from the system. Losses or metrics that were shown of the lost
steps have revealed information nevertheless. So steps are charged in advance, a block at a time, in
a file of the run folder:

    charge      {"charged": steps that may have been done}, synced, then the steps
    checkpoint  steps that were charged but not done are refunded
    resume      continues from the charged steps, which may exceed the checkpoint's steps

Steps take milliseconds, so a synced line for each, as in `dure.privacy.ledger` for rounds, would
take longer than the step. Without a folder no run can be resumed, and the count is in memory.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import msgspec

from dure.errors import RunFolderError
from dure.record.disk import write_atomically
from dure.record.seal import checksum
from dure.record.untrusted_files import contents

FILE = "privacy-steps.json"


class _Written(msgspec.Struct, forbid_unknown_fields=True):
    charged: Annotated[int, msgspec.Meta(ge=0, le=2**53)]
    checksum: str | None = None
    """CRC-32 of the number; None in files of dure up to 0.1."""

    @classmethod
    def of(cls, charged: int) -> _Written:
        return cls(charged, checksum(str(charged).encode()))


class StepCount:
    """Count of steps.

    folder: of the run; None for no file. block: number of steps charged at once. `spent` is the
    number of steps done, including steps lost in a crash. Raises RunFolderError for an invalid
    file, since an unreadable budget must not be reset.
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
                raise ValueError("its checksum does not match its content")
            return written.charged
        except (OSError, ValueError, msgspec.MsgspecError, RecursionError) as error:
            raise RunFolderError(
                f"{self._path} cannot be read ({error}): it counts the noised steps of the run, "
                "which cannot continue without it; restore it from a copy"
            ) from error

    def begin(self) -> None:
        """Charge the next step, on disk."""
        # On disk before the step: a crash may waste a block, but never hides a step.
        self.spent += 1
        if self.spent > self._charged:
            self._write(self.spent + self._block - 1)

    def settle(self) -> None:
        """Refund charged steps that were not done; called once a checkpoint has all done steps."""
        if self._charged != self.spent:
            self._write(self.spent)

    def restore(self, spent: int) -> None:
        """Continue from a checkpoint with `spent` steps, or from a larger charged number."""
        self.spent = max(spent, self._charged)

    def _write(self, charged: int) -> None:
        self._charged = charged
        if self._path is not None:
            write_atomically(self._path, msgspec.json.encode(_Written.of(charged)))
