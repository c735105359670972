"""Files of results computed once: trees of plain values and tensors, each with a number.

    NUMBER.safetensors    the tensors; the rest of the tree is JSON in the file's metadata

A file is complete and synced before the journal names it, with its SHA-256. An unnamed file that a
kill has left does not count: its number is reused, and the file overwritten.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Collection, Iterable, Iterator
from pathlib import Path
from typing import Any

from dure.errors import RunFolderError
from dure.record.checkpoint import UNREADABLE, pack_tree, unpack_tree
from dure.record.disk import Piece, disk_errors, sync_folder, write_atomically
from dure.record.untrusted_files import LARGE, contents
from dure.record.weights import TensorFile, weights_from_bytes

_TREE = "tree"
"""Metadata key of a tree without its tensors."""

_ENDING = ".safetensors"


class TreeFiles:
    """Tree files in `folder`, which the first write creates."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def write(self, number: int, tree: dict[str, Any]) -> str:
        """Write a tree durably, and return the SHA-256 of its file.

        Raises TypeError for values that checkpoints do not support either, and RunFolderWriteError.
        """
        packed, tensors = pack_tree(tree)
        pieces = _Hashed(TensorFile(tensors, {_TREE: json.dumps(packed)}))
        if not self.folder.is_dir():
            with disk_errors(self.folder):
                self.folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            sync_folder(self.folder.parent)
        write_atomically(self._path(number), pieces)
        return pieces.digest.hexdigest()

    def read(self, number: int, digest: str) -> dict[str, Any]:
        """Read the tree from the file with this SHA-256.

        Raises RunFolderError, which names the file, if it is missing or has another digest.
        """
        path = self._path(number)
        try:
            content = contents(path, most=LARGE)
        except OSError as error:
            raise RunFolderError(
                f"cannot read {path}, which the journal names: {error.strerror}: restore it from "
                "a copy"
            ) from error
        if hashlib.sha256(content).hexdigest() != digest:
            raise RunFolderError(
                f"{path} is damaged: it differs from the journal: restore it from a copy"
            )
        try:
            tree: dict[str, Any] = unpack_tree(_tree_in(content), weights_from_bytes(content))
        except UNREADABLE as error:
            raise RunFolderError(f"{path} does not contain a tree: {error}") from error
        return tree

    def delete(self, numbers: Collection[int]) -> None:
        """Delete the existing files with these numbers. Raises RunFolderWriteError."""
        for number in numbers:
            with disk_errors(self._path(number)):
                self._path(number).unlink(missing_ok=True)

    def delete_from(self, number: int) -> None:
        """Delete the files from this number on, and incomplete files."""
        self.delete([one for one in self._there() if one >= number])
        for half in self.folder.glob(f".*{_ENDING}.*"):
            with disk_errors(half):
                half.unlink(missing_ok=True)

    def keep_only(self, numbers: Collection[int]) -> None:
        """Delete all files except those with these numbers."""
        self.delete(set(self._there()) - set(numbers))

    def _there(self) -> Iterator[int]:
        for path in self.folder.glob(f"*{_ENDING}"):
            if path.stem.isdecimal():
                yield int(path.stem)

    def _path(self, number: int) -> Path:
        return self.folder / f"{number}{_ENDING}"


class _Hashed:
    """Pieces of a file on their way to the disk; `digest` covers the pieces taken so far."""

    def __init__(self, pieces: Iterable[Piece]) -> None:
        self._pieces = pieces
        self.digest = hashlib.sha256()

    def __iter__(self) -> Iterator[Piece]:
        for piece in self._pieces:
            self.digest.update(piece)
            yield piece


def _tree_in(content: bytes) -> Any:
    """Return a tree without its tensors."""
    length = int.from_bytes(content[:8], "little")
    return json.loads(json.loads(content[8 : 8 + length])["__metadata__"][_TREE])
