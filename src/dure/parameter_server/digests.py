"""Lists of rows by their digest: a list that a server has been sent before costs 8 bytes.

    digest    BLAKE2b of the rows as 8 bytes each, little-endian, to 8 bytes

A server remembers the newest lists of each worker, and asks for those that it does not know.

Source: Li et al. 2014, section 4.2 (key caching).
"""

from __future__ import annotations

import hashlib
from collections import OrderedDict
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

MOST = 16
"""Lists that a server remembers of each worker."""


def digest_of(rows: Tensor | None) -> Tensor | None:
    """The digest of rows, as one number; None where it would be no shorter than they are."""
    if rows is None or len(rows) < 2:
        return None
    data = rows.numpy().astype("<i8", copy=False).tobytes()
    value = hashlib.blake2b(data, digest_size=8).digest()
    return torch.tensor([int.from_bytes(value, "little", signed=True)])


class Lists:
    """The lists that one shard has been sent."""

    def __init__(self) -> None:
        self._lists: dict[int, OrderedDict[int, Tensor]] = {}

    def keep(self, worker: int, rows: Tensor) -> None:
        """Remembers a list of a worker, and forgets the one that was used longest ago."""
        digest = digest_of(rows)
        if digest is not None:
            own = self._lists.setdefault(worker, OrderedDict())
            # A copy: the worker may write other rows into that memory.
            own[int(digest)] = rows.clone()
            own.move_to_end(int(digest))
            if len(own) > MOST:
                own.popitem(last=False)

    def known_to(self, worker: int) -> dict[int, None]:
        """The digests of a worker's lists, the one that was used last at the end."""
        return dict.fromkeys(self._lists.get(worker, ()))

    def state(self) -> dict[int, list[Tensor]]:
        """The lists of each worker."""
        return {worker: list(own.values()) for worker, own in self._lists.items()}

    def restore(self, state: Mapping[int, Sequence[Tensor]]) -> None:
        """Takes copies of what `state` gave."""
        for worker, lists in state.items():
            for rows in lists:
                self.keep(worker, rows)

    def find(self, worker: int, digest: Tensor) -> Tensor | None:
        """The list of a digest; None where it is not known."""
        own = self._lists.get(worker)
        if own is None or int(digest) not in own:
            return None
        own.move_to_end(int(digest))
        return own[int(digest)]
