"""Digests of row lists: a repeated list costs 8 bytes.

    digest    BLAKE2b of the rows as 8 bytes each, little-endian, to 8 bytes

A server caches the newest lists of each worker, and requests the rows of an unknown digest.

Source: Li et al. 2014, section 4.2 (key caching).
"""

from __future__ import annotations

import hashlib
from collections import OrderedDict
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

MOST = 16
"""Number of cached lists of each worker."""


def digest_of(rows: Tensor | None) -> Tensor | None:
    """Return the digest of rows, int64 of shape (1,); None for lists that are no longer than it."""
    if rows is None or len(rows) < 2:
        return None
    data = rows.numpy().astype("<i8", copy=False).tobytes()
    value = hashlib.blake2b(data, digest_size=8).digest()
    return torch.tensor([int.from_bytes(value, "little", signed=True)])


class KnownRowLists:
    """Cache of the row lists that a shard has received."""

    def __init__(self) -> None:
        self._lists: dict[int, OrderedDict[int, Tensor]] = {}

    def keep(self, worker: int, rows: Tensor) -> None:
        """Cache a list of a worker, and drop the least recently used list."""
        digest = digest_of(rows)
        if digest is not None:
            own = self._lists.setdefault(worker, OrderedDict())
            # A copy, since the worker may overwrite that memory.
            own[int(digest)] = rows.clone()
            own.move_to_end(int(digest))
            if len(own) > MOST:
                own.popitem(last=False)

    def known_to(self, worker: int) -> dict[int, None]:
        """Return the digests of a worker's lists, the most recently used last."""
        return dict.fromkeys(self._lists.get(worker, ()))

    def state(self) -> dict[int, list[Tensor]]:
        """Return the lists of each worker."""
        return {worker: list(own.values()) for worker, own in self._lists.items()}

    def restore(self, state: Mapping[int, Sequence[Tensor]]) -> None:
        """Restore copies of the lists in `state`."""
        for worker, lists in state.items():
            for rows in lists:
                self.keep(worker, rows)

    def find(self, worker: int, digest: Tensor) -> Tensor | None:
        """Return the list of a digest; None if unknown."""
        own = self._lists.get(worker)
        if own is None or int(digest) not in own:
            return None
        own.move_to_end(int(digest))
        return own[int(digest)]
