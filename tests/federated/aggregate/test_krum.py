"""Krum and Multi-Krum."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from update_matrices import DIMENSIONS, SEEDS, close, combine, normal

from dure.federated.aggregate import Krum


def krum(values: torch.Tensor, f: int, m: int) -> torch.Tensor:
    """As the paper has it, slowly; ties by value, for two that are each other's nearest have equal
    scores."""
    n = len(values)

    def score(i: int) -> float:
        squared = [float(((values[i] - values[j]) ** 2).sum()) for j in range(n) if j != i]
        return sum(sorted(squared)[: n - f - 2])

    return values[sorted(range(n), key=lambda i: (score(i), values[i].tolist()))[:m]].mean(0)


@given(st.integers(0, 3), st.integers(0, 4), st.integers(1, 3), DIMENSIONS, SEEDS)
def test_krum_is_the_papers(f, more, m, d, seed):
    values = normal(2 * f + 3 + more, d, seed)
    result = combine(Krum(f, m), values)
    close(result, krum(values, f, m))
    if m == 1:
        assert any(torch.equal(result, value) for value in values)


def test_distances_count_squared():
    """0 has neighbours at 3 and 3, 8 has them at 0 and 5: by squares 0 is nearer to its own, by
    lengths 8."""
    values = torch.tensor([[0], [3], [-3], [8], [8]], dtype=torch.float64)
    assert float(combine(Krum(f=1), values)) == 0


def test_a_model_far_from_zero_is_chosen_by_its_neighbours():
    """Weights around 100 that differ by 10^-4, in float32: |x|² + |y|² - 2x·y has no right
    digit."""
    honest = 100 + 1e-4 * normal(8, 3000, 0)
    values = torch.cat([honest, 100 + 1e-3 * normal(2, 3000, 1)]).float()
    assert torch.equal(combine(Krum(2), values), krum(values.double(), 2, 1).float())


def test_with_f_0_and_all_chosen_it_is_the_mean():
    values = normal(7, 5, 0)
    close(combine(Krum(0, 7), values), values.mean(0))


@given(st.permutations(range(4)))
def test_of_updates_with_the_same_score_the_smaller_is_chosen(permutation):
    square = torch.tensor([[0, 0], [0, 1], [1, 0], [1, 1]], dtype=torch.float64)
    assert combine(Krum(0), square[list(permutation)]).tolist() == [0, 0]


@pytest.mark.parametrize(
    ("krum", "least"), [(Krum(0), 3), (Krum(1), 5), (Krum(4), 11), (Krum(4, 12), 16)]
)
def test_too_few_updates_are_refused_with_the_number_needed(krum, least):
    krum.check(least)
    with pytest.raises(ValueError, match=f"at least {least} updates"):
        krum.check(least - 1)
    with pytest.raises(ValueError, match=f"at least {least} updates"):
        combine(krum, normal(least - 1, 3, 0))
