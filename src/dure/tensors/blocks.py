"""Large blocks of memory that are used again.

What the C library gives back to the system costs a fault for each of its pages when it is asked for
anew: of 40 MB as much time as to copy them. Blocks of a megabyte and more are kept here, and used
again once nobody has a tensor of them.
"""

from __future__ import annotations

import ctypes
import weakref
from functools import lru_cache

import torch
from torch import Tensor

LARGE = 1 << 20
"""Bytes from which memory is kept; the C library keeps less by itself."""
_KEPT = 4
"""Blocks that wait to be used again, at most."""


class Blocks:
    """Memory for tensors of the CPU that come and go."""

    def __init__(self) -> None:
        self._free: list[bytearray] = []

    def empty(self, nbytes: int) -> Tensor:
        """An uninitialised tensor of so many bytes; its memory comes back when it is gone."""
        if nbytes < LARGE:
            return torch.empty(nbytes, dtype=torch.uint8)
        fits = [block for block in self._free if len(block) == nbytes]
        block = fits[0] if fits else bytearray(nbytes)
        self._free = [one for one in self._free if one is not block]
        # Views outlive tensors: what all of them keep is this.
        held = _held(nbytes).from_buffer(block)
        weakref.finalize(held, self._back, block).atexit = False
        return torch.frombuffer(held, dtype=torch.uint8)

    def copy(self, tensor: Tensor) -> Tensor:
        """A contiguous copy of a tensor."""
        if tensor.nbytes < LARGE:
            return tensor.clone()
        return self.empty(tensor.nbytes).view(tensor.dtype).view(tensor.shape).copy_(tensor)

    def _back(self, block: bytearray) -> None:
        self._free = [*self._free, block][-_KEPT:]


@lru_cache(64)
def _held(nbytes: int) -> type[ctypes.Array[ctypes.c_char]]:
    """A kind of buffer that weak references can be made to. Making one is slow."""
    return type("Held", (ctypes.c_char * nbytes,), {})
