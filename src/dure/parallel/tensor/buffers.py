"""Shared-memory buffers in which the ranks of a host sum, reused from step to step.

`empty_shared` reserves memory page by page, which takes as long as the sum itself. The shapes of a
step are usually those of the previous step. So memory is stored here after its last tensor is
freed, for the next tensor of its size.
"""

from __future__ import annotations

import ctypes
import math
import mmap
import os
import weakref
from collections.abc import Sequence

import torch
from torch import Tensor

from dure.collectives.group import Group
from dure.collectives.shared_memory.pool import empty_shared

MOST = 256 << 20
"""Largest number of bytes stored here; further memory returns to the pool."""


class SharedBuffers:
    """Free memory by size."""

    def __init__(self) -> None:
        self._waiting: dict[int, list[Tensor]] = {}
        self._nbytes = 0

    def take(self, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        """Return an uninitialised tensor; its memory returns here after its last view is freed."""
        nbytes = math.prod(shape) * dtype.itemsize
        if nbytes == 0:
            return torch.empty(tuple(shape), dtype=dtype)
        length = -(-nbytes // mmap.PAGESIZE) * mmap.PAGESIZE
        waiting = self._waiting.get(length)
        try:
            memory = waiting.pop() if waiting else None
        except IndexError:
            # Another thread took the last block after this thread's check.
            memory = None
        if memory is None:
            memory = empty_shared(length, dtype=torch.uint8)
        else:
            self._nbytes -= length
        # Tensors keep this block alive, and not `memory`, which is reused after the block is freed.
        block = (ctypes.c_char * nbytes).from_address(memory.data_ptr())
        # The finalizer keeps `memory` alive; at process exit there is nothing to reuse.
        weakref.finalize(block, self._back, os.getpid(), memory).atexit = False
        return torch.frombuffer(block, dtype=torch.uint8).view(dtype).view(tuple(shape))

    def _back(self, pid: int, memory: Tensor) -> None:
        # A forked child must not reuse memory that its parent uses.
        if pid == os.getpid() and self._nbytes + memory.nbytes <= MOST:
            self._nbytes += memory.nbytes
            self._waiting.setdefault(memory.nbytes, []).append(memory)

    def forget(self) -> None:
        """Free all stored memory."""
        self._waiting = {}
        self._nbytes = 0


_rooms = SharedBuffers()
# A forked child has a separate pool; its parent's memory does not belong to that pool.
os.register_at_fork(after_in_child=_rooms.forget)


def shared_buffer(shape: Sequence[int], like: Tensor, group: Group) -> Tensor:
    """Return a buffer for a sum over the group, with the dtype and device of `like`.

    The buffer is in shared memory if the group sums on the CPU with dure's own backend.
    """
    if group.size > 1 and like.device.type == "cpu" and group.backend(like.device) == "dure":
        return _rooms.take(shape, like.dtype)
    return like.new_empty(tuple(shape))
