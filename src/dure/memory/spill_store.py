"""Storage of tensors that may be too large for memory, on a disk if there is one.

Checkpoints and final weights of a divided model are collected here: the shares of the ranks arrive
a block at a time, and are written to their place in a file. Small tensors stay in memory; if there
is no disk, or the disk is full, all tensors do.
"""

from __future__ import annotations

import mmap
import os
from contextlib import suppress
from pathlib import Path

import torch
from torch import Tensor

from dure.memory.mapped import LEAST, Disk, open_anonymous_file
from dure.record.disk_tensors import DiskTensor, Leaf, OpenFile, TensorMeta, form_of, put


class SpillStore:
    """Allocator of tensors on a disk or in memory.

    folder: on the preferred disk; ignored if it is in memory or None. least: bytes of the smallest
    tensor on a disk; None keeps all tensors in memory.
    """

    def __init__(self, folder: Path | None = None, least: int | None = LEAST) -> None:
        self._folder = folder
        self._least = least
        self._file: OpenFile | None = None
        self._length = 0

    def place(self, form: TensorMeta) -> Leaf:
        """Return memory for a tensor, zeros until its values are set."""
        size = torch.Size(form.shape)
        nbytes = size.numel() * form.kind.itemsize
        file = self._opened() if self._least is not None and nbytes >= self._least else None
        # Allocated now: a disk that is full later would be an error in the middle of writing.
        if file is not None and self._grown(file, nbytes):
            return DiskTensor(file, self._length - _whole_pages(nbytes), form.kind, size)
        return torch.zeros(size, dtype=form.kind)

    def _grown(self, file: OpenFile, nbytes: int) -> bool:
        """Extend the file by `nbytes`, in whole pages; return False if the disk is full."""
        length = _whole_pages(nbytes)
        with suppress(OSError):
            os.posix_fallocate(file.descriptor, self._length, length)
            self._length += length
            return True
        return False

    def _opened(self) -> OpenFile | None:
        """Return the file; None if there is no disk."""
        for folder in (self._folder, None) if self._file is None else ():
            # The folder may be in memory, or may not be writable.
            with suppress(OSError):
                self._file = OpenFile(open_anonymous_file(Disk(folder).folder))
                return self._file
        return self._file


def _whole_pages(nbytes: int) -> int:
    return -(-nbytes // mmap.PAGESIZE) * mmap.PAGESIZE


IN_MEMORY = SpillStore(least=None)
"""Shelf that keeps all tensors in memory."""


def spilled_copy(tensor: Tensor, store: SpillStore) -> Leaf:
    """Return a copy of a tensor on the shelf."""
    found = store.place(form_of("", tensor.dtype, tensor.shape))
    put(found, 0, tensor.reshape(-1))
    return found
