"""Rules that go coordinate by coordinate: median, trimmed mean, and Bulyan on top of Krum."""

from __future__ import annotations

import itertools
import statistics

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from update_matrices import DIMENSIONS, SEEDS, close, combine, normal, tied

from dure.federated.aggregate import Bulyan, Median, TrimmedMean, UpdateRows
from dure.federated.aggregate.bulyan import around_the_median
from dure.randomness.seeds import RoundSeed

MATRICES = st.sampled_from([normal, tied])


@given(st.integers(1, 15), DIMENSIONS, SEEDS, MATRICES)
def test_the_median_is_that_of_each_column(m, d, seed, matrix):
    values = matrix(m, d, seed)
    expected = torch.tensor(
        [statistics.median(column) for column in values.T.tolist()], dtype=torch.float64
    )
    result = combine(Median(), values)
    assert torch.equal(result, expected)
    if m % 2:
        assert (result == values).any(0).all()


def test_the_median_of_an_even_number_of_halves_is_the_mean_of_the_middle_ones():
    updates = [[torch.tensor([value], dtype=torch.float16)] for value in (59968, 40000, 59968, 0)]
    (result,), _ = Median().combine(UpdateRows(updates, [1] * 4), RoundSeed(0, 0))
    assert float(result) == 49984  # the sum of both is no float16


@given(st.integers(1, 15), DIMENSIONS, SEEDS, MATRICES, st.floats(0, 0.49))
def test_the_trimmed_mean_leaves_out_as_many_at_each_end(m, d, seed, matrix, beta):
    values = matrix(m, d, seed)
    cut = int(beta * m)
    expected = [statistics.fmean(sorted(column)[cut : m - cut]) for column in values.T.tolist()]
    close(combine(TrimmedMean(beta), values), torch.tensor(expected, dtype=torch.float64))


def test_a_share_that_is_a_whole_number_of_updates_trims_as_many():
    assert [
        TrimmedMean(beta).trimmed(m) for beta, m in ((0.29, 100), (0.1, 30), (0.3, 10), (0.25, 7))
    ] == [29, 3, 3, 1]


def bulyan(values: torch.Tensor, f: int) -> list[float]:
    """Bulyan as the paper has it, slowly; ties by value, for two that are each other's nearest have
    equal scores."""
    n, left, chosen = len(values), list(range(len(values))), []
    while len(chosen) < n - 2 * f:
        score = {}
        for i in left:
            others = sorted(float((values[i] - values[j]).square().sum()) for j in left if j != i)
            score[i] = sum(others[: max(len(left) - f - 2, 1)])
        best = min(left, key=lambda i: (score[i], values[i].tolist()))
        left.remove(best)
        chosen.append(best)
    result = []
    for column in values[chosen].T.tolist():
        median = statistics.median(column)
        nearest = sorted(column, key=lambda value: abs(value - median))[: len(chosen) - 2 * f]
        result.append(statistics.fmean(nearest))
    return result


@given(st.integers(0, 2), st.integers(0, 4), DIMENSIONS, SEEDS)
def test_bulyan_is_the_papers(f, more, d, seed):
    values = normal(4 * f + 3 + more, d, seed)
    close(combine(Bulyan(f), values), torch.tensor(bulyan(values, f), dtype=torch.float64))


@given(st.integers(1, 9), st.integers(1, 9), SEEDS, MATRICES)
def test_the_window_around_the_median_holds_the_closest_values(n, keep, seed, matrix):
    values, keep = matrix(n, 6, seed), min(keep, n)
    for column, result in zip(
        values.T.tolist(), around_the_median(values.clone(), keep).tolist(), strict=True
    ):
        median = statistics.median(column)
        least = min(
            sum(abs(v - median) for v in some) for some in itertools.combinations(column, keep)
        )
        best = [
            statistics.fmean(some)
            for some in itertools.combinations(column, keep)
            if sum(abs(v - median) for v in some) <= least + 1e-9
        ]
        assert any(result == pytest.approx(mean) for mean in best)
        if matrix is tied:  # without rounding: of two as close the smaller
            assert result == pytest.approx(min(best))


@given(st.integers(1, 3), st.integers(0, 3), DIMENSIONS, SEEDS, st.sampled_from([50.0, 1e6, 1e30]))
def test_with_outliers_bulyan_stays_between_honest_values(f, more, d, seed, far):
    honest = normal(3 * f + 3 + more, d, seed)
    outliers = far * normal(f, d, seed + 1).sign()
    result = combine(Bulyan(f), torch.cat([outliers, honest]))
    assert (result >= honest.amin(0)).all()
    assert (result <= honest.amax(0)).all()
