"""Memory for results that is used again once nobody has any of it.

Fresh memory costs a page fault for every 4 kB, which for the updates of small models is as long as
computing them. A tensor whose storage has no other user than this list is free, whatever views of
it there have been.
"""

from __future__ import annotations

import torch
from torch import Tensor

MOST = 4
"""Blocks that are kept; a caller that holds more results than that gets fresh ones."""


class Memory:
    """Blocks of rows."""

    def __init__(self) -> None:
        self._blocks: list[Tensor] = []

    def take(self, rows: int, columns: int, like: Tensor) -> Tensor:
        """A tensor of shape (rows, columns) that nobody else has; its content is anything.

        like: of its kind.
        """
        # One user: the storage is held by this list alone, so that no view of it is left anywhere.
        for block in self._blocks:
            fits = len(block) >= rows and block.dtype == like.dtype and block.shape[1] == columns
            if fits and _users(block) == 1:
                return block[:rows]
        fresh = like.new_empty(rows, columns)
        if _COUNT is not None:
            # Blocks that are too small and free go; those in use stay known, to be used again
            # later.
            self._blocks = [
                *(block for block in self._blocks if len(block) >= rows or _users(block) > 1),
                fresh,
            ][-MOST:]
        return fresh[:rows]


# Not public: where torch has it no more, memory is fresh every time.
_COUNT = getattr(torch._C, "_storage_Use_Count", None)


def _users(block: Tensor) -> int:
    assert _COUNT is not None
    return int(_COUNT(block.untyped_storage()._cdata))
