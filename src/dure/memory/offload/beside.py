"""Pages of mapped tensors are read ahead of the computation by a thread, and let go behind it.

Reading: the thread spends its time in the system, where Python does not hold it up. A tensor that
is dropped before its turn comes is passed over.

Writing: pages that are let go belong to the system, whose own threads write them while the
computation goes on. They count against a memory limit until then, and make way when memory is
wanted. Waiting for the disk (msync) would be of no use: nobody reads these files after a crash.

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
"""MADV_POPULATE_READ: the pages are read, and there when it returns; since Linux 5.14."""

_AT_ONCE = 1 << 20
"""Bytes that the system is asked to read at a time: of longer ranges it reads the beginning."""


class _Pages(NamedTuple):
    """Pages of a tensor. owner: keeps them mapped, as long as it lives."""

    owner: weakref.ref[Tensor]
    address: int
    length: int


class Beside:
    """The thread of a learner that reads; it ends with `close`."""

    def __init__(self) -> None:
        self._queue: queue.SimpleQueue[_Pages | None] = queue.SimpleQueue()
        self._ends = False
        self._thread = threading.Thread(target=self._run, name="dure reads ahead", daemon=True)
        self._thread.start()

    def ahead(self, tensors: Iterable[Tensor], owner: Tensor | None = None) -> None:
        """The pages of those that are mapped are read.

        owner: of tensors that are views, what they are views of; views may be dropped.
        """
        for tensor in tensors:
            pages = pages_of(tensor)
            if pages is not None:
                self._queue.put(_Pages(weakref.ref(tensor if owner is None else owner), *pages))

    def behind(self, tensors: Iterable[Tensor]) -> None:
        """Their pages leave this process, and the system writes them; the values stay."""
        for tensor in tensors:
            pages = pages_of(tensor)
            if pages is not None:
                advise(*pages, mmap.MADV_DONTNEED)

    def close(self) -> None:
        """Ends the thread. What it had not begun is left to the system."""
        self._ends = True
        self._queue.put(None)
        self._thread.join()

    def _run(self) -> None:
        while not self._ends:
            pages = self._queue.get()
            # Held while its pages are read: at a free address something else may lie.
            owner = None if pages is None else pages.owner()
            if pages is not None and owner is not None:
                _read(pages.address, pages.length)
            del owner


def _read(address: int, length: int) -> None:
    for start in range(0, length, _AT_ONCE):
        advise(address + start, min(_AT_ONCE, length - start), mmap.MADV_WILLNEED)
    # An older system knows no such advice: then the computation itself waits for what is to come.
    advise(address, length, _POPULATE)
