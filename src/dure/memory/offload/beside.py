"""Pages of mapped tensors are read ahead of the computation, and written behind it, by threads.

One thread reads and one writes, so that what is read next never waits for what is written. Both
spend their time in the system, where Python does not hold them up. A tensor that is dropped before
its turn comes is passed over: what nobody needs any more is not written.

Source: Rajbhandari et al. 2021, "ZeRO-Infinity: Breaking the GPU Memory Wall for Extreme Scale Deep
Learning" (the overlap of a step with its reads and writes).
"""

from __future__ import annotations

import mmap
import queue
import threading
import weakref
from collections.abc import Callable, Iterable
from typing import NamedTuple

from torch import Tensor

from dure.memory.mapped import advise, pages_of, write_down

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
    """The two threads of a learner; they end with `close`.

    Raises, at the next call, what a thread has met: DiskError where something cannot be written.
    """

    def __init__(self) -> None:
        self._reader = _Worker("dure reads ahead", _read)
        self._writer = _Worker("dure writes behind", _write)

    def ahead(self, tensors: Iterable[Tensor], owner: Tensor | None = None) -> None:
        """The pages of those that are mapped are read.

        owner: of tensors that are views, what they are views of; views may be dropped.
        """
        self._reader.give(tensors, owner)

    def behind(self, tensors: Iterable[Tensor], owner: Tensor | None = None) -> None:
        """They are written, and leave this process; the values stay."""
        self._writer.give(tensors, owner)

    def close(self) -> None:
        """Ends both threads. What they had not begun is left to the system."""
        self._reader.close()
        self._writer.close()


class _Worker:
    """A thread that does one thing to pages, in the order in which they come."""

    def __init__(self, name: str, work: Callable[[int, int], None]) -> None:
        self._work = work
        self._queue: queue.SimpleQueue[_Pages | None] = queue.SimpleQueue()
        self._error: Exception | None = None
        self._ends = False
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def give(self, tensors: Iterable[Tensor], owner: Tensor | None) -> None:
        if self._error is not None:
            raise self._error
        for tensor in tensors:
            pages = pages_of(tensor)
            if pages is not None:
                self._queue.put(_Pages(weakref.ref(owner if owner is not None else tensor), *pages))

    def close(self) -> None:
        self._ends = True
        self._queue.put(None)
        self._thread.join()

    def _run(self) -> None:
        while not self._ends:
            pages = self._queue.get()
            if pages is None:
                return
            # Held while its pages are worked on: at a free address something else may lie.
            owner = pages.owner()
            if owner is None:
                continue
            try:
                self._work(pages.address, pages.length)
            except Exception as error:
                self._error = error
                return
            finally:
                del owner


def _read(address: int, length: int) -> None:
    for start in range(0, length, _AT_ONCE):
        advise(address + start, min(_AT_ONCE, length - start), mmap.MADV_WILLNEED)
    # An older system knows no such advice: then the computation itself waits for what is to come.
    advise(address, length, _POPULATE)


def _write(address: int, length: int) -> None:
    write_down(address, length)
    advise(address, length, mmap.MADV_DONTNEED)
