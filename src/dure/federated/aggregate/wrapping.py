"""Functions that the wrapping aggregators `clipped`, `bucketing` and `mixing` share."""

from __future__ import annotations

from torch import Tensor

from dure.federated.aggregate.aggregator import Aggregator, Collects, Folds
from dure.federated.aggregate.mean import finish, fold, zero
from dure.federated.aggregate.median import Median
from dure.federated.aggregate.rows import UpdateRows
from dure.randomness.seeds import RoundSeed

MEDIAN = Median()
"""Default inner rule."""


def combine_inner(
    inner: Aggregator, rows: UpdateRows, dropped: int, turn: RoundSeed, state: list[Tensor] | None
) -> tuple[list[Tensor], list[Tensor] | None]:
    """Apply `inner` to the rows of a wrapping aggregator.

    Args:
        inner: the wrapped rule; a rule that folds takes the rows one after another.
        rows: finite rows, such as means of groups.
        dropped: number of updates that were dropped before, as not finite or refused.
        turn: source of random draws.
        state: the state that the rule returned in the round before; None in the first.

    Returns:
        (combined update, state for the next round).
    """
    if isinstance(inner, Collects):
        return inner.combine_finite(rows, dropped, turn, state)
    assert isinstance(inner, Folds)
    # Each mixture is made, folded and freed before the next. Rules that fold get the weights alone;
    # buffers take their mean.
    measured = rows.measured
    folded = inner.zero(rows.updates[0][:measured])
    buffers = zero(rows.updates[0][measured:])
    for index, weight in enumerate(rows.weights):
        row = rows.row(index)
        folded = inner.fold(folded, row[:measured], weight)
        buffers = fold(buffers, row[measured:], weight)
    return [*inner.finish(folded), *finish(buffers)], None
