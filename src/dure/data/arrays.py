"""Tensors of what people have their numbers in: arrays of numpy, frames and columns of pandas.

    array of numpy                      its memory, where torch can share it; else a copy
    what has `to_numpy` (pandas, ...)   the array of that

Nothing is imported for it: a frame is known by its method. What holds texts, dates or objects is
no tensor, and is refused with the names of its columns.
"""

from __future__ import annotations

from typing import Any

import numpy
import torch
from torch import Tensor
from torch.utils._pytree import tree_map


def as_tensors(tree: Any) -> Any:
    """The same structure with a tensor for each array, frame and column.

    Raises ValueError for one that is not of numbers or truths.
    """
    return tree_map(_as_tensor, tree)


def columns_of(inputs: Any) -> list[str] | None:
    """Return the names of a frame's columns; None for what is no frame."""
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
        # Columns of truths beside numbers come as objects; of numbers alone they do not.
        if values.dtype.kind == "O" and hasattr(leaf, "columns"):
            columns = [numpy.asarray(leaf[name].to_numpy()) for name in leaf.columns]
            values = numpy.stack(columns, axis=1)
        return _of_array(values)
    return _of_array(leaf) if isinstance(leaf, numpy.ndarray) else leaf


def _check_columns(frame: Any) -> None:
    """Raises ValueError for a frame some of whose columns are not of numbers, which it names."""
    kinds: Any = getattr(frame, "dtypes", None)
    named = dict(kinds.items()) if hasattr(kinds, "items") else {}
    strange = [
        str(name) for name, kind in named.items() if getattr(kind, "kind", "O") not in "biuf"
    ]
    if strange:
        raise ValueError(
            f"the columns {', '.join(strange)} are not of numbers: leave them out, or make numbers "
            f"of them, such as the codes of categories"
        )


def _of_array(array: Any) -> Tensor:
    if array.dtype.kind not in "biufc":
        raise ValueError(
            f"an array of {array.dtype} is no tensor: give numbers, such as the index of each class"
        )
    # torch shares neither memory that nobody may write, nor what is read backwards or byte-swapped.
    plain = numpy.ascontiguousarray(array, dtype=array.dtype.newbyteorder("="))
    return torch.from_numpy(plain if plain.flags.writeable else plain.copy())
