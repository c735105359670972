"""Examples read one by one, from any object with a length and items by index.

    item                         inputs and targets
    a pair (input, target)       these
    a dict                       the column `labels`, or `label`, is the target, and the other
                                 columns are the inputs, as in Hugging Face's `datasets`

A batch is made by `collate`, as in a DataLoader: torch's own, or a function of the items that, for
example, pads items of different lengths. Its result is a pair or a dict in the same way. Each rank
collates its own part of a joint batch, and pads to the longest item of that part.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from functools import cached_property
from typing import Any

import numpy
import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves
from torch.utils.data import (
    ConcatDataset,
    Dataset,
    IterableDataset,
    StackDataset,
    Subset,
    default_collate,
)

from dure.data.examples import LABELS, Examples, as_dtype
from dure.data.keys import keys_of
from dure.errors import DataError, ExampleError, described

Collate = Callable[[Any], Any]
"""collate(items) returns a batch of the items."""


class DatasetExamples(Examples):
    """Examples read one by one from a map-style dataset of pairs or dicts.

    The dataset's transforms are applied at every reading. keys: owner of each example. collate:
    makes a batch of items; None is torch's `default_collate`. keeps_labels: in a dict the inputs
    keep the labels, for models that compute their own loss.
    """

    def __init__(
        self,
        dataset: Any,
        keys: Sequence[Any] | None = None,
        collate: Collate | None = None,
        keeps_labels: bool = False,
    ) -> None:
        items: Any = dataset
        self.dataset = items
        self.collate = collate
        self.keeps_labels = keeps_labels
        _check_by_index(dataset)
        self.draws = True
        self.keys = keys_of(keys) if keys is not None else None
        if self.keys is not None and len(self.keys) != len(items):
            raise ValueError(f"there are {len(items)} examples, but {len(self.keys)} keys")
        classes = getattr(dataset, "classes", None)
        self.classes = list(map(str, classes)) if isinstance(classes, (list, tuple)) else None
        self._dtype: torch.dtype | None = None

    def over(self, dataset: Any, keys: Sequence[Any] | None) -> DatasetExamples:
        """Return the examples of another dataset, collated in the same way."""
        return DatasetExamples(dataset, keys, self.collate, self.keeps_labels)

    def __len__(self) -> int:
        return len(self.dataset)

    def batch(self, indices: Tensor) -> tuple[Any, Any]:
        places = indices.tolist()
        return self._batch_of(places, [self._item(index) for index in places])

    def _batch_of(self, places: Sequence[int], items: Sequence[Any]) -> tuple[Any, Any]:
        """Return the batch of items that were read. places: index of each item, for errors."""
        if self.collate is not None:
            batch = self._pair_of(self._collated(self.collate, items))
        else:
            # Checked here: `default_collate` would not say which example it cannot collate.
            for index, item in zip(places, items, strict=True):
                _check_item(index, item)
            batch = self._pair_of(self._collated(_by_default, items))
        inputs, targets = batch
        return as_dtype(inputs, self._dtype), targets

    def first_item(self) -> Any:
        """Return the first item of the dataset."""
        return self._item(0)

    def inputs_of(self, items: Sequence[Any]) -> Any:
        """Return the inputs of a batch of new items like those of the dataset."""
        return self._batch_of(range(len(items)), items)[0]

    @staticmethod
    def _collated(collate: Collate, items: Sequence[Any]) -> Any:
        try:
            return collate(list(items))
        except Exception as error:
            what = (
                f"{len(items)} items cannot be combined into a batch; if they differ in length, "
                "give a collate_fn that pads, as with a DataLoader"
                if collate is _by_default
                else f"collate_fn failed on a batch of {len(items)}"
            )
            raise DataError(f"{what}: {described(error)}") from error

    def _pair_of(self, batch: Any) -> tuple[Any, Any]:
        """Return (inputs, targets) of a collated batch. Raises ValueError for anything else."""
        if isinstance(batch, Mapping):
            name = _labels_in(batch)
            rest = dict(batch) if self.keeps_labels else _without(batch, name)
            # A single input column is passed bare, and not as a dict, unless `collate` made the
            # dict.
            alone = self.collate is None and not self.keeps_labels and len(rest) == 1
            return next(iter(rest.values())) if alone else rest, batch[name]
        if isinstance(batch, (tuple, list)) and len(batch) == 2:
            return batch[0], batch[1]
        raise ValueError(
            f"collate_fn returned a {type(batch).__name__}: a batch has to be (inputs, targets), "
            "or a dict with the column labels"
        )

    def labels(self) -> Tensor | None:
        return self._labels

    @cached_property
    def _labels(self) -> Tensor | None:
        targets = getattr(self.dataset, "targets", None)
        if targets is None:
            # An example is read to determine the type of targets; all are read only if targets are
            # numbers. Items that only `collate` can turn into pairs have no visible labels.
            if self.collate is not None and not _is_pair(self._item(0)):
                return None
            if not self._is_number(self._target(0)):
                return None
            targets = list(map(self._target, range(len(self))))
        try:
            # Any content of a dataset's `targets` (lists, arrays, tensors) counts, if it is a
            # number for each example.
            labels = torch.as_tensor(targets)
        except (TypeError, ValueError, RuntimeError):  # names, structures, tensors of many elements
            return None
        return labels.long() if labels.ndim == 1 and not labels.is_floating_point() else None

    def _target(self, index: int) -> Any:
        item = self._item(index)
        return item[_labels_in(item)] if isinstance(item, Mapping) else item[1]

    def _item(self, index: int) -> Any:
        """Return the dataset's item at an index. Raises ExampleError, which names the index."""
        try:
            return self.dataset[index]
        except Exception as error:
            raise ExampleError(
                f"the dataset cannot give example {index}: {described(error)}"
            ) from error

    @staticmethod
    def _is_number(target: Any) -> bool:
        return isinstance(target, (int, numpy.integer)) or (
            isinstance(target, Tensor) and target.ndim == 0
        )

    def to(self, dtype: torch.dtype) -> Examples:
        twin = copy.copy(self)
        twin._dtype = dtype
        return twin

    def with_labels(self) -> DatasetExamples:
        """Return a copy whose inputs keep the labels, if items are dicts."""
        twin = copy.copy(self)
        twin.keeps_labels = True
        return twin


def _by_default(items: Sequence[Any]) -> Any:
    return default_collate([_with_tensors(item) for item in items])


def _check_by_index(dataset: Any) -> None:
    """Raise ValueError for a dataset that cannot be read by index."""
    kind = type(dataset)
    # torch's own class has the method, which only raises.
    by_index = getattr(kind, "__getitem__", Dataset.__getitem__) is not Dataset.__getitem__
    if isinstance(dataset, IterableDataset) or not by_index or not hasattr(kind, "__len__"):
        raise ValueError(
            f"a {kind.__name__} can only be read from its start, but a dataset needs __len__ and "
            "__getitem__; for an iterable dataset give dure.StreamExamples(dataset, length=...)"
        )
    # A dataset made of a stream, such as a subset of it, cannot be read by index either.
    for part in _parts_of(dataset):
        _check_by_index(part)
    try:
        length = len(dataset)
    except Exception as error:
        raise ValueError(
            f"the dataset has no length ({described(error)}), and a dataset without a length "
            "cannot be divided by index"
        ) from error
    if length == 0:
        raise ValueError("there are no examples: the dataset has length 0")


def _parts_of(dataset: Any) -> Sequence[Any]:
    """Return the datasets that a torch dataset combines."""
    if isinstance(dataset, Subset):
        return [dataset.dataset]
    if isinstance(dataset, (ConcatDataset, StackDataset)):
        return [one for one in tree_leaves(dataset.datasets) if isinstance(one, Dataset)]
    return []


def _labels_in(item: Mapping[str, Any]) -> str:
    """Return the name of the target column. Raises ValueError if there is none."""
    found = next((name for name in LABELS if name in item), None)
    if found is None:
        raise ValueError(
            "a dict needs a column labels for the targets; it has "
            f"{', '.join(map(str, item)) or 'none'}"
        )
    return found


def _without(item: Mapping[str, Any], name: str) -> dict[str, Any]:
    return {key: value for key, value in item.items() if key != name}


def _is_pair(item: Any) -> bool:
    if isinstance(item, Mapping):
        return any(name in item for name in LABELS)
    return isinstance(item, (tuple, list)) and len(item) == 2


def _with_tensors(item: Any) -> Any:
    """Turn a dict's lists of numbers into tensors; torch would take them for tuples of columns."""
    if not isinstance(item, Mapping):
        return item
    return {
        name: torch.as_tensor(value) if isinstance(value, list) else value
        for name, value in item.items()
    }


def _check_item(index: int, item: Any) -> None:
    """Raise ValueError for an item that is neither a pair nor a dict with labels."""
    if not isinstance(item, Mapping):
        _check_pair(index, item)
        return
    _labels_in(item)
    texts = [str(name) for name, value in item.items() if isinstance(value, str)]
    if texts:
        raise ValueError(
            f"item {index} of the dataset has texts in {', '.join(texts)}: remove these columns, "
            "or convert them to numbers, as a tokenizer does"
        )


def _check_pair(index: int, item: Any) -> None:
    """Raise ValueError for an item that is no pair of an input and a target."""
    # Checked here: the error of `default_collate` would not name the example.
    if not isinstance(item, (tuple, list)) or len(item) != 2:
        what = f"{type(item).__name__}{f' of {len(item)}' if hasattr(item, '__len__') else ''}"
        raise ValueError(
            f"item {index} of the dataset is a {what}: give (input, target), each a tensor, a "
            "tuple or a dict"
        )
    if isinstance(item[1], str):
        raise ValueError(
            f"the target of item {index} is the str {item[1]!r}: give the index of its class"
        )
