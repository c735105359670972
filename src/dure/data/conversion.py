"""Conversion of common types of data to examples.

dure.Examples, Shards      unchanged
(inputs, targets)          tensors, NumPy arrays, pandas frames, or structures of these
a map-style dataset        of pairs or dicts, also of Hugging Face's `datasets`
an iterable dataset        with a known number of examples (`dure.data.streams`)
a DataLoader               its data, and its sampling (`dure.data.loaders`)
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, IterableDataset, TensorDataset

from dure.data.datasets import DatasetExamples
from dure.data.examples import Examples
from dure.data.loaders import examples_of
from dure.data.streams import StreamExamples

_NO_LISTS = (str, bytes, Mapping, Tensor, numpy.ndarray)
"""Types with a length and items that are no lists of pairs (input, target)."""


def as_examples(data: Any, measures: bool = False) -> Examples:
    """Return examples for any of these types. measures: whether they are test data.

    Raises ValueError for another type.
    """
    if isinstance(data, Examples):
        return data
    if isinstance(data, DataLoader):
        return examples_of(data, measures)
    if isinstance(data, TensorDataset) and len(data.tensors) == 2:
        return Examples(*data.tensors)
    if isinstance(data, (tuple, list)) and len(data) == 2:
        return Examples(*data)
    if isinstance(data, IterableDataset):
        return StreamExamples(data)
    by_index = hasattr(data, "__getitem__") and hasattr(data, "__len__")
    # Excludes types with both methods that are no lists of examples: a frame's items are columns.
    lists = by_index and not isinstance(data, _NO_LISTS) and not hasattr(data, "iloc")
    if isinstance(data, Dataset) or lists:
        return DatasetExamples(data)
    raise ValueError(
        f"data of the type {type(data).__name__} are not supported: give (inputs, targets), "
        "dure.Examples, a map-style Dataset or a DataLoader"
    )
