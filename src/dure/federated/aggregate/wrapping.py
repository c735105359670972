"""Aggregators around others: what `clipped`, `bucketing` and `mixing` share."""

from __future__ import annotations

from torch import Tensor

from dure.federated.aggregate.aggregator import Aggregator, Collects, Folds
from dure.federated.aggregate.mean import finish, fold, zero
from dure.federated.aggregate.median import Median
from dure.federated.aggregate.rows import Rows
from dure.randomness.turn import Turn

MEDIAN = Median()
"""What is wrapped unless another is given."""


def combine_inner(
    inner: Aggregator, rows: Rows, dropped: int, turn: Turn, state: list[Tensor] | None
) -> tuple[list[Tensor], list[Tensor] | None]:
    """What `inner` makes of rows that an outer aggregator has made.

    One that folds takes them one after another.
    """
    if isinstance(inner, Collects):
        return inner.combine_finite(rows, dropped, turn, state)
    assert isinstance(inner, Folds)
    # A mixture is made, folded and forgotten before the next one. Rules that fold get the weights
    # alone; buffers have their mean.
    measured = rows.measured
    folded = inner.zero(rows.updates[0][:measured])
    buffers = zero(rows.updates[0][measured:])
    for index, weight in enumerate(rows.weights):
        row = rows.row(index)
        folded = inner.fold(folded, row[:measured], weight)
        buffers = fold(buffers, row[measured:], weight)
    return [*inner.finish(folded), *finish(buffers)], None
