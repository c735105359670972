"""Draft of a sum: its partial result, for a server that is killed before the sum is complete.

    NUMBER.safetensors    a tree (`tree_files.py`)   NUMBER.sha256    its digest

The draft has its own folder next to the results computed once, and belongs to the single number in
progress. The journal does not name it: the next process of the server uses it, and it is deleted
once the sum is complete.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

from dure.deploy.tree_files import TreeFiles
from dure.errors import RunFolderError
from dure.record.disk import disk_errors, retry_write, write_atomically
from dure.record.untrusted_files import contents

DRAFT = "draft"
"""Name of the draft's folder."""


class DraftFile:
    """Draft in `folder`. `number` returns the number of the result in progress."""

    def __init__(self, folder: Path, number: Callable[[], int]) -> None:
        self._trees = TreeFiles(folder)
        self._folder = folder
        self._number = number

    def kept(self) -> dict[str, Any] | None:
        """Return the tree; None if it is missing or damaged, in which case the sum starts again."""
        number = self._number()
        with suppress(OSError, RunFolderError):
            return self._trees.read(number, contents(self._digest(number)).decode())
        return None

    def keep(self, tree: dict[str, Any]) -> None:
        """Store the tree. Raises RunFolderWriteError."""
        number = self._number()
        digests: list[str] = []
        retry_write(lambda: digests.append(self._trees.write(number, tree)))
        retry_write(lambda: write_atomically(self._digest(number), digests[-1].encode()))

    def over(self) -> None:
        """Delete the draft. Raises RunFolderWriteError."""
        for digest in self._folder.glob("*.sha256"):
            with disk_errors(digest):
                digest.unlink(missing_ok=True)
        self._trees.keep_only([])

    def _digest(self, number: int) -> Path:
        return self._folder / f"{number}.sha256"
