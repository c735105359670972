"""Tensors that lie in files: read where they are needed, and only what is.

    OnDisk            one tensor: which file, where in it, its dtype and shape
    TensorsOnDisk     tensors by name, each mapped into memory when it is asked for

Those of a file in safetensors are found by its header (`dure.record.weights.tensors_in`). So a
checkpoint is written and read piece by piece, whatever its size. A file stays open for as long as
one of its tensors is known, also one without a name.
"""

from __future__ import annotations

import mmap
import os
import weakref
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from dure.record.inside import descriptor_of

PIECE = 4 << 20
"""Bytes that are in memory at once while a tensor is on its way."""


class Form(NamedTuple):
    """What is known of a tensor without its values; dtype: its name in torch."""

    name: str
    dtype: str
    shape: Sequence[int]

    @property
    def kind(self) -> torch.dtype:
        """The dtype."""
        found: torch.dtype = getattr(torch, self.dtype)
        return found


class File:
    """An open file, closed when nobody knows it any more. descriptor: which it takes over."""

    def __init__(self, descriptor: int) -> None:
        self.descriptor = descriptor
        weakref.finalize(self, os.close, descriptor)

    @classmethod
    def of(cls, path: Path) -> File:
        """The file of this name, to be read. Raises OSError."""
        return cls(descriptor_of(path))


class OnDisk:
    """A tensor in a file. at: its first byte there."""

    def __init__(self, file: File, at: int, dtype: torch.dtype, shape: tuple[int, ...]) -> None:
        self.file = file
        self.at = at
        self.dtype = dtype
        self.shape = torch.Size(shape)

    def __repr__(self) -> str:
        return f"OnDisk({self.dtype}, {tuple(self.shape)})"

    def dim(self) -> int:
        """As of a tensor."""
        return len(self.shape)

    def numel(self) -> int:
        """As of a tensor."""
        return self.shape.numel()

    @property
    def nbytes(self) -> int:
        """As of a tensor."""
        return self.numel() * self.dtype.itemsize

    def elements(self, start: int, stop: int) -> Tensor:
        """A copy of the elements [start, stop), in a row. Raises OSError where some are missing."""
        found = torch.empty(stop - start, dtype=self.dtype)
        self._read(_bytes_of(found), start * self.dtype.itemsize)
        return found

    def tensor(self) -> Tensor:
        """A copy of the whole."""
        return self.elements(0, self.numel()).view(self.shape)

    def mapped(self) -> Tensor:
        """The whole as a view of the file; what is written into it stays in memory."""
        if not self.nbytes:
            return torch.empty(self.shape, dtype=self.dtype)
        # A dtype wants its bytes at a multiple of its size, which other writers may not have kept.
        if self.at % self.dtype.itemsize:
            return self.tensor()
        # A mapping begins with a page.
        before = self.at % mmap.ALLOCATIONGRANULARITY
        area = mmap.mmap(
            self.file.descriptor,
            before + self.nbytes,
            flags=mmap.MAP_PRIVATE,
            prot=mmap.PROT_READ | mmap.PROT_WRITE,
            offset=self.at - before,
        )
        flat = torch.frombuffer(area, dtype=self.dtype, count=self.numel(), offset=before)
        return flat.view(self.shape)

    def put(self, start: int, elements: Tensor) -> None:
        """Writes a row of elements into their place. Raises OSError."""
        view = _bytes_of(elements.detach().to("cpu", self.dtype).contiguous().view(-1))
        write_at(self.file.descriptor, view, self.at + start * self.dtype.itemsize)

    def pieces(self) -> Iterator[memoryview]:
        """The bytes, a few million at a time."""
        for start in range(0, self.nbytes, PIECE):
            piece = memoryview(bytearray(min(PIECE, self.nbytes - start)))
            self._read(piece, start)
            yield piece

    def _read(self, into: memoryview, start: int) -> None:
        at = self.at + start
        while into.nbytes:
            done = os.preadv(self.file.descriptor, [into[: 1 << 30]], at)
            if not done:
                raise OSError("the file ends before its last tensor does")
            into = into[done:]
            at += done


Leaf = Tensor | OnDisk
"""A tensor, wherever it lies."""


def form_of(name: str, dtype: torch.dtype, shape: Sequence[int]) -> Form:
    """The form of a tensor with this name."""
    return Form(name, str(dtype).removeprefix("torch."), list(shape))


def forms_of(leaves: Mapping[str, Leaf]) -> list[Form]:
    """The forms of tensors, in their order."""
    return [form_of(name, leaf.dtype, leaf.shape) for name, leaf in leaves.items()]


def write_at(descriptor: int, content: memoryview, at: int) -> None:
    """Writes all of it into an open file, from this byte on. Raises OSError."""
    while content.nbytes:
        done = os.pwrite(descriptor, content[: 1 << 30], at)
        content = content[done:]
        at += done


def _bytes_of(tensor: Tensor) -> memoryview:
    """The bytes of a row of elements, where they lie."""
    raw: Any = tensor.resolve_conj().resolve_neg().view(torch.uint8).numpy()
    return memoryview(raw)


def elements(leaf: Leaf, start: int, stop: int) -> Tensor:
    """The elements [start, stop) of a tensor, in a row, to be read: a copy or a view."""
    if isinstance(leaf, OnDisk):
        return leaf.elements(start, stop)
    return leaf.detach().reshape(-1)[start:stop]


def run_of(leaf: Leaf, start: int, stop: int) -> Leaf:
    """The elements [start, stop) of a tensor without gaps where they lie, in a row."""
    if isinstance(leaf, OnDisk):
        at = leaf.at + start * leaf.dtype.itemsize
        return OnDisk(leaf.file, at, leaf.dtype, (stop - start,))
    return leaf.view(-1)[start:stop]


def in_memory(leaf: Leaf) -> Tensor:
    """The tensor; a copy, where it lies in a file."""
    return leaf.tensor() if isinstance(leaf, OnDisk) else leaf


def put(leaf: Leaf, start: int, elements: Tensor) -> None:
    """Writes a row of elements into a tensor without gaps."""
    if isinstance(leaf, OnDisk):
        leaf.put(start, elements)
    else:
        leaf.view(-1)[start : start + elements.numel()] = elements.reshape(-1)


class TensorsOnDisk(Mapping[str, Tensor]):
    """Tensors by name, of which those in files are mapped, each for itself, when asked for.

    leaves: the same as they lie.
    """

    def __init__(self, leaves: Mapping[str, Leaf]) -> None:
        self.leaves = dict(leaves)

    def __getitem__(self, name: str) -> Tensor:
        leaf = self.leaves[name]
        return leaf.mapped() if isinstance(leaf, OnDisk) else leaf

    def __iter__(self) -> Iterator[str]:
        return iter(self.leaves)

    def __len__(self) -> int:
        return len(self.leaves)

    def __reduce__(self) -> tuple[Any, ...]:
        # A file of this process is none of another's: there they are tensors.
        return dict, (dict(self),)


def leaves_of(tensors: Mapping[str, Any]) -> dict[str, Any]:
    """Tensors by name as they lie, whatever mapping they come in."""
    return dict(tensors.leaves if isinstance(tensors, TensorsOnDisk) else tensors)
