"""Memory-mapped tensors in files on a disk, which may be larger than memory.

    with mapped(Disk()) as disk:           every large tensor that is created inside is in a file
        model = make_model()
    release_pages(model.parameters())      let pages leave memory; the values stay
    with releasing_used_pages():           tensors that are used inside leave memory again
        model(inputs)
    mapped_view(file, offset, shape, dtype)
                                           a tensor in a given file, such as a checkpoint: writes
                                           stay in memory

All computations have the same bits: only the location of a tensor differs. The system writes
changed pages to the file in the background, and reads pages on access. Pages count as memory of the
process while they are resident. To *release* pages means to let them leave memory (madvise), while
the mapping and the values stay.

Files are anonymous, so that a killed process leaves no files behind. A folder in memory (tmpfs)
would save no memory and is refused.

Cost: a changed page is written to the disk, unless its tensor is deleted before, and is read again
if it has left memory before the next access.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import sys
import tempfile
import threading
import weakref
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map_only

from dure.machine.compiler import deferred_compiler
from dure.record.disk_tensors import write_at

LEAST = 1 << 20
"""Minimum bytes of a tensor in a file; smaller tensors stay in memory."""

WINDOW = 64 << 20
"""Bytes of mapped tensors that may be resident before all of them are released."""

_IN_MEMORY = frozenset({"tmpfs", "ramfs", "devtmpfs"})
"""Types of file systems whose files are in memory."""

_UNDEFINED_VALUES = frozenset(
    {
        "aten::empty",
        "aten::empty_like",
        "aten::empty_strided",
        "aten::new_empty",
        "aten::new_empty_strided",
        "aten::empty_permuted",
    }
)
"""Operations that create a tensor with undefined values."""

_ZERO_VALUES = frozenset({"aten::zeros", "aten::zeros_like", "aten::new_zeros"})
"""Operations that create zeros: nothing is copied, since a new file contains zeros."""

_libc = ctypes.CDLL(None, use_errno=True)
_libc.mmap.restype = ctypes.c_void_p
_libc.mmap.argtypes = [
    ctypes.c_void_p,
    ctypes.c_size_t,
    *[ctypes.c_int] * 3,
    ctypes.c_long,
]
_libc.munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]
_libc.madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]

# Reentrant: the finalizer `_unmap` may run in a thread that has the lock, at any allocation.
_lock = threading.RLock()
_segments: dict[int, int] = {}
"""Mappings of files of `Disk`: bytes of each mapping, by its address."""

_views: dict[int, tuple[int, int]] = {}
"""Mappings of given files (`mapped_view`): (address, bytes), by the address of the tensor."""

_NORESERVE = getattr(mmap, "MAP_NORESERVE", 0x4000 if sys.platform == "linux" else 0)
_PAGE_OUT = 21
"""MADV_PAGEOUT of Linux.

In a private mapping (`mapped_view`) MADV_DONTNEED would discard written pages, and MADV_PAGEOUT
moves them to the swap space. In a shared mapping (`Disk`) both keep written pages in the file.
"""


class DiskError(OSError):
    """No disk for offloaded tensors, or the disk is full."""


class Disk:
    """Folder for memory-mapped tensors.

    folder: a folder on a disk; by default the first of the folder for temporary files, /var/tmp and
    the current folder that is on a disk. Raises DiskError if there is none, or if the folder is in
    memory.
    """

    def __init__(self, folder: str | Path | None = None) -> None:
        self.folder = _default_folder() if folder is None else Path(folder)
        kind = kind_of(self.folder)
        if kind in _IN_MEMORY:
            raise DiskError(
                f"{self.folder} is a {kind}, which is in memory: give a folder on a disk"
            )

    def zeros(self, shape: Iterable[int], dtype: torch.dtype) -> Tensor:
        """Return zeros of this shape, in a new file."""
        size = torch.Size(shape)
        if not size.numel():
            return torch.empty(size, dtype=dtype)
        return self._bytes_in_file(size.numel() * dtype.itemsize).view(dtype).view(size)

    def place(self, tensor: Tensor, values: bool = True) -> Tensor:
        """Return a tensor with the shape, strides and dtype of `tensor`, in a new file.

        values: whether to copy the values; if not, the new tensor has zeros.
        """
        storage = tensor.untyped_storage()
        # The bytes are the values, unless a conjugation or negation is lazy.
        as_bytes = values and not tensor.is_conj() and not tensor.is_neg()
        flat = self._bytes_in_file(storage.nbytes(), storage if as_bytes else None)
        own = torch.empty(0, dtype=tensor.dtype)
        own.set_(flat.untyped_storage(), 0, tensor.shape, tensor.stride())
        if values and not as_bytes:
            own.copy_(tensor)
        return own

    def _bytes_in_file(self, nbytes: int, content: torch.UntypedStorage | None = None) -> Tensor:
        """Return a uint8 tensor of `nbytes` bytes (of 1 byte for 0) in a new file.

        The bytes are copies of `content`; without content they are zeros.
        """
        length = max(1, -(-nbytes // mmap.PAGESIZE)) * mmap.PAGESIZE
        address = self._map(length, content)
        array = (ctypes.c_uint8 * length).from_address(address)
        with _lock:
            _segments[address] = length
        # torch keeps the array alive while a tensor uses its memory.
        weakref.finalize(array, _unmap, address, length)
        return torch.frombuffer(array, dtype=torch.uint8, count=max(1, nbytes))

    def _map(self, length: int, content: torch.UntypedStorage | None) -> int:
        """Create an anonymous file of `length` bytes, and return the address of its mapping."""
        try:
            file = open_anonymous_file(self.folder)
            try:
                # The blocks are allocated now: a full disk is an error here, and would be a SIGBUS
                # at a later write.
                os.posix_fallocate(file, 0, length)
                if content is not None:
                    _write(file, content)
                protection = mmap.PROT_READ | mmap.PROT_WRITE
                address = _libc.mmap(None, length, protection, mmap.MAP_SHARED, file, 0)
                number = ctypes.get_errno()
            finally:
                os.close(file)
        except OSError as error:
            raise DiskError(
                f"{length / 1e9:.3g} GB do not fit into {self.folder}: {error.strerror}; give "
                "another folder"
            ) from error
        if address in (None, ctypes.c_void_p(-1).value):
            raise DiskError(f"{length / 1e9:.3g} GB cannot be mapped: {os.strerror(number)}")
        return int(address)


def mapped_view(file: int, offset: int, shape: Iterable[int], dtype: torch.dtype) -> Tensor:
    """Return a tensor whose values are in an open file, from byte `offset` on.

    Values are read on access. The mapping is private (copy-on-write): writes stay in this process's
    memory, and the file does not change.

    Args:
        file: Descriptor of the file.
        offset: Offset in bytes, a multiple of the dtype's size.
        shape: Shape of the tensor.
        dtype: Dtype of the tensor.

    Raises:
        DiskError: if the file cannot be mapped.
    """
    size = torch.Size(shape)
    if not size.numel():
        return torch.empty(size, dtype=dtype)
    before = offset % mmap.PAGESIZE
    length = before + size.numel() * dtype.itemsize
    # NORESERVE: no memory is reserved for pages that could be written.
    flags = mmap.MAP_PRIVATE | _NORESERVE
    protection = mmap.PROT_READ | mmap.PROT_WRITE
    address = _libc.mmap(None, length, protection, flags, file, offset - before)
    if address in (None, ctypes.c_void_p(-1).value):
        reason = os.strerror(ctypes.get_errno())
        raise DiskError(f"{length / 1e9:.3g} GB of a file cannot be mapped: {reason}")
    array = (ctypes.c_uint8 * length).from_address(address)
    with _lock:
        _views[address + before] = (address, length)
    weakref.finalize(array, _close_view, address + before).atexit = False
    flat = torch.frombuffer(array, dtype=dtype, offset=before, count=size.numel())
    return flat.view(size)


def _close_view(begin: int) -> None:
    with _lock:
        _libc.munmap(*_views.pop(begin))


def open_anonymous_file(folder: Path) -> int:
    """Return the descriptor of a new anonymous file in a folder."""
    try:
        return os.open(folder, os.O_TMPFILE | os.O_RDWR | os.O_CLOEXEC, 0o600)
    # The file system, or the operating system, does not support O_TMPFILE.
    except (OSError, AttributeError):
        file, name = tempfile.mkstemp(prefix=".dure-", dir=folder)
        os.unlink(name)
        return file


def _write(file: int, content: torch.UntypedStorage) -> None:
    """Write bytes to a file with system calls.

    A copy into mapped pages would fault on each page.
    """
    raw: Any = torch.empty(0, dtype=torch.uint8).set_(content).numpy()
    write_at(file, memoryview(raw), 0)


def _unmap(address: int, length: int) -> None:
    with _lock:
        del _segments[address]
        _libc.munmap(address, length)


def _default_folder() -> Path:
    """Return the first default folder that is on a disk. Raises DiskError if there is none."""
    tried = [Path(tempfile.gettempdir()), Path("/var/tmp"), Path.cwd()]
    for folder in tried:
        if os.access(folder, os.W_OK) and kind_of(folder) not in _IN_MEMORY:
            return folder
    raise DiskError(
        f"none of {', '.join(map(str, tried))} is a folder on a disk: set TMPDIR to one"
    )


def kind_of(folder: Path) -> str:
    """Return the type of the file system of a folder, such as ext4; "" if unknown.

    Raises DiskError if there is no such folder.
    """
    try:
        place = folder.resolve(strict=True)
    except OSError as error:
        raise DiskError(f"there is no folder {folder}: {error.strerror}") from error
    best = ("", "")
    try:
        lines = Path("/proc/self/mounts").read_text().splitlines()
    except OSError:
        return ""
    for line in lines:
        _, where, kind, *_ = line.split()
        # The system escapes a blank in a name in this way.
        where = where.replace("\\040", " ")
        if place.is_relative_to(where) and len(where) >= len(best[0]):
            best = (where, kind)
    return best[1]


class _MappingMode(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Dispatch mode that releases used mapped tensors, and moves new large tensors to files.

    All resident tensors are released at once, when they have `WINDOW` bytes.

    Args:
        disk: folder for new tensors; None leaves new tensors in memory.
        least: minimum bytes of a tensor that is moved.
        memory_budget: bytes of new large tensors that may stay in memory. A tensor larger than the
            remaining budget is moved, and later, smaller tensors may still stay.
    """

    def __init__(self, disk: Disk | None, least: int, memory_budget: int = 0) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.disk = disk
        self.least = least
        self.memory_budget = memory_budget
        # Bytes of each mapping that was used since the last release, by its address.
        self._resident: dict[int, int] = {}
        self._nbytes = 0

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        given = kwargs or {}
        result = func(*args, **given)
        known = {_storage_address(tensor) for tensor in _tensors((args, given))}
        for address in known & _segments.keys():
            self._mark_resident(address)
        if self.disk is not None and any(map(self._is_large, _tensors(result))):
            result = self._moved_to_disk(func._schema.name, result, known, self.disk)
        if self._nbytes >= WINDOW:
            self.release_resident()
        return result

    def _moved_to_disk(self, name: str, result: Any, known: set[int], disk: Disk) -> Any:
        """Return an operation's result, moved to the disk. known: addresses of its inputs."""
        values = name not in _UNDEFINED_VALUES and name not in _ZERO_VALUES
        moved: dict[int, Tensor] = {}

        def move(tensor: Tensor) -> Tensor:
            # A tensor that shares memory with an input is not new: a view, or changed in place.
            if not self._is_large(tensor) or _storage_address(tensor) in known:
                return tensor
            nbytes = tensor.untyped_storage().nbytes()
            if nbytes <= self.memory_budget:
                self.memory_budget -= nbytes
                return tensor
            if id(tensor) not in moved:
                moved[id(tensor)] = disk.place(tensor, values)
                self._mark_resident(_storage_address(moved[id(tensor)]))
            return moved[id(tensor)]

        return tree_map_only(Tensor, move, result)

    def _mark_resident(self, address: int) -> None:
        """Record that an operation has used the mapping at `address`, so that it is resident."""
        if address not in self._resident:
            nbytes = _segments.get(address, 0)
            self._resident[address] = nbytes
            self._nbytes += nbytes

    def release_resident(self) -> None:
        """Release the pages of all resident mappings."""
        with _lock:
            for address in self._resident:
                # The tensor may have been deleted and its mapping removed.
                if address in _segments:
                    _libc.madvise(address, _segments[address], mmap.MADV_DONTNEED)
        self._resident.clear()
        self._nbytes = 0

    def _is_large(self, tensor: Tensor) -> bool:
        """Return whether a tensor is moved if it is new: a large CPU tensor in ordinary memory."""
        return (
            type(tensor) is Tensor
            and tensor.device.type == "cpu"
            and tensor.layout is torch.strided
            and tensor.untyped_storage().nbytes() >= self.least
            and tensor.storage_offset() == 0
            and not is_mapped(tensor)
        )


def _tensors(tree: Any) -> Iterator[Tensor]:
    return (leaf for leaf in tree_leaves(tree) if isinstance(leaf, Tensor))


def _storage_address(tensor: Tensor) -> int:
    """Return the address of a tensor's storage, which its views share.

    0 for a tensor without memory, or of an unknown type.
    """
    kind = type(tensor)
    # Tensors of other types, such as fake tensors, may have no memory, and data_ptr() of such a
    # tensor can crash the process.
    if kind is not Tensor and (nn.Parameter not in kind.__mro__ or is_lazy(tensor)):
        return 0
    if tensor.layout is not torch.strided or tensor.device.type == "meta":
        return 0
    return tensor.untyped_storage().data_ptr()


@contextmanager
def mapped(disk: Disk, least: int = LEAST, memory_budget: int = 0) -> Iterator[Disk]:
    """Context manager in which tensors of `least` bytes or more are created in files.

    It applies to tensors that this thread creates on the CPU. Views, tensors that are changed in
    place, and tensors of other threads are not moved. Used mapped tensors leave memory, as in
    `releasing_used_pages`. memory_budget: bytes of large tensors that are created in memory before
    tensors go to files.
    """
    with _entered_mode(_MappingMode(disk, least, memory_budget)):
        yield disk


@contextmanager
def releasing_used_pages() -> Iterator[None]:
    """Context manager in which mapped tensors leave memory after their use by this thread.

    They leave together, whenever tensors of `WINDOW` bytes have been used.
    """
    with _entered_mode(_MappingMode(None, 0)):
        yield


@contextmanager
def _entered_mode(mapping: _MappingMode) -> Iterator[None]:
    try:
        # The first mode of a process would load the compiler, which takes seconds.
        with deferred_compiler(), mapping:
            yield
    finally:
        mapping.release_resident()


def is_mapped(tensor: Tensor) -> bool:
    """Return whether a tensor is in a file: of `Disk`, or given to `mapped_view`."""
    return _storage_address(tensor) in _segments or _storage_address(tensor) in _views


@torch.no_grad()
def move_views_to_files(tensors: Iterable[Tensor]) -> None:
    """Move tensors of `mapped_view` to new files of `Disk`, so that writes go to a file.

    The tensor objects stay the same. Raises DiskError if there is no disk.
    """
    for tensor in tensors:
        if _storage_address(tensor) in _views:
            tensor.data = Disk().place(tensor)
            release_pages([tensor])


def release_pages(tensors: Iterable[Tensor]) -> None:
    """Let the pages of mapped tensors leave memory; the values stay.

    The system writes changed pages of a file of `Disk` to the file, and changed pages of a
    `mapped_view` to the swap space.
    """
    for tensor in tensors:
        # The tensor keeps its mapping alive during the call.
        address = _storage_address(tensor)
        length = _segments.get(address)
        if length is not None:
            _libc.madvise(address, length, mmap.MADV_DONTNEED)
        elif address in _views:
            # Written pages of a `mapped_view` exist only in memory and must not be discarded.
            _libc.madvise(*_views[address], _PAGE_OUT)


def is_on_disk(tensor: Tensor) -> bool:
    """Return whether a tensor is in a file of `Disk`, to which writes go.

    False for a tensor of `mapped_view`, whose writes stay in memory.
    """
    return _storage_address(tensor) in _segments


def bytes_with_owner(tensor: Tensor, owner: Any) -> Tensor:
    """Return the bytes of a mapped tensor, as a uint8 tensor whose storage keeps `owner` alive.

    `owner` is deleted once no view of the result exists: a finalizer of `owner` tells the caller
    that the memory is no longer in use.
    """
    array: Any = (ctypes.c_uint8 * tensor.nbytes).from_address(tensor.data_ptr())
    array.owner = owner
    return torch.frombuffer(array, dtype=torch.uint8)


def pages_of(tensor: Tensor) -> tuple[int, int] | None:
    """Return (address, bytes) of the whole pages that contain the elements of a tensor of `Disk`.

    None for a tensor that is not in a file of `Disk`, or has no elements.
    """
    if not is_on_disk(tensor) or not tensor.numel():
        return None
    spans = zip(tensor.shape, tensor.stride(), strict=True)
    elements = 1 + sum((size - 1) * stride for size, stride in spans)
    first = tensor.data_ptr()
    start = first - first % mmap.PAGESIZE
    end = first + elements * tensor.element_size()
    return start, -(-(end - start) // mmap.PAGESIZE) * mmap.PAGESIZE


def advise(address: int, length: int, advice: int) -> None:
    """Call madvise for pages. The system ignores unknown advice."""
    _libc.madvise(address, length, advice)
