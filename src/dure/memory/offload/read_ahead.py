"""Thread that reads pages of mapped tensors ahead of the computation; release of pages behind it.

Reads: the thread spends its time in the system, without Python's lock. A tensor that is dropped
before its turn is skipped.

Writes: released pages belong to the system, whose own threads write them during the computation.
They count against a memory limit until then, and are evicted when memory is needed. Waiting for
the disk (msync) would be useless: nobody reads these files after a crash.

Source: Rajbhandari et al. 2021, "ZeRO-Infinity: Breaking the GPU Memory Wall for Extreme Scale Deep
Learning" (the overlap of a step with its reads and writes).
"""

from __future__ import annotations

import mmap
import queue
import threading
import weakref
from collections.abc import Iterable
from typing import NamedTuple

from torch import Tensor

from dure.memory.mapped import advise, pages_of

_POPULATE = 22
"""MADV_POPULATE_READ: the pages are read when the call returns; since Linux 5.14."""

_AT_ONCE = 1 << 20
"""Bytes of a read request; of longer ranges the system reads only the beginning."""


class _Pages(NamedTuple):
    """Pages of a tensor. owner: keeps them mapped while it is alive."""

    owner: weakref.ref[Tensor]
    address: int
    length: int


class ReadAheadThread:
    """Reading thread of a learner, which ends with `close`."""

    def __init__(self) -> None:
        self._queue: queue.SimpleQueue[_Pages | None] = queue.SimpleQueue()
        self._ends = False
        self._thread = threading.Thread(target=self._run, name="dure reads ahead", daemon=True)
        self._thread.start()

    def ahead(self, tensors: Iterable[Tensor], owner: Tensor | None = None) -> None:
        """Read the pages of mapped tensors in the background.

        owner: the tensor whose views `tensors` are; the views may be dropped before.
        """
        for tensor in tensors:
            pages = pages_of(tensor)
            if pages is not None:
                self._queue.put(_Pages(weakref.ref(tensor if owner is None else owner), *pages))

    def behind(self, tensors: Iterable[Tensor]) -> None:
        """Let pages leave this process.

        The system writes them to their files, and the values stay.
        """
        for tensor in tensors:
            pages = pages_of(tensor)
            if pages is not None:
                advise(*pages, mmap.MADV_DONTNEED)

    def close(self) -> None:
        """End the thread. Requests that it has not begun are dropped."""
        self._ends = True
        self._queue.put(None)
        self._thread.join()

    def _run(self) -> None:
        while not self._ends:
            pages = self._queue.get()
            # Referenced while its pages are read: a free address may be mapped again.
            owner = None if pages is None else pages.owner()
            if pages is not None and owner is not None:
                _read(pages.address, pages.length)
            del owner


def _read(address: int, length: int) -> None:
    for start in range(0, length, _AT_ONCE):
        advise(address + start, min(_AT_ONCE, length - start), mmap.MADV_WILLNEED)
    # An older system does not know this advice: the computation then waits for the pages itself.
    advise(address, length, _POPULATE)
