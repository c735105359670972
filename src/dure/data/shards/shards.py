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

from dure.data.arrangement import Arrangement, Order
from dure.data.examples import Examples, as_dtype
from dure.data.shards.files import found, opened
from dure.data.shards.windows import Rows, Windows

WINDOW_BYTES = 32 << 20
"""Of a window, where nobody says how many examples it has."""

PIECES = 32
"""Blocks that a window is made of, where files let one choose."""


class Shards(Examples):
    """Examples in files on a disk; memory holds three windows of them.

    where: a folder, all of whose files are shards, in the order of their names; or files, in the
        order in which they are named. What these are: `dure.data.shards`.
    inputs, targets: the columns: a name, or a tuple, list or dict of names, which then is the
        structure of what the model and the loss are given.
    window: examples that are in memory, and mixed, at once; by default what 32 MiB have room for.
        An epoch reads blocks from all of the files in random order, and mixes them window by
        window. If all examples fit into a window, their order is that of examples in memory.
    classes: names of the labels, if the targets are labels.

    Raises DataError for files that cannot be read, are of several kinds, or do not fit each other;
    ValueError for columns that are no names, a window of no example, and no examples.
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
                f"inputs and targets name columns, such as 'inputs', and not {names!r}: give "
                f"names, or a tuple or dict of names"
            )
        if window is not None and (type(window) is not int or window < 1):
            raise ValueError(f"window is {window!r}, but it counts examples: 1 or more")
        self.paths = found(where)
        self._columns = inputs, targets
        self._names = list(dict.fromkeys(names))
        self.shards = opened(self.paths, self._names)
        self.rows = Rows(self.shards)
        if not len(self.rows):
            raise ValueError("there are no examples: the shards have no rows")
        self.window = self._room() if window is None else window
        self.keys = None
        self.classes = list(classes) if classes is not None else None
        self.draws = False
        self._dtype: torch.dtype | None = None
        self._windows = Windows(self.rows, self.arrangement())

    def _room(self) -> int:
        """Examples that a window has room for."""
        each = sum(math.prod(row) * dtype.itemsize for dtype, row in self.rows.forms)
        return max(1, WINDOW_BYTES // max(1, each))

    def __getstate__(self) -> dict[str, Any]:
        # Files travel by their names; what is in memory is read again.
        return {**self.__dict__, "_windows": None}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._windows = Windows(self.rows, self.arrangement())

    def __len__(self) -> int:
        return len(self.rows)

    def arrangement(self) -> Arrangement:
        return self._arrangement

    @cached_property
    def _arrangement(self) -> Arrangement:
        rows = max(1, self.window // PIECES)
        blocks = [length for shard in self.shards for length in shard.blocks(rows)]
        return Arrangement(tuple(blocks), self.window)

    def order(self, part: Tensor | None = None) -> Order:
        """As in `Examples`; what the order has in a row is read ahead."""

        def planned(seed: int, epoch: int, client: int) -> Tensor:
            visit = self._arrangement.visit(seed, epoch, client, part)
            self._windows.plan(visit)
            return visit.order

        return planned

    def batch(self, indices: Tensor) -> tuple[Any, Any]:
        columns = self._windows.at(indices)
        named = dict(zip(self._names, columns, strict=True))
        inputs, targets = self._columns
        # The usual case without a walk through a tree, in every batch.
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
        # Of all columns this one alone, shard by shard.
        alone = Rows(opened(self.paths, [target]))
        return alone.between(0, len(alone))[0].long()

    def to(self, dtype: torch.dtype) -> Examples:
        if not any(form.is_floating_point and form != dtype for form, _ in self.rows.forms):
            return self
        # The windows are shared: what is in memory is in the dtype of the files.
        twin = copy.copy(self)
        twin._windows = self._windows
        twin._dtype = dtype
        return twin
