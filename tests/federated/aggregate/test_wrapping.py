"""Aggregators around others: buckets and mixtures of updates."""

from __future__ import annotations

from itertools import chain

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from update_matrices import DIMENSIONS, SEEDS, TURN, close, combine, normal, tied

from dure.federated.aggregate import Bucketing, Krum, Mean, Median, Mixing, TrimmedMean, clip
from dure.randomness.seeds import RoundSeed


@given(st.integers(1, 9), st.integers(1, 4), DIMENSIONS, SEEDS)
def test_bucketing_combines_the_means_of_buckets(m, s, d, seed):
    values, rule = normal(m, d, seed), Bucketing(s, Median())
    buckets = rule.buckets(m, TURN)
    assert sorted(chain(*buckets)) == list(range(m))
    assert [len(bucket) for bucket in buckets[:-1]] == [s] * (len(buckets) - 1)
    close(
        combine(rule, values),
        combine(Median(), torch.stack([values[bucket].mean(0) for bucket in buckets])),
    )


@given(st.integers(1, 9), st.integers(1, 4), DIMENSIONS, SEEDS)
def test_bucketing_around_the_mean_is_the_weighted_mean(m, s, d, seed):
    values, weights = normal(m, d, seed), [float(k + 1) for k in range(m)]
    expected = torch.tensor(weights, dtype=torch.float64) @ values / sum(weights)
    close(combine(Bucketing(s, Mean()), values, weights), expected)


def test_buckets_are_drawn_anew_in_every_turn():
    assert Bucketing(2).buckets(12, RoundSeed(0, 0)) != Bucketing(2).buckets(12, RoundSeed(0, 1))


@given(st.integers(0, 3), st.integers(1, 5), DIMENSIONS, SEEDS)
def test_mixing_combines_means_of_nearest_neighbours(f, more, d, seed):
    values = normal(2 * f + more, d, seed)
    mixed = [values[(values - x).norm(dim=1).argsort()[: len(values) - f]].mean(0) for x in values]
    close(combine(Mixing(f, Median()), values), combine(Median(), torch.stack(mixed)))


def test_mixing_with_f_0_is_the_mean_with_equal_weights():
    values = normal(5, 6, 0)
    close(combine(Mixing(0, Median()), values, [1, 2, 3, 4, 5]), values.mean(0))


@given(st.integers(5, 9), st.integers(1, 3), SEEDS)
def test_of_neighbours_that_are_as_near_the_smaller_are_mixed(m, d, seed):
    values = tied(m, d, seed)
    order = torch.randperm(m, generator=torch.Generator().manual_seed(seed))
    close(combine(Mixing(2, Median()), values), combine(Mixing(2, Median()), values[order]))


@pytest.mark.parametrize("bad", [float("nan"), 1e30])
def test_three_wrappers_deep_liars_do_not_get_through(bad):
    rule = Mixing(2, clip(100.0, Bucketing(2, TrimmedMean(0.3))))
    honest = normal(12, 5, 0)
    liars = torch.full((2, 5), bad, dtype=torch.float64)
    assert float(combine(rule, torch.cat([liars, honest])).norm()) < 3


def test_what_was_dropped_counts_among_the_liars_of_the_inner_rule():
    """Of f = 2 liars one is dropped: Krum and mixing go on with f = 1 of the others."""
    values = normal(8, 3, 0)
    broken = torch.cat([values, torch.full((1, 3), torch.nan, dtype=torch.float64)])
    for with_2, with_1 in (
        (Krum(2), Krum(1)),
        (Mixing(2, Krum(2)), Mixing(1, Krum(1))),
        (TrimmedMean(0.23), TrimmedMean(0.13)),
    ):
        assert torch.equal(combine(with_2, broken), combine(with_1, values))


def test_too_few_updates_for_the_inner_rule_are_refused():
    Bucketing(2, Krum(1)).check(9)
    with pytest.raises(ValueError, match="8 updates are 4 buckets; krum:1 needs at least 5"):
        Bucketing(2, Krum(1)).check(8)
    with pytest.raises(ValueError, match="mixing:2/median needs at least 5"):
        Mixing(2, Median()).check(4)
    with pytest.raises(ValueError, match="krum:2 needs at least 7"):
        Mixing(1, clip(1, Krum(2))).check(6)
