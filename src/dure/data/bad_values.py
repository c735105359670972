"""Descriptions of NaN and infinity in data: the column, and the first example with a bad value."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import keystr, tree_flatten_with_path

from dure.data.examples import Examples

MOST_NAMED = 3
"""Most columns that are named."""


def bad_values(examples: Any, features: Sequence[str] | None = None) -> str | None:
    """Describe the columns of the inputs, or of the targets, that have NaN or infinity.

    Args:
        examples: examples to search; datasets are not read.
        features: names of the columns of the inputs, if these are a single table.

    Returns:
        Text such as "inputs: column 2 (age) is nan in 3 of 60 examples, first in example 7"; None
        if there are no bad values.
    """
    if type(examples) is not Examples:
        return None
    names = features if features is not None else examples.columns
    parts = [("inputs", examples.inputs, names), ("targets", examples.targets, None)]
    for part, tree, known in parts:
        for path, leaf in tree_flatten_with_path(tree)[0]:
            if isinstance(leaf, Tensor) and (leaf.is_floating_point() or leaf.is_complex()):
                found = list(_columns(leaf, known))
                if found:
                    more = len(found) - MOST_NAMED
                    shown = [*found[:MOST_NAMED], *([f"{more} more columns"] if more > 0 else [])]
                    return f"{part}{keystr(path)}: {', '.join(shown)}"
    return None


def _columns(leaf: Tensor, names: Sequence[str] | None) -> Iterator[str]:
    """Describe the columns of a table, or a tensor of another shape, with bad numbers."""
    bad = ~torch.isfinite(leaf)
    if not bool(bad.any()):
        return
    if leaf.ndim != 2:
        # Tensors of other shapes count as a single column of numbers.
        yield _said(leaf.reshape(len(leaf), -1), bad.reshape(len(leaf), -1), "a number")
        return
    known = names if names is not None and len(names) == leaf.shape[1] else None
    for column in bad.any(0).nonzero().flatten().tolist():
        name = f"column {column}" if known is None else f"column {column} ({known[column]})"
        yield _said(leaf[:, column : column + 1], bad[:, column : column + 1], name)


def _said(values: Tensor, bad: Tensor, name: str) -> str:
    """Describe the bad numbers of a column. values, bad: of shape (examples, numbers)."""
    rows = bad.any(1).nonzero().flatten()
    first = int(rows[0])
    value = values[first][bad[first]][0].item()
    if len(rows) == 1:
        return f"{name} is {value} in example {first}"
    return f"{name} is {value} in {len(rows)} of {len(bad)} examples, first in example {first}"
