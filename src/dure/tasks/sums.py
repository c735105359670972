"""Sums of a metric from several parties, as lists of numbers: reports of clients on their data.

    a pair (sum, count)    two numbers, with an empty form
    a `SumMetric`          its sums, flattened, and their form: the shapes of tensors, and the
                           structure of tuples, lists and dicts

They are added, and finished once: the number is that of all examples together, as if a single party
had measured them. A function that returns a number has no sums.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import msgspec
import torch
from torch import Tensor

from dure.contracts.metric import Metric, SumMetric, as_number, ratio
from dure.errors import described

MOST_FORM = 10_000
"""Most characters of a form, which is untrusted."""


class MetricSums(NamedTuple):
    """Flattened sums, and their form; "" for a pair."""

    values: list[float]
    form: str = ""


class SumLeaf(NamedTuple):
    """Placeholder for a tensor or number of this shape in a structure of sums."""

    shape: tuple[int, ...]


def form_of(tree: Any) -> str | None:
    """Return the form of sums, given as a structure of leaves.

    None for a structure that text cannot express, such as an object of a user's own class.
    """
    try:
        return msgspec.json.encode(_told(tree)).decode()
    except TypeError:
        return None


def _told(tree: Any) -> Any:
    if type(tree) is SumLeaf:
        return list(tree.shape)
    if type(tree) is tuple:
        return {"tuple": [_told(part) for part in tree]}
    if type(tree) is list:
        return {"list": [_told(part) for part in tree]}
    if type(tree) is dict and all(isinstance(key, str) for key in tree):
        return {"dict": {key: _told(part) for key, part in tree.items()}}
    raise TypeError(f"no text tells what a {type(tree).__name__} is")


def added(metric: Metric | None, rows: Sequence[Sequence[float]], form: str) -> float:
    """Return the number of all the sums together, added in their order.

    metric: None for the loss, which is a pair. form: common to all rows, which have equal lengths.
    Raises ValueError for sums that do not fit the metric, or that it cannot finish.
    """
    total = torch.tensor(list(rows), dtype=torch.float64)
    # One after another, in the order of the clients.
    whole = torch.zeros(total.shape[1], dtype=torch.float64)
    for row in total:
        whole += row
    if not isinstance(metric, SumMetric):
        if form or len(whole) != 2:
            raise ValueError("a sum and a count are two numbers")
        return ratio(*whole.tolist())
    tree = _shaped(form, whole)
    try:
        return as_number(metric.compute(tree))
    except Exception as error:
        raise ValueError(described(error)) from error


def _shaped(form: str, flat: Tensor) -> Any:
    """Return flattened sums in their original structure and shapes."""
    if len(form) > MOST_FORM:
        raise ValueError(f"a form has at most {MOST_FORM} characters")
    try:
        tree = msgspec.json.decode(form)
        rest = iter(flat.tolist())
        shaped = _tree(tree, rest)
    except (msgspec.DecodeError, RecursionError) as error:
        raise ValueError(f"it is no form of sums: {error}") from error
    if next(rest, None) is not None:
        raise ValueError("there are more numbers than the form has places")
    return shaped


def _tree(told: Any, rest: Iterator[float]) -> Any:
    match told:
        case list() if all(type(extent) is int and extent >= 0 for extent in told):
            # As many as there are: a product of large extents allocates no memory.
            count = math.prod(told)
            values = [value for _, value in zip(range(count), rest, strict=False)]
            if len(values) != count:
                raise ValueError("there are fewer numbers than the form has places")
            return torch.tensor(values, dtype=torch.float64).view(told)
        case {"tuple": [*parts]}:
            return tuple(_tree(part, rest) for part in parts)
        case {"list": [*parts]}:
            return [_tree(part, rest) for part in parts]
        case {"dict": dict(parts)}:
            return {key: _tree(part, rest) for key, part in parts.items()}
    raise ValueError("it is no form of sums")
