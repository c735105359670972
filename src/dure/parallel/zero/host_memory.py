"""Shared memory that all ranks of a host map, so that data need no copies.

The memory is an anonymous file (memfd), which vanishes with the last process that maps it, even if
that process is killed.
"""

from __future__ import annotations

import mmap
import os

import torch
from torch import Tensor

from dure.collectives.group import Group
from dure.collectives.shared_memory.pool import SharedMapping, open_of

_LINE = 64


def common_memory(group: Group, nbytes: int) -> Tensor | None:
    """Return zeroed bytes that all ranks share; None if the ranks cannot share memory.

    Ranks can share memory if the backend is dure, all ranks are on the same host, and a rank may
    open the files of another rank's process. All ranks call this function.
    """
    # a single rank needs no shared memory
    if group.size == 1:
        return torch.zeros(nbytes, dtype=torch.uint8)
    if nbytes == 0 or group.backend(torch.device("cpu")) != "dure" or len(group.hosts()) > 1:
        return None
    nbytes = -(-nbytes // mmap.PAGESIZE) * mmap.PAGESIZE
    descriptor = -1
    if group.rank == 0:
        descriptor = os.memfd_create("dure-zero")
        os.ftruncate(descriptor, nbytes)
    # The others open the file through rank 0's process, so it must stay open until all have mapped
    # it.
    pid, theirs = group.all_gather_values(
        [float(os.getpid()), float(descriptor)], "sharing memory"
    )[0]
    # a system may forbid that a process opens another's files; all ranks must learn of a failure
    mapped: Tensor | None = None
    try:
        if group.rank != 0:
            descriptor = open_of(int(pid), int(theirs))
        mapped = SharedMapping(descriptor, nbytes).tensor()
    except (OSError, ValueError):
        mapped = None
    # After this exchange all ranks decide alike; it also keeps rank 0 from closing the file before
    # the others have mapped it.
    told = group.all_gather_values([float(mapped is not None)], "sharing memory")
    everywhere = all(row[0] for row in told)
    # A mapping stays valid after its descriptor is closed.
    if descriptor >= 0:
        os.close(descriptor)
    return mapped if everywhere else None


class HostMemoryAllocator:
    """Allocator of pieces of common memory, each aligned to a cache line."""

    def __init__(self, memory: Tensor) -> None:
        self.memory = memory
        self.at = 0

    @staticmethod
    def room(nbytes: int) -> int:
        """Return the bytes that a piece occupies, up to the end of its last cache line."""
        return -(-nbytes // _LINE) * _LINE

    def take(self, elements: int, dtype: torch.dtype) -> Tensor:
        """Return the next piece.

        All ranks take the same pieces in the same order, and so share each piece.
        """
        nbytes = elements * dtype.itemsize
        piece = self.memory[self.at : self.at + nbytes]
        self.at += self.room(nbytes)
        return piece.view(dtype)
