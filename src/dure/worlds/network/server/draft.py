"""What a sum has come to, for a server that is killed before it is there.

    NUMBER.safetensors    a tree (`trees.py`)        NUMBER.sha256    its digest

In a folder of its own beside what was made once, for the one number that is being made. The journal
does not name it: it is used by the next life of the server, and is nothing once the sum is there.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

from dure.errors import RunFolderError
from dure.record.disk import patiently, told, write_atomically
from dure.record.inside import contents
from dure.worlds.network.trees import Trees

DRAFT = "draft"
"""The folder, in that of what was made once."""


class DraftFile:
    """The draft in `folder`. number: of what is being made."""

    def __init__(self, folder: Path, number: Callable[[], int]) -> None:
        self._trees = Trees(folder)
        self._folder = folder
        self._number = number

    def kept(self) -> dict[str, Any] | None:
        """The tree; None where there is none, or it is damaged: then the sum is begun again."""
        number = self._number()
        with suppress(OSError, RunFolderError):
            return self._trees.read(number, contents(self._digest(number)).decode())
        return None

    def keep(self, tree: dict[str, Any]) -> None:
        """Raises RunFolderWriteError."""
        number = self._number()
        digests: list[str] = []
        patiently(lambda: digests.append(self._trees.write(number, tree)))
        patiently(lambda: write_atomically(self._digest(number), digests[-1].encode()))

    def over(self) -> None:
        """Removes it. Raises RunFolderWriteError."""
        for digest in self._folder.glob("*.sha256"):
            with told(digest):
                digest.unlink(missing_ok=True)
        self._trees.keep_only([])

    def _digest(self, number: int) -> Path:
        return self._folder / f"{number}.sha256"
