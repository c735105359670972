"""Memory in which the ranks of a host sum: shared with the peers, and used again from step to step.

What `empty_shared` returns is made sure of page by page, which takes as long as to sum it. The
shapes of a step are those of the last one: so memory whose last tensor is gone waits here for the
next one of its size.
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
"""Bytes that wait here at most; others go back to the pool."""


class Rooms:
    """Memory that waits, by its size."""

    def __init__(self) -> None:
        self._waiting: dict[int, list[Tensor]] = {}
        self._nbytes = 0

    def take(self, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        """An uninitialised tensor, whose memory comes back when its last view is gone."""
        nbytes = math.prod(shape) * dtype.itemsize
        if nbytes == 0:
            return torch.empty(tuple(shape), dtype=dtype)
        length = -(-nbytes // mmap.PAGESIZE) * mmap.PAGESIZE
        waiting = self._waiting.get(length)
        try:
            memory = waiting.pop() if waiting else None
        except IndexError:
            # Another thread took the last one after this one had looked.
            memory = None
        if memory is None:
            memory = empty_shared(length, dtype=torch.uint8)
        else:
            self._nbytes -= length
        # Tensors keep this block alive, and not `memory`, which comes back when the block is gone.
        block = (ctypes.c_char * nbytes).from_address(memory.data_ptr())
        # The finalizer holds `memory`; at the exit of the process nothing has to come back.
        weakref.finalize(block, self._back, os.getpid(), memory).atexit = False
        return torch.frombuffer(block, dtype=torch.uint8).view(dtype).view(tuple(shape))

    def _back(self, pid: int, memory: Tensor) -> None:
        # A forked child must not hand out what its parent uses.
        if pid == os.getpid() and self._nbytes + memory.nbytes <= MOST:
            self._nbytes += memory.nbytes
            self._waiting.setdefault(memory.nbytes, []).append(memory)

    def forget(self) -> None:
        """Lets go of all that waits here."""
        self._waiting = {}
        self._nbytes = 0


_rooms = Rooms()
# A forked child has a pool of its own, to which its parent's memory does not belong.
os.register_at_fork(after_in_child=_rooms.forget)


def room(shape: Sequence[int], like: Tensor, group: Group) -> Tensor:
    """Memory for what will be summed, of the dtype and device of `like`."""
    if group.size > 1 and like.device.type == "cpu" and group.backend(like.device) == "dure":
        return _rooms.take(shape, like.dtype)
    return like.new_empty(tuple(shape))
