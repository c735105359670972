"""Windows of blocks in memory: while batches are made of a window, a thread reads the next.

The order of an epoch is announced first (`plan`). Then a batch is made of windows in memory, or of
windows being read; the first batch of a window starts the reading of the next window. Three windows
stay in memory: the current, the next, and the previous, of which loaders may still need a batch.

Reads outside the plan, such as of test data from first to last, go to the files, and are not
cached.

Cost: three windows of memory; each block is read once an epoch.
"""

from __future__ import annotations

import threading
from bisect import bisect_right
from collections import OrderedDict
from collections.abc import Sequence
from itertools import accumulate, pairwise
from typing import Any

import numpy
import torch
from torch import Tensor

from dure.data.block_shuffling import BlockLayout, EpochOrder
from dure.data.shards.files import ShardFile

Array = numpy.ndarray[Any, numpy.dtype[numpy.int64]]

KEPT = 3
"""Number of windows in memory."""


class _Window:
    """Some blocks, which a thread reads. blocks: in the order of the disk."""

    def __init__(self, blocks: Array, rows: ShardRows, lengths: Array, ends: Array) -> None:
        self.blocks = blocks
        self._rows = rows
        self._ends = ends[blocks]
        own = lengths[blocks]
        self._first = self._ends - own
        self._starts = own.cumsum() - own
        # Allocated here and not in the thread, whose freed memory would stay with the process.
        self._columns = rows.room(int(own.sum()))
        self._error: BaseException | None = None
        # Not a daemon: at exit the process waits for it, since a thread killed inside a library
        # aborts.
        self._thread = threading.Thread(target=self._read, name="dure shards")
        self._thread.start()

    def _read(self) -> None:
        try:
            for first, end, at in zip(
                self._first.tolist(), self._ends.tolist(), self._starts.tolist(), strict=True
            ):
                self._rows.fill([column[at : at + end - first] for column in self._columns], first)
        except BaseException as error:
            self._error = error

    def has(self, blocks: Array) -> bool:
        """Return whether all of these blocks are in the window."""
        places = self.blocks.searchsorted(blocks).clip(max=len(self.blocks) - 1)
        return bool((self.blocks[places] == blocks).all())

    def rows(self, places: Array, blocks: Array) -> list[Tensor]:
        """Return the rows at these indices, which are in these blocks, once they are read."""
        self._thread.join()
        if self._error is not None:
            raise self._error
        own = self.blocks.searchsorted(blocks)
        here = torch.from_numpy(places - self._first[own] + self._starts[own])
        return [column.index_select(0, here) for column in self._columns]


class ShardRows:
    """The rows of all shards, one shard after another."""

    def __init__(self, shards: Sequence[ShardFile]) -> None:
        self.shards = shards
        self.forms = shards[0].forms
        self._starts = [0, *accumulate(shard.rows for shard in shards)]

    def __len__(self) -> int:
        return self._starts[-1]

    def between(self, first: int, stop: int) -> list[Tensor]:
        """Return the rows first … stop-1 of every column."""
        into = self.room(stop - first)
        self.fill(into, first)
        return into

    def room(self, rows: int) -> list[Tensor]:
        """Return uninitialised tensors for `rows` rows of every column."""
        return [torch.empty((rows, *row), dtype=dtype) for dtype, row in self.forms]

    def fill(self, into: Sequence[Tensor], first: int) -> None:
        """Fill the tensors with the rows from `first` on of every column."""
        stop = first + len(into[0])
        shard = bisect_right(self._starts, first) - 1
        at = first
        while at < stop:
            start = self._starts[shard]
            end = min(stop, self._starts[shard + 1])
            if at < end:
                own = [column[at - first : end - first] for column in into]
                self.shards[shard].fill(own, at - start)
            at = end
            shard += 1

    def at(self, places: Tensor) -> list[Tensor]:
        """Return the rows at these indices; consecutive rows are read at once."""
        order = torch.argsort(places)
        ordered = places[order]
        breaks = (ordered.diff() > 1).nonzero().flatten() + 1
        bounds = [0, *breaks.tolist(), len(ordered)]
        runs = [self._run(ordered[begin:end]) for begin, end in pairwise(bounds)]
        columns = [torch.cat(pieces) for pieces in zip(*runs, strict=True)]
        back = torch.empty_like(order)
        back[order] = torch.arange(len(order))
        return [column.index_select(0, back) for column in columns]

    def _run(self, run: Tensor) -> list[Tensor]:
        """Return consecutive rows, some of them perhaps more than once."""
        first = int(run[0])
        columns = self.between(first, int(run[-1]) + 1)
        return [column.index_select(0, run - first) for column in columns]


class WindowCache:
    """The windows of some shards in memory."""

    def __init__(self, rows: ShardRows, arrangement: BlockLayout) -> None:
        self.rows = rows
        self._lengths = numpy.array(arrangement.blocks)
        self._ends = self._lengths.cumsum()
        self._lock = threading.Lock()
        self._planned: list[Array] = []
        self._window_of: Array | None = None
        self._kept: OrderedDict[tuple[int, int], _Window] = OrderedDict()
        self._plans = 0

    def plan(self, visit: EpochOrder) -> None:
        """Announce the order of an epoch, and so its windows."""
        planned = [numpy.sort(blocks.numpy()) for blocks in visit.windows]
        window_of = numpy.full(len(self._lengths), -1)
        for number, blocks in enumerate(planned):
            window_of[blocks] = number
        with self._lock:
            self._planned = planned
            self._window_of = window_of
            self._plans += 1

    def at(self, places: Tensor) -> list[Tensor]:
        """Return the rows at these indices, of every column."""
        if len(places) == 0:
            return self.rows.room(0)
        # As NumPy arrays: for a few numbers they take a third of the time of tensors.
        wanted = places.numpy()
        if self._window_of is None or _is_run(wanted):
            return self.rows.at(places)
        blocks = self._ends.searchsorted(wanted, side="right")
        with self._lock:
            found = self._holding(blocks)
        if found is None:
            return self.rows.at(places)
        # Windows are immutable, so the rest needs no lock.
        if len(found) == 1:
            return found[0][1].rows(wanted, blocks)
        pieces = [window.rows(wanted[here], blocks[here]) for here, window in found]
        back = torch.from_numpy(numpy.concatenate([here for here, _ in found]).argsort())
        return [torch.cat(columns).index_select(0, back) for columns in zip(*pieces, strict=True)]

    def _holding(self, blocks: Array) -> list[tuple[Array, _Window]] | None:
        """Return the windows of these blocks, each with the positions that it has.

        None if a block is not in the plan. The windows, and their successors, are at least being
        read.
        """
        assert self._window_of is not None
        numbers = self._window_of[blocks]
        first = int(numbers.min())
        if first < 0:
            return None
        # Usually all are in a single window.
        each = [first] if first == int(numbers.max()) else numpy.unique(numbers).tolist()
        found: list[tuple[Array, _Window]] = []
        for number in each:
            here = (numbers == number).nonzero()[0]
            found.append((here, self._window(number, blocks[here])))
        # The least recently used window is dropped.
        while len(self._kept) > KEPT:
            self._kept.popitem(last=False)
        return found

    def _window(self, number: int, blocks: Array) -> _Window:
        """Return a window with these blocks, which are all in a single window of the plan."""
        key = self._plans, number
        if key not in self._kept:
            # A window of the previous plan may have them, whose last batches are still to be made.
            for other, window in self._kept.items():
                if other[0] < self._plans and window.has(blocks):
                    return window
            self._begin(number)
        self._kept.move_to_end(key)
        if number + 1 < len(self._planned):
            self._begin(number + 1)
        return self._kept[key]

    def _begin(self, number: int) -> None:
        """Start to read a window of the plan, unless it is in memory."""
        key = self._plans, number
        if key not in self._kept:
            self._kept[key] = _Window(self._planned[number], self.rows, self._lengths, self._ends)


def _is_run(places: Array) -> bool:
    """Return whether these are several consecutive indices."""
    count = len(places)
    if count < 2 or int(places[-1] - places[0]) != count - 1:
        return False
    return bool((numpy.diff(places) == 1).all())
