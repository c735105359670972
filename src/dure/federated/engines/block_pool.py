"""Memory pool for results, reused once no caller has a reference.

New memory costs a page fault for every 4 kB, which for the updates of small models takes as long as
computing them. A tensor is free if this list alone refers to its storage, whatever views of it
existed.
"""

from __future__ import annotations

import torch
from torch import Tensor

MOST = 4
"""Number of stored blocks; a caller with more live results gets new memory."""


class BlockPool:
    """Pool of blocks of rows."""

    def __init__(self) -> None:
        self._blocks: list[Tensor] = []

    def take(self, rows: int, columns: int, like: Tensor) -> Tensor:
        """Return a tensor of shape (rows, columns) without other users; its content is arbitrary.

        like: tensor with the wanted dtype and device.
        """
        # A use count of 1: only this list refers to the storage, so that no view of it is left.
        for block in self._blocks:
            fits = len(block) >= rows and block.dtype == like.dtype and block.shape[1] == columns
            if fits and _users(block) == 1:
                return block[:rows]
        fresh = like.new_empty(rows, columns)
        if _COUNT is not None:
            # Free blocks that are too small are dropped; blocks in use stay listed, for later
            # reuse.
            self._blocks = [
                *(block for block in self._blocks if len(block) >= rows or _users(block) > 1),
                fresh,
            ][-MOST:]
        return fresh[:rows]


# A private function: if a torch version lacks it, memory is always new.
_COUNT = getattr(torch._C, "_storage_Use_Count", None)


def _users(block: Tensor) -> int:
    assert _COUNT is not None
    return int(_COUNT(block.untyped_storage()._cdata))
