"""Keep the memory that a step has freed for the next step.

glibc's malloc returns freed memory to the system: large blocks at once, and the end of the heap
when much of it is free. The next step asks for the memory again, and every page then costs a fault
in which the kernel clears the page. During training the heap is not trimmed (`mallopt`); blocks of
32 MB and more are still mapped separately. Measured on two virtual cores, 60 steps in a separate
process, medians of eight runs with and eight without: a transformer of 3.7 million parameters took
45,000 faults and 0.5 s of kernel time, before 230,000 and 1.3 s, of 22 s in total; an MLP of 10
million parameters took 56,000 and 0.6 s, before 270,000 and 1.1 s, of 8 s. The peak memory was the
same.

A user's thresholds of malloc in the environment (`MALLOC_TRIM_THRESHOLD_`,
`MALLOC_MMAP_THRESHOLD_`, `GLIBC_TUNABLES`) have priority, in ranks too. Other allocators and
systems ignore the calls. After the run free memory is returned, and the thresholds are set to the
values that glibc reaches by itself after large blocks were allocated and freed.

A block of 2 MB and more can lie in huge pages of 2 MB, each of which a single fault maps. torch
asks for huge pages if `THP_MEM_ALLOC_ENABLE` is 1 when it creates its first large tensor:
`enable_huge_pages` sets the variable for processes that dure starts, and for the command line.
Blocks of 32 MB and more, which are mapped again in each step, gain most: a step of a convolution on
pictures of 64 x 64 took 0.36 s, before 0.54 s; the steps of an MLP and a transformer were no
slower, and the heap has fewer holes (AdamW of a worker over 75 MB of weights grew by 340 MB, before
by 400 MB; medians of three runs each).

The server of a federation with remote clients trains nothing. There large blocks are mapped
separately and are unmapped when they are freed, so that the server needs memory only for its
present data. The server of split learning trains its part of the model like any process. The same
thresholds apply while a model is created in files (`dure.memory.file_backed_init`): tensors that
moved to files would leave holes in the heap.

Sources: mallopt(3) and the GNU C library's manual, "Malloc Tunable Parameters"; for huge pages
Documentation/admin-guide/mm/transhuge.rst of Linux and `c10/core/alignment.h` of PyTorch.
"""

from __future__ import annotations

import ctypes
import os
import threading
from collections.abc import Iterator, MutableMapping
from contextlib import AbstractContextManager, contextmanager, suppress

from dure.machine.limits import remaining_memory

_TRIM_THRESHOLD = -1
_MMAP_THRESHOLD = -3
"""Parameter numbers of `mallopt`."""

_KEPT = (2**31 - 1, 32 << 20)
"""Trim and mmap thresholds during training, in bytes.

The heap is trimmed if its free end exceeds the first threshold; a block above the second is mapped
separately. Larger blocks stay mapped: in the heap an aligned block seldom fits the place of another
block, and the heap would grow.
"""

_RETURNED = (4 << 20, 1 << 20)
"""Thresholds while a process serves: models and their parts are never in the heap."""

_USUAL = (64 << 20, 32 << 20)
"""Thresholds after a run: the maximum to which glibc raises them when large blocks are freed.

Setting a threshold ends this adjustment for good, so glibc cannot resume it.
"""

_OWN = (
    "MALLOC_TRIM_THRESHOLD_",
    "MALLOC_MMAP_THRESHOLD_",
    "MALLOC_MMAP_MAX_",
    "MALLOC_TOP_PAD_",
    "GLIBC_TUNABLES",
)
"""Environment variables by which a user sets these thresholds."""

_HUGE = "THP_MEM_ALLOC_ENABLE"
"""Environment variable that makes torch ask for huge pages."""

_lock = threading.Lock()
_wanted: list[tuple[int, int]] = []
"""Thresholds of the active context managers, in the order of entry."""


def enable_huge_pages(environment: MutableMapping[str, str]) -> None:
    """Make torch ask for huge pages in a new process with this environment.

    The process must not have a large tensor yet. A value that the user has set stays.
    """
    environment.setdefault(_HUGE, "1")


def keep_freed_memory() -> AbstractContextManager[None]:
    """Keep freed memory inside the context.

    Contexts may overlap, in a thread or in several: the context entered last counts.
    """
    return _thresholds(*_KEPT)


def return_freed_memory() -> AbstractContextManager[None]:
    """Return freed memory inside the context: for a server, and while a model is created in files.

    Contexts may overlap as in `keep_freed_memory`.
    """
    return _thresholds(*_RETURNED)


@contextmanager
def _thresholds(trim: int, mmap: int) -> Iterator[None]:
    # The user's settings have priority.
    if any(name in os.environ for name in _OWN):
        yield
        return
    # The thresholds are the whole process's: the last block puts them back.
    with _lock:
        # Earlier allocations leave holes in the heap: return them to the system now.
        trim_heap()
        _wanted.append((trim, mmap))
        _set(trim, mmap)
    try:
        yield
    finally:
        with _lock:
            _wanted.remove((trim, mmap))
            _set(*(_wanted[-1] if _wanted else _USUAL))
            if not _wanted or (trim, mmap) == _RETURNED:
                trim_heap()


def trim_heap() -> None:
    """Return free heap memory to the system."""
    with suppress(AttributeError, OSError, TypeError):  # another C library
        ctypes.CDLL(None).malloc_trim(0)


class _Mallinfo(ctypes.Structure):
    """Heap statistics of glibc, in glibc's order; fordblks counts the free bytes."""

    _fields_ = [
        (name, ctypes.c_size_t)
        for name in (
            *("arena", "ordblks", "smblks", "hblks", "hblkhd"),
            *("usmblks", "fsmblks", "uordblks", "fordblks", "keepcost"),
        )
    ]


def free_in_heap() -> int:
    """Return the free bytes in this process's heap, available to the next allocations."""
    with suppress(AttributeError, OSError, TypeError):  # another C library, or an old one
        mallinfo = ctypes.CDLL(None).mallinfo2
        mallinfo.restype = _Mallinfo
        return int(mallinfo().fordblks)
    return 0


def available_memory() -> int | None:
    """Return the bytes that processes here can still allocate without swapping, or None if unknown.

    The value is the minimum over all limits (`dure.machine.limits`).
    """
    return min((room.nbytes for room in remaining_memory()), default=None)


def _set(trim: int, mmap: int) -> None:
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (AttributeError, OSError, TypeError):  # another C library
        return
    mallopt(_TRIM_THRESHOLD, trim)
    mallopt(_MMAP_THRESHOLD, mmap)
