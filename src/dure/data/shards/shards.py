"""`Shards`: examples on a disk."""

from __future__ import annotations

import copy
import math
from collections.abc import Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map

from dure.data.block_shuffling import BlockLayout, Order
from dure.data.examples import Examples, as_dtype
from dure.data.shards.files import found, opened
from dure.data.shards.windows import ShardRows, WindowCache

WINDOW_BYTES = 32 << 20
"""Default size of a window in bytes."""

PIECES = 32
"""Blocks of a window, for files that leave a choice."""


class Shards(Examples):
    """Examples in files on a disk; memory holds three windows of them.

    An epoch reads blocks from all of the files in random order, and shuffles them window by window.
    If all examples fit into a window, their order is that of examples in memory.

    Args:
        where: a folder, whose files of the known formats are the shards, sorted by name; or files,
            in the given order. `dure.data.shards` lists the formats; other files of a folder are
            ignored.
        inputs: column of the model's argument: a name, or a tuple, list or dict of names, for an
            argument of that structure.
        targets: column of the loss's targets, in the same way.
        window: number of examples in memory, and shuffled, at once; by default as many as fit into
            32 MiB.
        classes: names of the labels, if the targets are labels.

    Raises DataError for files that cannot be read, are of several kinds, or do not fit each other;
    ValueError for invalid names of columns, a window below 1, and no examples.
    """

    def __init__(
        self,
        where: str | Path | Sequence[str | Path],
        inputs: Any = "inputs",
        targets: Any = "targets",
        *,
        window: int | None = None,
        classes: Sequence[str] | None = None,
    ) -> None:
        names = tree_leaves((inputs, targets))
        if not names or not all(isinstance(name, str) for name in names):
            raise ValueError(
                "inputs and targets have to be names of columns, such as 'inputs', not "
                f"{names!r}: give a name, or a tuple or dict of names"
            )
        if window is not None and (type(window) is not int or window < 1):
            raise ValueError(
                f"window is {window!r}, but it has to be a number of examples, 1 or more"
            )
        self.paths = found(where)
        self._columns = inputs, targets
        self._names = list(dict.fromkeys(names))
        self.shards = opened(self.paths, self._names)
        self.rows = ShardRows(self.shards)
        if not len(self.rows):
            raise ValueError("there are no examples: the shards have no rows")
        self.window = self._room() if window is None else window
        self.keys = None
        self.classes = list(classes) if classes is not None else None
        self.draws = False
        self._dtype: torch.dtype | None = None
        self._windows = WindowCache(self.rows, self.arrangement())

    def _room(self) -> int:
        """Return how many examples fit into the default window."""
        each = sum(math.prod(row) * dtype.itemsize for dtype, row in self.rows.forms)
        return max(1, WINDOW_BYTES // max(1, each))

    def __getstate__(self) -> dict[str, Any]:
        # Files travel by their names; the windows in memory are read again.
        return {**self.__dict__, "_windows": None}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._windows = WindowCache(self.rows, self.arrangement())

    def __len__(self) -> int:
        return len(self.rows)

    def arrangement(self) -> BlockLayout:
        return self._arrangement

    @cached_property
    def _arrangement(self) -> BlockLayout:
        rows = max(1, self.window // PIECES)
        blocks = [length for shard in self.shards for length in shard.blocks(rows)]
        return BlockLayout(tuple(blocks), self.window)

    def order(self, part: Tensor | None = None) -> Order:
        """Return the order, as `Examples.order`; using it starts reading ahead."""

        def planned(seed: int, epoch: int, client: int) -> Tensor:
            visit = self._arrangement.visit(seed, epoch, client, part)
            self._windows.plan(visit)
            return visit.order

        return planned

    def batch(self, indices: Tensor) -> tuple[Any, Any]:
        columns = self._windows.at(indices)
        named = dict(zip(self._names, columns, strict=True))
        inputs, targets = self._columns
        # The usual case without a tree traversal, in every batch.
        if isinstance(inputs, str) and isinstance(targets, str):
            return as_dtype(named[inputs], self._dtype), named[targets]
        given, wanted = tree_map(named.__getitem__, self._columns)
        return as_dtype(given, self._dtype), wanted

    def labels(self) -> Tensor | None:
        return self._labels

    @cached_property
    def _labels(self) -> Tensor | None:
        _, target = self._columns
        if not isinstance(target, str):
            return None
        dtype, row = self.rows.forms[self._names.index(target)]
        if row or dtype.is_floating_point:
            return None
        # Reads only the column of the labels, shard by shard.
        alone = ShardRows(opened(self.paths, [target]))
        return alone.between(0, len(alone))[0].long()

    def to(self, dtype: torch.dtype) -> Examples:
        if not any(form.is_floating_point and form != dtype for form, _ in self.rows.forms):
            return self
        # The windows are shared: memory has the dtype of the files.
        twin = copy.copy(self)
        twin._windows = self._windows
        twin._dtype = dtype
        return twin
