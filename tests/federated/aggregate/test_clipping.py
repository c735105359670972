"""Updates no longer than a norm, from zero and from the aggregate of the round before."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from update_matrices import DIMENSIONS, SEEDS, TURN, close, combine, normal, rows, vector

from dure.federated.aggregate import (
    CentredClipping,
    ClippedRows,
    ClippedUpdates,
    Krum,
    Mean,
    Median,
    clip,
)


def shortened(values: torch.Tensor, norm: float) -> torch.Tensor:
    return torch.stack([row * min(1.0, norm / max(float(row.norm()), 1e-300)) for row in values])


@given(st.integers(1, 9), DIMENSIONS, SEEDS, st.floats(0.1, 5))
def test_clipped_updates_are_no_longer_than_the_norm(m, d, seed, norm):
    values, weights = normal(m, d, seed), [float(k + 1) for k in range(m)]
    expected = torch.tensor(weights, dtype=torch.float64) @ shortened(values, norm) / sum(weights)
    close(combine(clip(norm, Mean()), values, weights), expected)
    close(combine(clip(norm, Median()), values), combine(Median(), shortened(values, norm)))


def test_zero_is_clipped_to_zero():
    zeros = torch.zeros(3, 4, dtype=torch.float64)
    assert torch.equal(combine(clip(1, Median()), zeros), zeros[0])
    assert torch.equal(combine(clip(1, Mean()), zeros, [1, 1, 1]), zeros[0])


def test_clipping_folds_around_what_folds_and_collects_around_what_collects():
    assert isinstance(clip(1, Mean()), ClippedUpdates)
    assert isinstance(clip(1, clip(2, Mean())), ClippedUpdates)
    assert isinstance(clip(1, Krum()), ClippedRows)
    assert not clip(1, Mean()).collects
    assert clip(1, Krum()).collects
    with pytest.raises(ValueError, match="clip"):
        ClippedUpdates(1.0, Median())


@pytest.mark.parametrize("broken", [math.nan, math.inf, -math.inf])
def test_a_clipped_mean_leaves_out_what_is_not_finite(broken):
    values = normal(4, 6, 0)
    values[2, 5] = broken
    kept = [0, 1, 3]
    expected = combine(ClippedUpdates(2.0), values[kept], [1.0, 2.0, 4.0])
    assert torch.equal(combine(ClippedUpdates(2.0), values, [1.0, 2.0, 3.0, 4.0]), expected)


def test_a_float32_update_of_1e38_is_clipped_and_not_lost():
    huge = [torch.full((100,), 3e38), torch.zeros(0)]
    result = ClippedUpdates(1.0).finish(
        ClippedUpdates(1.0).fold(ClippedUpdates(1.0).zero(huge), huge, 1.0)
    )
    assert float(result[0].norm()) == pytest.approx(1, rel=1e-6)


@given(st.integers(1, 9), DIMENSIONS, SEEDS, st.floats(0.1, 5), st.integers(1, 4), st.booleans())
def test_centred_clipping_is_the_papers(m, d, seed, tau, iterations, first):
    values, before = normal(m, d, seed), normal(1, d, seed + 1)[0]
    v = combine(Median(), values) if first else before
    rule = CentredClipping(tau, iterations)
    result = combine(rule, values, state=None if first else before)
    for _ in range(iterations):
        v = v + shortened(values - v, tau).mean(0)
    close(result, v)


def test_centred_clipping_remembers_its_result():
    result, state = CentredClipping(1.0).combine(rows(normal(5, 6, 0)), TURN, None)
    assert torch.equal(vector(result), vector(state))
    result[1].add_(1)  # whoever has the result may change it
    assert not torch.equal(vector(result), vector(state))


def test_a_liar_moves_centred_clipping_by_tau_over_n():
    honest, before = normal(9, 5, 0), torch.zeros(5, dtype=torch.float64)
    quiet = combine(CentredClipping(0.5), torch.cat([honest, before[None]]), state=before)
    loud = combine(CentredClipping(0.5), torch.cat([honest, before[None] + 1e30]), state=before)
    assert float((loud - quiet).norm()) == pytest.approx(0.05)


def test_with_tau_above_all_distances_it_is_the_mean():
    values = normal(8, 5, 0)
    close(combine(CentredClipping(1e9), values), values.mean(0))
