"""Permutations of which nothing is stored."""

from __future__ import annotations

from collections import Counter
from itertools import combinations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dure.randomness.permutation import Permutation

SEEDS = st.integers(0, 2**63 - 1)
FIRST_OF_A_MILLION = [706723, 76467, 213768, 474900]


@given(st.integers(1, 300), SEEDS)
def test_every_number_goes_to_one_of_its_own(n, seed):
    permutation = Permutation(n, seed)
    assert len(permutation) == n
    assert sorted(permutation) == list(range(n))


@given(st.integers(1, 2**62), SEEDS, st.data())
def test_the_inverse_leads_back_from_where_a_number_goes_however_many_there_are(n, seed, data):
    permutation, i = Permutation(n, seed), data.draw(st.integers(0, n - 1))
    assert 0 <= permutation[i] < n
    assert permutation.inverse(permutation[i]) == i == permutation[permutation.inverse(i)]


@given(st.integers(1, 2**62), SEEDS, st.integers(0, 40))
def test_many_at_once_are_the_same_as_one_by_one(n, seed, m):
    permutation = Permutation(n, seed)
    first = permutation.first(m)
    assert first == [permutation[i] for i in range(min(m, n))]
    assert all(type(number) is int for number in first)


@pytest.mark.parametrize(("n", "m"), [(2, 1), (3, 2), (5, 2), (7, 3), (10, 2), (16, 1)])
def test_all_subsets_are_drawn_equally_often(n, m):
    subsets = [frozenset(subset) for subset in combinations(range(n), m)]
    drawn = Counter(frozenset(Permutation(n, seed).first(m)) for seed in range(100 * len(subsets)))
    surprise = sum((drawn[subset] - 100) ** 2 / 100 for subset in subsets)
    freedom = len(subsets) - 1
    assert surprise < freedom + 5 * (2 * freedom) ** 0.5


def test_the_numbers_are_the_same_on_every_machine():
    assert Permutation(1_000_000, 7).first(4) == FIRST_OF_A_MILLION
    assert Permutation(10, 0).first(10) != Permutation(10, 1).first(10)


@pytest.mark.parametrize("i", [-1, 10])
def test_what_is_not_in_it_is_refused(i):
    with pytest.raises(IndexError, match=r"not in a permutation of 0\.\.9"):
        Permutation(10, 0)[i]
    with pytest.raises(IndexError, match=r"not in a permutation of 0\.\.9"):
        Permutation(10, 0).inverse(i)


@pytest.mark.parametrize("n", [0, -3, 2**62 + 1])
def test_it_needs_numbers(n):
    with pytest.raises(ValueError, match="it has to have 1"):
        Permutation(n, 0)
