"""Memory that a step has freed is kept for the next one.

glibc's malloc gives freed memory back to the system: large blocks at once, and the end of the heap
when much of it is free. The next step asks for it again, and then every page costs a fault in which
the kernel clears it. While a model trains, the heap is not cut, by `mallopt`; blocks of 32 MB and
more stay the system's. Measured on two virtual cores, 60 steps in a process of their own, medians
of eight runs with and eight without: a transformer of 3.7 million parameters took 45,000 faults and
0.5 s of the kernel's time where it had taken 230,000 and 1.3 s, of 22 s in all; an MLP of 10
million 56,000 and 0.6 s where it had taken 270,000 and 1.1 s, of 8 s. Their peak memory was the
same.

A user who has set malloc's thresholds in the environment (`MALLOC_TRIM_THRESHOLD_`,
`MALLOC_MMAP_THRESHOLD_`, `GLIBC_TUNABLES`) keeps them, in ranks too. Other allocators and systems
do not listen. After the run what is free is given back, and the thresholds are those that glibc
comes to once it has seen large blocks come and go.

A block of 2 MB and more can lie in huge pages of as much each, which one fault maps. torch asks for
them if `THP_MEM_ALLOC_ENABLE` is 1 when it makes its first large tensor: `in_huge_pages` sets it
for processes that dure starts, and for the command line. Blocks of 32 MB and more, which are mapped
anew in each step, gain most: a step of a convolution on pictures of 64 x 64 took 0.36 s where it
had taken 0.54 s, an MLP's and a transformer's steps were no slower, and the heap has fewer holes
(one worker's AdamW over 75 MB of weights grew by 340 MB where it had grown by 400 MB; medians of
three runs each).

The server of a federation whose clients are elsewhere trains nothing. There large blocks are mapped
by themselves and go when they are freed, so that it needs memory for what it has now. The server of
split learning trains its part of the model as any process does. It is the same while a model is
made in files (`dure.memory.undivided`): what has moved there would leave holes in the heap.

Sources: mallopt(3) and the GNU C library's manual, "Malloc Tunable Parameters"; for huge pages
Documentation/admin-guide/mm/transhuge.rst of Linux and `c10/core/alignment.h` of PyTorch.
"""

from __future__ import annotations

import ctypes
import os
import threading
from collections.abc import Iterator, MutableMapping
from contextlib import AbstractContextManager, contextmanager, suppress

from dure.machine.limits import rooms

_TRIM_THRESHOLD = -1
_MMAP_THRESHOLD = -3
"""Names of `mallopt`'s parameters."""

_KEPT = (2**31 - 1, 32 << 20)
"""The thresholds while a model trains, in bytes.

Of what is free at the end of the heap, above which the heap is cut; and of a block, above which the
block is mapped by itself. Larger blocks stay mapped: in the heap an aligned one seldom fits where
another was, and the heap would grow.
"""

_RETURNED = (4 << 20, 1 << 20)
"""The same while a process serves: models and their parts are never in the heap."""

_USUAL = (64 << 20, 32 << 20)
"""The same after a run: the most to which glibc raises them by itself, when large blocks go.

To set one ends this raising, so they cannot be left to glibc again.
"""

_OWN = (
    "MALLOC_TRIM_THRESHOLD_",
    "MALLOC_MMAP_THRESHOLD_",
    "MALLOC_MMAP_MAX_",
    "MALLOC_TOP_PAD_",
    "GLIBC_TUNABLES",
)
"""Variables by which a user sets these thresholds."""

_HUGE = "THP_MEM_ALLOC_ENABLE"
"""The variable by which torch is told to ask for huge pages."""

_lock = threading.Lock()
_wanted: list[tuple[int, int]] = []
"""The thresholds of the blocks that are entered, in their order."""


def in_huge_pages(environment: MutableMapping[str, str]) -> None:
    """Has torch ask for huge pages in a process of this environment that has no large tensor yet.

    What a user has said stands.
    """
    environment.setdefault(_HUGE, "1")


def memory_kept() -> AbstractContextManager[None]:
    """Keeps freed memory inside the block.

    Blocks may overlap, in one thread or in several: the one that was entered last counts.
    """
    return _thresholds(*_KEPT)


def memory_returned() -> AbstractContextManager[None]:
    """The opposite, likewise: for a process that serves, and while a model is made in files."""
    return _thresholds(*_RETURNED)


@contextmanager
def _thresholds(trim: int, mmap: int) -> Iterator[None]:
    # A user's own settings stand.
    if any(name in os.environ for name in _OWN):
        yield
        return
    # The thresholds are the whole process's: the last block puts them back.
    with _lock:
        # What was tried before leaves holes: they are the system's until they are filled.
        give_back()
        _wanted.append((trim, mmap))
        _set(trim, mmap)
    try:
        yield
    finally:
        with _lock:
            _wanted.remove((trim, mmap))
            _set(*(_wanted[-1] if _wanted else _USUAL))
            if not _wanted or (trim, mmap) == _RETURNED:
                give_back()


def give_back() -> None:
    """Gives what is free now to the system: what was needed once, and not for every step."""
    with suppress(AttributeError, OSError, TypeError):  # another C library
        ctypes.CDLL(None).malloc_trim(0)


class _Mallinfo(ctypes.Structure):
    """What glibc says of its heaps, in its order; fordblks are the bytes that are free in them."""

    _fields_ = [
        (name, ctypes.c_size_t)
        for name in (
            *("arena", "ordblks", "smblks", "hblks", "hblkhd"),
            *("usmblks", "fsmblks", "uordblks", "fordblks", "keepcost"),
        )
    ]


def free_in_heap() -> int:
    """Bytes that this process has and does not use: what is made next may lie there."""
    with suppress(AttributeError, OSError, TypeError):  # another C library, or an old one
        mallinfo = ctypes.CDLL(None).mallinfo2
        mallinfo.restype = _Mallinfo
        return int(mallinfo().fordblks)
    return 0


def available_memory() -> int | None:
    """Bytes that processes here can still have without swapping; None where nobody tells.

    What the system says, or the least that a limit leaves (`dure.machine.limits`).
    """
    return min((room.nbytes for room in rooms()), default=None)


def _set(trim: int, mmap: int) -> None:
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (AttributeError, OSError, TypeError):  # another C library
        return
    mallopt(_TRIM_THRESHOLD, trim)
    mallopt(_MMAP_THRESHOLD, mmap)
