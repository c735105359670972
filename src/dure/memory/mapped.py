"""Tensors that lie in files on a disk, mapped into memory: there may be more of them than memory.

    with mapped(Disk()) as disk:       every large tensor that is made inside lies in a file
        model = make_model()
    ahead(model.parameters())          read them ahead, while something else is computed
    release(model.parameters())        their pages may leave memory; the values stay
    with passing():                    what is computed with them leaves memory by itself
        model(inputs)
    view(file, offset, shape, dtype)   a tensor that lies in a file of somebody's, such as a
                                       checkpoint: what is written into it stays in memory

What is computed is computed as ever, with the same bits: only where a tensor lies is another place.
The system writes pages behind the computation, and reads them when they are touched. So they count
as memory of the process while they are resident, and go as soon as memory is wanted elsewhere.

Files have no names, so that nothing is left of a process that was killed. A folder in memory
(tmpfs) would save nothing: it is refused.

Cost: a page that is written travels to the disk, if it lives long enough, and back if it has left.
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

from dure.machine.compiler import left_out
from dure.record.on_disk import write_at

LEAST = 1 << 20
"""Bytes from which on a tensor is worth a file of its own."""

WINDOW = 64 << 20
"""Bytes that may be made or used before what was made or used earlier leaves memory."""

_IN_MEMORY = frozenset({"tmpfs", "ramfs", "devtmpfs"})
"""Kinds of file systems whose files are memory."""

_UNSET = frozenset(
    {
        "aten::empty",
        "aten::empty_like",
        "aten::empty_strided",
        "aten::new_empty",
        "aten::new_empty_strided",
        "aten::empty_permuted",
    }
)
"""Operations that make a tensor whose values nobody may read yet."""

_ZERO = frozenset({"aten::zeros", "aten::zeros_like", "aten::new_zeros"})
"""Operations that make zeros, which a new file has already."""

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

_lock = threading.RLock()
_segments: dict[int, int] = {}
"""The mappings that are there: where each begins, and its bytes."""

_views: dict[int, tuple[int, int]] = {}
"""Those of files of others: where each tensor begins, and (where its mapping begins, its bytes)."""

_NORESERVE = getattr(mmap, "MAP_NORESERVE", 0x4000 if sys.platform == "linux" else 0)
_PAGE_OUT = 21
"""MADV_PAGEOUT of Linux: what was written into pages is kept, unlike by MADV_DONTNEED."""


class DiskError(OSError):
    """There is no disk for what should lie on one, or it is full."""


class Disk:
    """Where tensors lie.

    folder: on a disk; by default the first of the usual ones that is. Raises DiskError where there
    is none, or it is in memory.
    """

    def __init__(self, folder: str | Path | None = None) -> None:
        self.folder = _usual() if folder is None else Path(folder)
        kind = kind_of(self.folder)
        if kind in _IN_MEMORY:
            raise DiskError(
                f"{self.folder} is a {kind}, which lies in memory: name a folder on a disk"
            )

    def empty(self, shape: Iterable[int], dtype: torch.dtype) -> Tensor:
        """Zeros of this shape, in a file of their own."""
        size = torch.Size(shape)
        if not size.numel():
            return torch.empty(size, dtype=dtype)
        return self._flat(size.numel() * dtype.itemsize).view(dtype).view(size)

    def place(self, tensor: Tensor, values: bool = True) -> Tensor:
        """A tensor of this shape and these strides here. values: with its values."""
        storage = tensor.untyped_storage()
        # Bytes are the values, unless they are to be conjugated or negated when they are read.
        as_bytes = values and not tensor.is_conj() and not tensor.is_neg()
        flat = self._flat(storage.nbytes(), storage if as_bytes else None)
        own = torch.empty(0, dtype=tensor.dtype)
        own.set_(flat.untyped_storage(), 0, tensor.shape, tensor.stride())
        if values and not as_bytes:
            own.copy_(tensor)
        return own

    def _flat(self, nbytes: int, content: torch.UntypedStorage | None = None) -> Tensor:
        """So many bytes, at least one: those of `content`, or zeros."""
        length = max(1, -(-nbytes // mmap.PAGESIZE)) * mmap.PAGESIZE
        address = self._map(length, content)
        array = (ctypes.c_uint8 * length).from_address(address)
        with _lock:
            _segments[address] = length
        # torch keeps the array for as long as some tensor lies there.
        weakref.finalize(array, _unmap, address, length)
        return torch.frombuffer(array, dtype=torch.uint8, count=max(1, nbytes))

    def _map(self, length: int, content: torch.UntypedStorage | None) -> int:
        try:
            file = nameless(self.folder)
            try:
                # All of it now: a disk that is full is an error here, and later a killed process.
                os.posix_fallocate(file, 0, length)
                if content is not None:
                    _write(file, content)
                flags = mmap.PROT_READ | mmap.PROT_WRITE
                address = _libc.mmap(None, length, flags, mmap.MAP_SHARED, file, 0)
                number = ctypes.get_errno()
            finally:
                os.close(file)
        except OSError as error:
            raise DiskError(
                f"{length / 1e9:.3g} GB do not fit into {self.folder}: {error.strerror}; name "
                f"another folder"
            ) from error
        if address in (None, ctypes.c_void_p(-1).value):
            raise DiskError(f"{length / 1e9:.3g} GB cannot be mapped: {os.strerror(number)}")
        return int(address)


def view(file: int, offset: int, shape: Iterable[int], dtype: torch.dtype) -> Tensor:
    """A tensor whose values lie in an open file, from this byte on.

    They are read when they are touched. What is written stays in this process's memory, and the
    file as it is. offset: a multiple of the dtype's size. Raises DiskError where it cannot be
    mapped.
    """
    size = torch.Size(shape)
    if not size.numel():
        return torch.empty(size, dtype=dtype)
    before = offset % mmap.PAGESIZE
    length = before + size.numel() * dtype.itemsize
    # Nobody is to keep memory ready for all that could be written.
    flags = mmap.MAP_PRIVATE | _NORESERVE
    rights = mmap.PROT_READ | mmap.PROT_WRITE
    address = _libc.mmap(None, length, rights, flags, file, offset - before)
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


def nameless(folder: Path) -> int:
    """The descriptor of a new file without a name."""
    try:
        return os.open(folder, os.O_TMPFILE | os.O_RDWR | os.O_CLOEXEC, 0o600)
    # A file system that has none of the kind, or a system.
    except (OSError, AttributeError):
        file, name = tempfile.mkstemp(prefix=".dure-", dir=folder)
        os.unlink(name)
        return file


def _write(file: int, content: torch.UntypedStorage) -> None:
    """Writes the bytes into a file; as a copy into its pages, each of these would be a fault."""
    raw: Any = torch.empty(0, dtype=torch.uint8).set_(content).numpy()
    write_at(file, memoryview(raw), 0)


def _unmap(address: int, length: int) -> None:
    with _lock:
        del _segments[address]
        _libc.munmap(address, length)


def _usual() -> Path:
    """The first of the usual folders that lies on a disk. Raises DiskError where none does."""
    tried = [Path(tempfile.gettempdir()), Path("/var/tmp"), Path.cwd()]
    for folder in tried:
        if os.access(folder, os.W_OK) and kind_of(folder) not in _IN_MEMORY:
            return folder
    raise DiskError(
        f"none of {', '.join(map(str, tried))} is a folder on a disk: set TMPDIR to one"
    )


def kind_of(folder: Path) -> str:
    """The kind of file system that a folder lies in, such as ext4; "" where nobody says."""
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
        # As the system writes a blank in a name.
        where = where.replace("\\040", " ")
        if place.is_relative_to(where) and len(where) >= len(best[0]):
            best = (where, kind)
    return best[1]


class _Mapping(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Lets leave what was used, a window at a time, and moves what is made to the disk.

    disk: None moves nothing. least: bytes of the smallest that is moved. spared: bytes that are
    made before anything is moved.
    """

    def __init__(self, disk: Disk | None, least: int, spared: int = 0) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.disk = disk
        self.least = least
        self.spared = spared
        # Where what is resident lies, and its bytes.
        self._resident: dict[int, int] = {}
        self._nbytes = 0

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        given = kwargs or {}
        result = func(*args, **given)
        known = {_storage(tensor) for tensor in _tensors((args, given))}
        for address in known & _segments.keys():
            self._note(address)
        if self.disk is not None and any(map(self._is_large, _tensors(result))):
            result = self._moved(func._schema.name, result, known, self.disk)
        if self._nbytes >= WINDOW:
            self.let_go()
        return result

    def _moved(self, name: str, result: Any, known: set[int], disk: Disk) -> Any:
        """What an operation gave, on the disk. known: where its inputs lie."""
        values = name not in _UNSET and name not in _ZERO
        moved: dict[int, Tensor] = {}

        def move(tensor: Tensor) -> Tensor:
            # What shares memory with an input was made before: views, and what is changed in place.
            if not self._is_large(tensor) or _storage(tensor) in known:
                return tensor
            nbytes = tensor.untyped_storage().nbytes()
            if nbytes <= self.spared:
                self.spared -= nbytes
                return tensor
            if id(tensor) not in moved:
                moved[id(tensor)] = disk.place(tensor, values)
                self._note(_storage(moved[id(tensor)]))
            return moved[id(tensor)]

        return tree_map_only(Tensor, move, result)

    def _note(self, address: int) -> None:
        """What lies there is resident now."""
        if address not in self._resident:
            nbytes = _segments.get(address, 0)
            self._resident[address] = nbytes
            self._nbytes += nbytes

    def let_go(self) -> None:
        """What is resident leaves."""
        with _lock:
            for address in self._resident:
                # Nobody may have it any more, and another one may lie there.
                if address in _segments:
                    _libc.madvise(address, _segments[address], mmap.MADV_DONTNEED)
        self._resident.clear()
        self._nbytes = 0

    def _is_large(self, tensor: Tensor) -> bool:
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


def _storage(tensor: Tensor) -> int:
    """Where a tensor's memory begins; 0 where it has none that can be known."""
    kind = type(tensor)
    # Others, such as those of a trace, may have none, and say so by ending the process.
    if kind is not Tensor and (nn.Parameter not in kind.__mro__ or is_lazy(tensor)):
        return 0
    if tensor.layout is not torch.strided or tensor.device.type == "meta":
        return 0
    return tensor.untyped_storage().data_ptr()


@contextmanager
def mapped(disk: Disk, least: int = LEAST, spared: int = 0) -> Iterator[Disk]:
    """Inside, every tensor of `least` bytes or more that this thread makes on the CPU lies there.

    Views, what is changed in place, and what other threads make stay where they are, and so do the
    first `spared` bytes. What is used leaves memory, as in `passing`.
    """
    with _entered(_Mapping(disk, least, spared)):
        yield disk


@contextmanager
def passing() -> Iterator[None]:
    """Inside, mapped tensors that this thread uses leave memory again, a window at a time."""
    with _entered(_Mapping(None, 0)):
        yield


@contextmanager
def _entered(mapping: _Mapping) -> Iterator[None]:
    try:
        # The first mode of a process would load the compiler, which takes seconds.
        with left_out(), mapping:
            yield
    finally:
        mapping.let_go()


def is_mapped(tensor: Tensor) -> bool:
    """Whether a tensor lies in a file."""
    return _storage(tensor) in _segments or _storage(tensor) in _views


@torch.no_grad()
def leave_views(tensors: Iterable[Tensor]) -> None:
    """Those that lie in files of others move into files of their own, which take what is written.

    The objects stay the same. Raises DiskError where there is no disk for them.
    """
    for tensor in tensors:
        if _storage(tensor) in _views:
            tensor.data = Disk().place(tensor)
            release([tensor])


def release(tensors: Iterable[Tensor]) -> None:
    """The pages of those that are mapped leave this process; the system writes them down."""
    _advise(tensors, mmap.MADV_DONTNEED)


def ahead(tensors: Iterable[Tensor]) -> None:
    """The system begins to read those that are mapped."""
    _advise(tensors, mmap.MADV_WILLNEED)


def release_all() -> None:
    """As `release`, of all that is mapped."""
    with _lock:
        for address, length in list(_segments.items()):
            # An array may have been collected since the list was made.
            if address in _segments:
                _libc.madvise(address, length, mmap.MADV_DONTNEED)
        for address, length in list(_views.values()):
            _libc.madvise(address, length, _PAGE_OUT)


def _advise(tensors: Iterable[Tensor], advice: int) -> None:
    for tensor in tensors:
        # The tensor keeps its mapping while the system is told.
        address = _storage(tensor)
        length = _segments.get(address)
        if length is not None:
            _libc.madvise(address, length, advice)
        elif address in _views:
            # Of a view, pages that were written are memory: they must not be forgotten.
            own = _PAGE_OUT if advice == mmap.MADV_DONTNEED else advice
            _libc.madvise(*_views[address], own)


def in_own_file(tensor: Tensor) -> bool:
    """Whether it lies in a file of `Disk`, which keeps what is written."""
    return _storage(tensor) in _segments


def same_memory(tensor: Tensor, held: Any) -> Tensor:
    """The bytes of a mapped tensor, as a tensor whose storage holds an object for as long as it is.

    So it tells when nothing that was made from it lies there any more.
    """
    array: Any = (ctypes.c_uint8 * tensor.nbytes).from_address(tensor.data_ptr())
    array.held = held
    return torch.frombuffer(array, dtype=torch.uint8)


def pages_of(tensor: Tensor) -> tuple[int, int] | None:
    """(address, bytes) of the whole pages in which the elements of a tensor of `Disk` lie.

    None for one that lies elsewhere, in a file of somebody's too, or has no elements.
    """
    if not in_own_file(tensor) or not tensor.numel():
        return None
    spans = zip(tensor.shape, tensor.stride(), strict=True)
    elements = 1 + sum((size - 1) * stride for size, stride in spans)
    first = tensor.data_ptr()
    start = first - first % mmap.PAGESIZE
    end = first + elements * tensor.element_size()
    return start, -(-(end - start) // mmap.PAGESIZE) * mmap.PAGESIZE


def advise(address: int, length: int, advice: int) -> None:
    """Tells the system what becomes of pages; advice that it does not know is lost."""
    _libc.madvise(address, length, advice)
