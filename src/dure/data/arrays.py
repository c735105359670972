"""Convert NumPy arrays and pandas frames and columns to tensors.

    NumPy array                         shares its memory, if torch supports that; else a copy
    object with `to_numpy` (pandas)     the array of that method

No library is imported: a frame is recognised by its method. Texts, dates and objects cannot become
tensors, and are refused with the names of their columns.
"""

from __future__ import annotations

from typing import Any

import numpy
import torch
from torch import Tensor
from torch.utils._pytree import tree_map


def as_tensors(tree: Any) -> Any:
    """Return the same structure with a tensor for each array, frame and column.

    Raises ValueError for a leaf that has neither numbers nor bools.
    """
    return tree_map(_as_tensor, tree)


def columns_of(inputs: Any) -> list[str] | None:
    """Return the names of a frame's columns; None for anything else."""
    if isinstance(inputs, Tensor) or not hasattr(inputs, "to_numpy"):
        return None
    columns = getattr(inputs, "columns", None)
    return None if columns is None else [str(name) for name in columns]


def _as_tensor(leaf: Any) -> Any:
    if isinstance(leaf, Tensor):
        return leaf
    if hasattr(leaf, "to_numpy"):
        _check_columns(leaf)
        values = numpy.asarray(leaf.to_numpy())
        # Bool columns beside numbers give an object array, so the columns are stacked.
        if values.dtype.kind == "O" and hasattr(leaf, "columns"):
            columns = [numpy.asarray(leaf[name].to_numpy()) for name in leaf.columns]
            values = numpy.stack(columns, axis=1)
        return _of_array(values)
    return _of_array(leaf) if isinstance(leaf, numpy.ndarray) else leaf


def _check_columns(frame: Any) -> None:
    """Raise ValueError with the names of a frame's columns that are not numeric."""
    kinds: Any = getattr(frame, "dtypes", None)
    named = dict(kinds.items()) if hasattr(kinds, "items") else {}
    strange = [
        str(name) for name, kind in named.items() if getattr(kind, "kind", "O") not in "biuf"
    ]
    if strange:
        raise ValueError(
            f"the columns {', '.join(strange)} are not numeric: leave them out, or convert them "
            "to numbers, such as the codes of categories"
        )


def _of_array(array: Any) -> Tensor:
    if array.dtype.kind not in "biufc":
        raise ValueError(
            f"an array of {array.dtype} cannot be a tensor: give numbers, such as the index of "
            "each class"
        )
    # torch shares neither read-only memory, nor negative strides or swapped bytes: copy.
    plain = numpy.ascontiguousarray(array, dtype=array.dtype.newbyteorder("="))
    return torch.from_numpy(plain if plain.flags.writeable else plain.copy())
