"""Pool of large memory blocks that are reused.

The C library returns large freed blocks to the system. The next allocation then costs a page fault
for every page: for 40 MB as much time as copying them. Blocks of 1 MB and more stay in this pool
and are reused after the last tensor that uses them is gone.
"""

from __future__ import annotations

import ctypes
import weakref
from functools import lru_cache

import torch
from torch import Tensor

LARGE = 1 << 20
"""Bytes from which a block is pooled; the C library keeps smaller blocks by itself."""
_KEPT = 4
"""Maximum number of free blocks in the pool."""


class BlockAllocator:
    """Allocator of short-lived CPU tensors."""

    def __init__(self) -> None:
        self._free: list[bytearray] = []

    def empty(self, nbytes: int) -> Tensor:
        """Return an uninitialised uint8 tensor of `nbytes` bytes.

        The memory returns to the pool after the last tensor that uses the memory is gone.
        """
        if nbytes < LARGE:
            return torch.empty(nbytes, dtype=torch.uint8)
        fits = [block for block in self._free if len(block) == nbytes]
        block = fits[0] if fits else bytearray(nbytes)
        self._free = [one for one in self._free if one is not block]
        # Views may outlive the tensor; all of them keep this buffer alive.
        held = _held(nbytes).from_buffer(block)
        weakref.finalize(held, self._back, block).atexit = False
        return torch.frombuffer(held, dtype=torch.uint8)

    def copy(self, tensor: Tensor) -> Tensor:
        """Return a contiguous copy of a tensor."""
        if tensor.nbytes < LARGE:
            return tensor.clone()
        return self.empty(tensor.nbytes).view(tensor.dtype).view(tensor.shape).copy_(tensor)

    def _back(self, block: bytearray) -> None:
        self._free = [*self._free, block][-_KEPT:]


@lru_cache(64)
def _held(nbytes: int) -> type[ctypes.Array[ctypes.c_char]]:
    """Return a buffer type that supports weak references.

    Cached, because creating a type is slow.
    """
    return type("Held", (ctypes.c_char * nbytes,), {})
