"""Lists of ids that others ask about in a run, and the secrets of an alignment: in files.

Who sends points of ids that it guesses learns which of them the other side has. So each side
answers one list of each other side in a run. The digest of a list is on the disk before it is
answered: the bound holds when somebody comes again, and when this side is started anew. The same
list may be sent again, as after a crash; it is the same one as long as its sender has its secret,
which it keeps until all have aligned.
"""

from __future__ import annotations

from pathlib import Path

import msgspec
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey

from dure.errors import StateError
from dure.record.disk import write_atomically
from dure.wire.key_files import kept_in

MOST = 1
"""Lists of each sender that are answered in a run."""


class Queries:
    """Of one run. path: of the file; None keeps them in memory. most: lists of each sender."""

    def __init__(self, path: Path | None, most: int = MOST) -> None:
        self.path = path
        self.most = most
        self._asked: dict[str, list[str]] = {}
        if path is not None and path.exists():
            self._asked = _read(path)

    def ask(self, sender: str, digest: bytes) -> None:
        """Note a list that is about to be answered. Raises ValueError for one too many."""
        lists = self._asked.setdefault(sender, [])
        if digest.hex() in lists:
            return
        if len(lists) >= self.most:
            raise ValueError(
                f"{sender} asks about another list of ids than before, and a run answers "
                f"{self.most}: it has to go on with the state folder that it had"
            )
        lists.append(digest.hex())
        if self.path is not None:
            write_atomically(self.path, msgspec.json.encode(self._asked))


def secret_in(path: Path | None) -> bytes:
    """The secret of a file that only its owner may read; a new one where there is no file.

    Raises ValueError for a file that is none.
    """
    if path is None:
        return X25519PrivateKey.generate().private_bytes_raw()
    return kept_in(path, X25519PrivateKey).private_bytes_raw()  # type: ignore[type-abstract]


def _read(path: Path) -> dict[str, list[str]]:
    try:
        return msgspec.json.decode(path.read_bytes(), type=dict[str, list[str]])
    except msgspec.DecodeError as error:
        raise StateError(f"{path} is damaged: {error}") from error
