"""Limit on the lists of ids that a run answers, and the secrets of an alignment, in files.

A sender of points of guessed ids learns the other side's matching ids. So each side answers a
single list of each other side in a run. The digest of a list is on disk before the list is
answered: the limit holds across reconnects and restarts. The same list may be sent again, as after
a crash; it stays the same list as long as its sender keeps its secret, until all have aligned.
"""

from __future__ import annotations

from pathlib import Path

import msgspec
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey

from dure.errors import StateError
from dure.record.disk import write_atomically
from dure.wire.key_files import load_or_create_key

MOST = 1
"""Maximum number of lists per sender that are answered in a run."""


class AlignmentQueries:
    """Lists of ids that were answered in a run.

    path: of the file; None keeps the digests in memory. most: maximum number of lists per sender.
    """

    def __init__(self, path: Path | None, most: int = MOST) -> None:
        self.path = path
        self.most = most
        self._asked: dict[str, list[str]] = {}
        if path is not None and path.exists():
            self._asked = _read(path)

    def ask(self, sender: str, digest: bytes) -> None:
        """Record a list that is about to be answered. Raises ValueError beyond the limit."""
        lists = self._asked.setdefault(sender, [])
        if digest.hex() in lists:
            return
        if len(lists) >= self.most:
            raise ValueError(
                f"{sender} sends another list of ids than before, but a run answers only "
                f"{self.most}: it has to use its former state folder"
            )
        lists.append(digest.hex())
        if self.path is not None:
            write_atomically(self.path, msgspec.json.encode(self._asked))


def secret_in(path: Path | None) -> bytes:
    """Return the secret in an owner-only file; create the file with a new secret if there is none.

    Raises ValueError for a file without a secret.
    """
    if path is None:
        return X25519PrivateKey.generate().private_bytes_raw()
    return load_or_create_key(path, X25519PrivateKey).private_bytes_raw()  # type: ignore[type-abstract]


def _read(path: Path) -> dict[str, list[str]]:
    try:
        return msgspec.json.decode(path.read_bytes(), type=dict[str, list[str]])
    except msgspec.DecodeError as error:
        raise StateError(f"{path} is damaged: {error}") from error
