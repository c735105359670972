"""Aggregators around others: what `clipped`, `bucketing` and `mixing` share.

The text of one is its own settings, "/" and the inner one's text: `bucketing:2/krum:4`.
"""

from __future__ import annotations

from dataclasses import fields, replace
from typing import Any

from torch import Tensor

from dure.federated.aggregate.aggregator import Aggregator, Collects, Folds
from dure.federated.aggregate.median import Median
from dure.federated.aggregate.rows import Rows
from dure.randomness.turn import Turn
from dure.settings import write

MEDIAN = Median()
"""What is wrapped unless another is given."""


def text(outer: Any) -> str:
    """The text of an aggregator whose last field is `inner`."""
    default = fields(outer)[-1].default
    # what is default at the end is not written
    return f"{write(replace(outer, inner=default))}/{outer.inner}"


def combine_inner(
    inner: Aggregator, rows: Rows, dropped: int, turn: Turn, state: list[Tensor] | None
) -> tuple[list[Tensor], list[Tensor] | None]:
    """What `inner` makes of rows that an outer aggregator has made; one that folds takes them one
    after another."""
    if isinstance(inner, Collects):
        return inner.combine_finite(rows, dropped, turn, state)
    assert isinstance(inner, Folds)
    folded = inner.zero(rows.updates[0])
    for index, weight in enumerate(rows.weights):
        folded = inner.fold(folded, rows.row(index), weight)
    return inner.finish(folded), None
