"""Parcels: pickled Python objects for other processes of the user on this machine.

Large buffers are shared. Functions and classes of a script or a notebook are pickled by value
(cloudpickle), including lambdas and local classes, so such a task reaches its ranks. Modules that
can be imported are imported again, and a task's file is run again (`dure.machine.user_code`).
Tensors and arrays of 16 KB or more follow the pickle in an anonymous file, which every receiver
maps copy-on-write: N ranks share a single copy of the training data. A large file may be on a disk,
so that neither side needs memory for it. A parcel never crosses a network: data from a network are
never unpickled.
"""

from __future__ import annotations

import importlib
import io
import mmap
import os
import pickle
import struct
import sys
import tempfile
from collections.abc import Callable
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from dure.machine import user_code
from dure.memory.mapped import Disk, open_anonymous_file
from dure.tensors.elements import element_bytes

_LARGE = 16_384
"""Bytes from which a buffer is worth pages of its own."""

_PAGE = 4_096


def _rebuild(buffer: Any, dtype: torch.dtype, shape: tuple[int, ...]) -> Tensor:
    return torch.frombuffer(buffer, dtype=torch.uint8).view(dtype).view(shape)


class _Pickler(user_code.Pickler):
    """Pickler with large dense CPU tensors out of band; pickle itself does so for numpy arrays."""

    def reducer_override(self, obj: Any) -> Any:
        if (
            type(obj) is Tensor
            and obj.device.type == "cpu"
            and obj.layout is torch.strided
            and not obj.requires_grad
            and obj.nbytes >= _LARGE
        ):
            raw: Any = element_bytes(obj).numpy()
            return _rebuild, (pickle.PickleBuffer(raw), obj.dtype, tuple(obj.shape))
        if (
            isinstance(obj, ModuleType)
            and type(obj) is not ModuleType
            and sys.modules.get(obj.__name__) is obj
        ):
            # For example torch.classes, which cloudpickle cannot pickle.
            return importlib.import_module, (obj.__name__,)
        return super().reducer_override(obj)


def _anonymous_file() -> int:
    if hasattr(os, "memfd_create"):
        return os.memfd_create("dure-parcel")
    with tempfile.TemporaryFile() as file:
        return os.dup(file.fileno())


def _file_on_disk(nbytes: int) -> int | None:
    """Return an anonymous file of this size on a disk; None without a disk or space."""
    try:
        descriptor = open_anonymous_file(Disk().folder)
    except OSError:
        return None
    try:
        os.posix_fallocate(descriptor, 0, nbytes)
    except OSError:
        os.close(descriptor)
        return None
    return descriptor


def _write_all(descriptor: int, content: Any) -> None:
    view = memoryview(content).cast("B")
    while view.nbytes:
        view = view[os.write(descriptor, view) :]


def _whole_pages(count: int) -> int:
    """Round up to a multiple of the page size."""
    return -(-count // _PAGE) * _PAGE


def pack(obj: Any, memory: int | None = None) -> int:
    """Pack `obj` into an anonymous file; the caller closes the descriptor.

    `memory` is the size in bytes from which the file is on a disk; None for never. Raises the
    errors of pickle for objects that cannot be pickled, such as open files.
    """
    buffers: list[pickle.PickleBuffer] = []

    def keep_small(buffer: pickle.PickleBuffer) -> bool:
        if buffer.raw().nbytes < _LARGE:
            return True
        buffers.append(buffer)
        return False

    stream = io.BytesIO()
    _Pickler(stream, protocol=5, buffer_callback=keep_small).dump(obj)
    body = stream.getvalue()
    lengths = [len(body), *(buffer.raw().nbytes for buffer in buffers)]
    descriptor = None
    if memory is not None and sum(lengths) >= memory:
        descriptor = _file_on_disk(sum(map(_whole_pages, [8 + 8 * len(lengths), *lengths])))
    descriptor = _anonymous_file() if descriptor is None else descriptor
    _write_all(descriptor, struct.pack(f"<q{len(lengths)}q", len(lengths), *lengths))
    _write_page(descriptor, body)
    buffers.reverse()
    while buffers:
        # A buffer mapped from a file leaves memory before the next buffer is read.
        _write_page(descriptor, buffers.pop().raw())
    return descriptor


def _write_page(descriptor: int, content: Any) -> None:
    """Write the content at the next page boundary, so that tensors are aligned when mapped."""
    os.lseek(descriptor, _whole_pages(os.lseek(descriptor, 0, os.SEEK_CUR)), os.SEEK_SET)
    _write_all(descriptor, content)


def unpack(descriptor: int, loads: Callable[..., Any] = pickle.loads) -> Any:
    """Return the object in a file made by `pack`; its large buffers are mapped copy-on-write."""
    size = os.fstat(descriptor).st_size
    mapped = memoryview(
        mmap.mmap(descriptor, size, flags=mmap.MAP_PRIVATE, prot=mmap.PROT_READ | mmap.PROT_WRITE)
    )
    (count,) = struct.unpack_from("<q", mapped)
    lengths = struct.unpack_from(f"<{count}q", mapped, 8)
    parts = []
    position = 8 * (count + 1)
    for length in lengths:
        position = _whole_pages(position)
        parts.append(mapped[position : position + length])
        position += length
    return loads(parts[0], buffers=parts[1:])
