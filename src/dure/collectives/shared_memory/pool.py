"""Tensors in shared memory: tensors of `empty_shared` are reduced in place, without copies.

A process has a pool: a file without a name (memfd), as large as the machine's memory and empty
until touched, so that it can grow without another mapping. Peers on the host open it by
/proc/<pid>/fd/<n> and map it once. It disappears with the last process that maps it, however that
process ends.
"""

from __future__ import annotations

import bisect
import contextlib
import ctypes
import math
import mmap
import os
import threading
import weakref
from collections.abc import Sequence
from functools import lru_cache

import torch
from torch import Tensor

_PAGE = mmap.PAGESIZE
_NO_RESERVE = 0x4000  # MAP_NORESERVE: the mapping is address space, not memory
_POPULATE = 23  # MADV_POPULATE_WRITE
_PUNCH_FROM = 1 << 24  # bytes from which memory goes back to the system; less is used again soon
_MOST = 256 << 30  # so that the pools of hundreds of ranks fit into one address space


class SharedMapping:
    """Shared mapping of a file: its address, its bytes, and a tensor over them."""

    def __init__(self, descriptor: int, nbytes: int) -> None:
        self.nbytes = nbytes
        self.memory = mmap.mmap(descriptor, nbytes, flags=mmap.MAP_SHARED | _NO_RESERVE)
        self.address = ctypes.addressof(ctypes.c_char.from_buffer(self.memory))

    def tensor(self) -> Tensor:
        """Return the whole mapping as uint8; the tensor keeps the mapping alive."""
        return torch.frombuffer(self.memory, dtype=torch.uint8)


def open_of(pid: int, descriptor: int, flags: int = os.O_RDWR) -> int:
    """Open the file that another process of this host has as `descriptor`; return a descriptor.

    Raises OSError if that is not permitted.
    """
    return os.open(f"/proc/{pid}/fd/{descriptor}", flags | os.O_CLOEXEC)


class SharedMemoryPool:
    """Shared memory of this process, and its free ranges.

    `allocate` and `release` may be called from any thread.
    """

    def __init__(self) -> None:
        wanted = min(_MOST, os.sysconf("SC_PHYS_PAGES") * _PAGE)
        self.descriptor = os.memfd_create("dure-pool")
        while True:
            try:
                os.ftruncate(self.descriptor, wanted)
                self.mapping = SharedMapping(self.descriptor, wanted)
                break
            except (OSError, ValueError):  # less address space than memory, by some limit
                if wanted < 1 << 26:
                    raise
                wanted //= 2
        self.nbytes = self.mapping.nbytes
        self.address = self.mapping.address
        self._free = [(0, self.nbytes)]  # offset and length, in order, never adjacent
        self._used: set[int] = set()
        self._pinned: set[int] = set()
        # Reentrant: a tensor may be collected, and so released, in the middle of `allocate`.
        self._lock = threading.RLock()

    def offset(self, address: int, nbytes: int) -> int | None:
        """Return the offset of a piece of memory in the pool; None if it is not in the pool."""
        offset = address - self.address
        return offset if offset >= 0 and offset + nbytes <= self.nbytes else None

    def allocate(self, nbytes: int) -> int:
        """Return the offset of `nbytes` unused bytes, aligned to a page."""
        length = max(_PAGE, -(-nbytes // _PAGE) * _PAGE)
        # First fit: the pool is so large that gaps do no harm.
        with self._lock:
            for index, (offset, room) in enumerate(self._free):
                if room >= length:
                    self._free[index : index + 1] = (
                        [(offset + length, room - length)] if room > length else []
                    )
                    break
            else:
                raise MemoryError(f"the shared pool has no {nbytes} bytes left of {self.nbytes}")
            self._used.add(offset)
        # Maps all pages at once, without a page fault for each; unsupported by older kernels.
        with contextlib.suppress(OSError, ValueError):
            self.mapping.memory.madvise(_POPULATE, offset, length)
        return offset

    def release(self, offset: int, nbytes: int) -> None:
        """Release memory of `nbytes` from `allocate`."""
        length = max(_PAGE, -(-nbytes // _PAGE) * _PAGE)
        if length >= _PUNCH_FROM:
            with contextlib.suppress(OSError, ValueError):
                self.mapping.memory.madvise(mmap.MADV_REMOVE, offset, length)
        with self._lock:
            self._used.discard(offset)
            # Not reused on purpose, see `pin`.
            if offset in self._pinned:
                return
            # Joined with its free neighbours, so that none are adjacent.
            at = bisect.bisect(self._free, (offset, 0))
            start = offset
            end = offset + length
            if at < len(self._free) and self._free[at][0] == end:
                end += self._free.pop(at)[1]
            if at > 0 and sum(self._free[at - 1]) == start:
                at -= 1
                start = self._free.pop(at)[0]
            self._free.insert(at, (start, end - start))

    def pin(self) -> None:
        """Withdraw all addresses in use from later allocations, permanently.

        Called when a group has failed: a peer that was only stopped may continue and write the rest
        of a sum.
        """
        with self._lock:
            self._pinned |= self._used

    def empty(self, size: Sequence[int], dtype: torch.dtype) -> Tensor:
        """Return an uninitialised tensor in the pool; its memory is released with the last view."""
        nbytes = math.prod(size) * dtype.itemsize
        offset = self.allocate(nbytes)
        block = _block_of(max(1, nbytes)).from_address(self.address + offset)
        # Tensors share storage, and views outlive tensors; all of them keep this block alive.
        weakref.finalize(block, self._released, os.getpid(), offset, nbytes).atexit = False
        return torch.frombuffer(block, dtype=torch.uint8)[:nbytes].view(dtype).view(tuple(size))

    def _released(self, pid: int, offset: int, nbytes: int) -> None:
        if pid == os.getpid():  # a forked child drops its copies, not its parent's memory
            self.release(offset, nbytes)


@lru_cache(256)
def _block_of(nbytes: int) -> type[ctypes.Array[ctypes.c_char]]:
    """Return a buffer type that supports weak references, so that its end can be detected."""
    # Only a subclass supports weak references. Creating a class is slow, hence the cache.
    return type("Block", (ctypes.c_char * nbytes,), {})


_pool: SharedMemoryPool | None = None


def pool() -> SharedMemoryPool:
    """Return the pool of this process, created at the first call."""
    global _pool
    if _pool is None:
        _pool = SharedMemoryPool()
    return _pool


def _forget() -> None:
    global _pool
    _pool = None


# The child shares the parent's file, so it creates a new pool when needed.
os.register_at_fork(after_in_child=_forget)


def empty_shared(*size: int | Sequence[int], dtype: torch.dtype | None = None) -> Tensor:
    """Return an uninitialised CPU tensor in shared memory; otherwise like `torch.empty`.

    Collectives of the dure backend work on it in place: peers on this host read and write it
    directly. Its memory returns to the pool with the last tensor that uses it. In a forked child it
    stays the parent's memory. size: the shape, as integers or as a sequence. dtype: None is torch's
    default. Raises ValueError for an invalid shape, and MemoryError when the pool, which is as
    large as the machine's memory (256 GiB at most), is used up.
    """
    shape: list[int] = []
    for part in size:
        shape.extend([part] if isinstance(part, int) else map(int, part))
    if any(length < 0 for length in shape):
        raise ValueError(f"a tensor cannot have the shape {shape}")
    return pool().empty(shape, dtype if dtype is not None else torch.get_default_dtype())
