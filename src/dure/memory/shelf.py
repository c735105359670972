"""Where tensors are put that are too many for memory: as long as it is known, on a disk.

A checkpoint of a divided model is put together here, and so are its weights at the end: what the
ranks hold arrives a block at a time, and goes into its place in a file. Small tensors lie in memory
all the same, and where there is no disk, or it is full, all of them do.
"""

from __future__ import annotations

import mmap
import os
from contextlib import suppress
from pathlib import Path

import torch
from torch import Tensor

from dure.memory.mapped import LEAST, Disk, nameless
from dure.record.on_disk import File, Form, Leaf, OnDisk, form_of, put


class Shelf:
    """Makes room for tensors.

    folder: on the disk that is asked first; one that is in memory, or that is None, is none. least:
    bytes of the smallest tensor that lies on a disk; None: none does.
    """

    def __init__(self, folder: Path | None = None, least: int | None = LEAST) -> None:
        self._folder = folder
        self._least = least
        self._file: File | None = None
        self._length = 0

    def place(self, form: Form) -> Leaf:
        """Room for a tensor, whose values are zeros until they are set (`on_disk.put`)."""
        size = torch.Size(form.shape)
        nbytes = size.numel() * form.kind.itemsize
        file = self._opened() if self._least is not None and nbytes >= self._least else None
        # All of the room now: a disk that is full later would be an error in the midst.
        if file is not None and self._grown(file, nbytes):
            return OnDisk(file, self._length - _whole_pages(nbytes), form.kind, size)
        return torch.zeros(size, dtype=form.kind)

    def _grown(self, file: File, nbytes: int) -> bool:
        """Whether the file is longer by so many bytes now; not where the disk is full."""
        length = _whole_pages(nbytes)
        with suppress(OSError):
            os.posix_fallocate(file.descriptor, self._length, length)
            self._length += length
            return True
        return False

    def _opened(self) -> File | None:
        """The file; None where there is no disk."""
        for folder in (self._folder, None) if self._file is None else ():
            # One that is in memory, say, or somebody else's.
            with suppress(OSError):
                self._file = File(nameless(Disk(folder).folder))
                return self._file
        return self._file


def _whole_pages(nbytes: int) -> int:
    return -(-nbytes // mmap.PAGESIZE) * mmap.PAGESIZE


IN_MEMORY = Shelf(least=None)
"""Where tensors are put that are to lie in memory."""


def shelved(tensor: Tensor, shelf: Shelf) -> Leaf:
    """A copy of a tensor, on the shelf."""
    found = shelf.place(form_of("", tensor.dtype, tensor.shape))
    put(found, 0, tensor.reshape(-1))
    return found
