"""Memory that all ranks of a host map: what one of them writes, the others read where it lies.

It is a file without a name (memfd), which vanishes with the last process that maps it, however that
process ends.
"""

from __future__ import annotations

import mmap
import os

import torch
from torch import Tensor

from dure.collectives.group import Group
from dure.collectives.shared_memory.pool import Mapping, open_of

_LINE = 64


def common_memory(group: Group, nbytes: int) -> Tensor | None:
    """Bytes, zeros, that are the same on all ranks; None where the ranks do not share memory.

    All ranks call it. They do if the backend is dure and all of them are on one host, and may open
    each other's files.
    """
    # alone there is nobody to share with, and plain memory will do
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
    # a system may forbid that one process opens another's files; all ranks have to know of it
    mapped: Tensor | None = None
    try:
        if group.rank != 0:
            descriptor = open_of(int(pid), int(theirs))
        mapped = Mapping(descriptor, nbytes).tensor()
    except (OSError, ValueError):
        mapped = None
    # Only after this do all ranks know the same; it also keeps rank 0 from closing the file too
    # early.
    told = group.all_gather_values([float(mapped is not None)], "sharing memory")
    everywhere = all(row[0] for row in told)
    # A mapping outlives its descriptor.
    if descriptor >= 0:
        os.close(descriptor)
    return mapped if everywhere else None


class Slices:
    """Hands out pieces of common memory, each on a cache line of its own."""

    def __init__(self, memory: Tensor) -> None:
        self.memory = memory
        self.at = 0

    @staticmethod
    def room(nbytes: int) -> int:
        """Bytes that a piece takes, up to the end of its last cache line."""
        return -(-nbytes // _LINE) * _LINE

    def take(self, elements: int, dtype: torch.dtype) -> Tensor:
        """The next piece; all ranks take the same ones in the same order, and so share them."""
        nbytes = elements * dtype.itemsize
        piece = self.memory[self.at : self.at + nbytes]
        self.at += self.room(nbytes)
        return piece.view(dtype)
