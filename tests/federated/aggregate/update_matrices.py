"""Updates for tests of aggregators: matrices of one update a row, and back from tensors to
vectors."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from hypothesis import strategies as st
from torch import Tensor

from dure.federated.aggregate import Aggregator, Collects, Folds, UpdateRows
from dure.randomness.seeds import RoundSeed

TURN = RoundSeed(seed=3, number=5)
SEEDS = st.integers(0, 10_000)
DIMENSIONS = st.integers(1, 12)


def normal(m: int, d: int, seed: int) -> Tensor:
    return torch.randn(m, d, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def tied(m: int, d: int, seed: int) -> Tensor:
    """Small whole numbers: many values, distances and whole updates are equal."""
    return torch.randint(-2, 3, (m, d), generator=torch.Generator().manual_seed(seed)).double()


def update(vector: Tensor) -> list[Tensor]:
    """The vector as two tensors, of which the first may be empty."""
    return [vector[: len(vector) // 2], vector[len(vector) // 2 :]]


def rows(
    matrix: Tensor, weights: Sequence[float] | None = None, numbers: int = 2**20
) -> UpdateRows:
    return UpdateRows([update(row) for row in matrix], weights or [1.0] * len(matrix), numbers)


def vector(tensors: Sequence[Tensor]) -> Tensor:
    return torch.cat([tensor.reshape(-1) for tensor in tensors])


def combine(
    aggregator: Aggregator,
    matrix: Tensor,
    weights: Sequence[float] | None = None,
    state: Tensor | None = None,
    numbers: int = 2**20,
    turn: RoundSeed = TURN,
) -> Tensor:
    """What the aggregator makes of the rows of a matrix, as one vector."""
    if isinstance(aggregator, Folds):
        folded = aggregator.zero(update(matrix[0]))
        for row, weight in zip(matrix, weights or [1.0] * len(matrix), strict=True):
            folded = aggregator.fold(folded, update(row), weight)
        return vector(aggregator.finish(folded))
    assert isinstance(aggregator, Collects)
    before = None if state is None else update(state)
    return vector(aggregator.combine(rows(matrix, weights, numbers), turn, before)[0])


def close(one: Tensor, other: Tensor, tolerance: float = 1e-9) -> None:
    torch.testing.assert_close(one, other, rtol=tolerance, atol=tolerance)
