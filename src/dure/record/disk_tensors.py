"""Tensors in files: read on demand, and only the needed parts.

    OnDisk            a tensor: its file, offset, dtype and shape
    TensorsOnDisk     tensors by name, each mapped into memory on access

Tensors of a safetensors file are found by its header (`dure.record.weights.tensors_in`), so that a
checkpoint is written and read piece by piece, whatever its size. A file stays open as long as any
of its tensors is referenced; it may be unlinked.
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

from dure.record.untrusted_files import descriptor_of

PIECE = 4 << 20
"""Bytes in memory at once during a transfer of a tensor."""


class TensorMeta(NamedTuple):
    """Description of a tensor without its values. dtype: its name in torch."""

    name: str
    dtype: str
    shape: Sequence[int]

    @property
    def kind(self) -> torch.dtype:
        """The dtype."""
        found: torch.dtype = getattr(torch, self.dtype)
        return found


class OpenFile:
    """An open file, closed when the last reference is gone. descriptor: owned from now on."""

    def __init__(self, descriptor: int) -> None:
        self.descriptor = descriptor
        weakref.finalize(self, os.close, descriptor)

    @classmethod
    def of(cls, path: Path) -> OpenFile:
        """Open the file of this name for reading. Raises OSError."""
        return cls(descriptor_of(path))


class DiskTensor:
    """A tensor in a file. at: offset of its first byte."""

    def __init__(self, file: OpenFile, at: int, dtype: torch.dtype, shape: tuple[int, ...]) -> None:
        self.file = file
        self.at = at
        self.dtype = dtype
        self.shape = torch.Size(shape)

    def __repr__(self) -> str:
        return f"OnDisk({self.dtype}, {tuple(self.shape)})"

    def dim(self) -> int:
        """Return the number of dimensions."""
        return len(self.shape)

    def numel(self) -> int:
        """Return the number of elements."""
        return self.shape.numel()

    @property
    def nbytes(self) -> int:
        """Bytes of the tensor."""
        return self.numel() * self.dtype.itemsize

    def elements(self, start: int, stop: int) -> Tensor:
        """Return a flat copy of the elements [start, stop). Raises OSError if some are missing."""
        found = torch.empty(stop - start, dtype=self.dtype)
        self._read(_bytes_of(found), start * self.dtype.itemsize)
        return found

    def tensor(self) -> Tensor:
        """Return a copy of the whole tensor."""
        return self.elements(0, self.numel()).view(self.shape)

    def mapped(self) -> Tensor:
        """Return the whole tensor as a private mapping of the file; writes stay in memory."""
        if not self.nbytes:
            return torch.empty(self.shape, dtype=self.dtype)
        # A mapped tensor has to be aligned to its dtype, which files of other writers may violate.
        if self.at % self.dtype.itemsize:
            return self.tensor()
        # A mapping begins at a page.
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
        """Write consecutive elements from index `start` on. Raises OSError."""
        view = _bytes_of(elements.detach().to("cpu", self.dtype).contiguous().view(-1))
        write_at(self.file.descriptor, view, self.at + start * self.dtype.itemsize)

    def pieces(self) -> Iterator[memoryview]:
        """Yield the bytes, a few million at a time."""
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


Leaf = Tensor | DiskTensor
"""A tensor, in memory or in a file."""


def form_of(name: str, dtype: torch.dtype, shape: Sequence[int]) -> TensorMeta:
    """Return the form of a tensor with this name."""
    return TensorMeta(name, str(dtype).removeprefix("torch."), list(shape))


def forms_of(leaves: Mapping[str, Leaf]) -> list[TensorMeta]:
    """Return the forms of tensors, in their order."""
    return [form_of(name, leaf.dtype, leaf.shape) for name, leaf in leaves.items()]


def write_at(descriptor: int, content: memoryview, at: int) -> None:
    """Write all of `content` into an open file at offset `at`. Raises OSError."""
    while content.nbytes:
        done = os.pwrite(descriptor, content[: 1 << 30], at)
        content = content[done:]
        at += done


def _bytes_of(tensor: Tensor) -> memoryview:
    """Return the bytes of consecutive elements, without a copy."""
    raw: Any = tensor.resolve_conj().resolve_neg().view(torch.uint8).numpy()
    return memoryview(raw)


def elements(leaf: Leaf, start: int, stop: int) -> Tensor:
    """Return the elements [start, stop) of a tensor, flat, for reading: a copy or a view."""
    if isinstance(leaf, DiskTensor):
        return leaf.elements(start, stop)
    return leaf.detach().reshape(-1)[start:stop]


def run_of(leaf: Leaf, start: int, stop: int) -> Leaf:
    """Return the elements [start, stop) of a contiguous tensor, flat, without a copy."""
    if isinstance(leaf, DiskTensor):
        at = leaf.at + start * leaf.dtype.itemsize
        return DiskTensor(leaf.file, at, leaf.dtype, (stop - start,))
    return leaf.view(-1)[start:stop]


def in_memory(leaf: Leaf) -> Tensor:
    """Return the tensor in memory; a copy if it is in a file."""
    return leaf.tensor() if isinstance(leaf, DiskTensor) else leaf


def put(leaf: Leaf, start: int, elements: Tensor) -> None:
    """Write consecutive elements into a contiguous tensor."""
    if isinstance(leaf, DiskTensor):
        leaf.put(start, elements)
    else:
        leaf.view(-1)[start : start + elements.numel()] = elements.reshape(-1)


class DiskTensors(Mapping[str, Tensor]):
    """Tensors by name; each tensor in a file is mapped when it is accessed.

    leaves: the same tensors, without mapping.
    """

    def __init__(self, leaves: Mapping[str, Leaf]) -> None:
        self.leaves = dict(leaves)

    def __getitem__(self, name: str) -> Tensor:
        leaf = self.leaves[name]
        return leaf.mapped() if isinstance(leaf, DiskTensor) else leaf

    def __iter__(self) -> Iterator[str]:
        return iter(self.leaves)

    def __len__(self) -> int:
        return len(self.leaves)

    def __reduce__(self) -> tuple[Any, ...]:
        # A file of this process is not another's: there they become tensors.
        return dict, (dict(self),)


def leaves_of(tensors: Mapping[str, Any]) -> dict[str, Any]:
    """Return the leaves of a mapping of tensors, without mapping files into memory."""
    return dict(tensors.leaves if isinstance(tensors, DiskTensors) else tensors)
