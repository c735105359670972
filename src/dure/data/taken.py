"""Examples of what people have.

dure.Examples, Shards      these
(inputs, targets)          tensors, arrays of numpy, frames of pandas, or structures of these
a map-style dataset        of pairs or dicts, also one of Hugging Face's `datasets`
an iterable dataset        which says how many examples it has (`dure.data.streams`)
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
"""What has a length and items, and is no list of pairs (input, target)."""


def as_examples(data: Any, measures: bool = False) -> Examples:
    """Examples of any of these. measures: they are test data.

    Raises ValueError if `data` is none of them.
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
    # These have both, and are no lists of examples. A frame has columns, and no rows, by index.
    lists = by_index and not isinstance(data, _NO_LISTS) and not hasattr(data, "iloc")
    if isinstance(data, Dataset) or lists:
        return DatasetExamples(data)
    raise ValueError(
        f"a {type(data).__name__} cannot be trained on: give (inputs, targets), dure.Examples, a "
        f"map-style Dataset or a DataLoader"
    )
