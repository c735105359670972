"""Which clients take part in a round."""

from __future__ import annotations

import math
from collections import Counter
from itertools import combinations, pairwise
from statistics import fmean, variance

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from dure.federated.server.sampling import (
    Poisson,
    Selection,
    Uniform,
    Weighted,
    clients_per_round,
    uniform,
)


@given(st.integers(0, 99), st.integers(0, 99), st.integers(1, 60), st.floats(0.001, 1.0))
def test_a_round_s_clients_are_a_pure_function_without_replacement(seed, round, clients, fraction):
    chosen = uniform(seed, round, clients, fraction)
    torch.rand(3)
    assert chosen == uniform(seed, round, clients, fraction)
    assert len(chosen) == clients_per_round(clients, fraction)
    assert chosen == sorted(set(chosen))
    assert set(chosen) <= set(range(clients))


@pytest.mark.parametrize(
    ("clients", "fraction", "expected"),
    [
        (100, 0.1, 10),
        (100, 0.001, 1),
        (10, 1.0, 10),
        (1, 0.1, 1),
        (10, 0.29, 3),
        (3, 0.7, 2),
        (7, 1 / 7, 1),
    ],
)
def test_a_round_has_max_of_c_k_and_1_clients(clients, fraction, expected):
    assert clients_per_round(clients, fraction) == expected


def test_rounds_and_seeds_draw_anew_and_everybody_has_a_turn():
    assert len({tuple(uniform(0, round, 50, 0.1)) for round in range(10)}) > 5
    assert uniform(0, 0, 50, 0.1) != uniform(1, 0, 50, 0.1)
    turns = [client for round in range(200) for client in uniform(0, round, 10, 0.3)]
    assert set(turns) == set(range(10))
    assert max(map(turns.count, range(10))) < 2 * min(map(turns.count, range(10)))


Draws = list[tuple[int, int]]
DRAWS = 3000
OVER_ROUNDS = [(0, round) for round in range(DRAWS)]
OVER_SEEDS = [(seed, 0) for seed in range(DRAWS)]
EITHER = pytest.mark.parametrize("draws", [OVER_ROUNDS, OVER_SEEDS], ids=["rounds", "seeds"])
SIZES = [1, 2, 3, 5, 9, 20]


def chosen(
    selection: Selection, seed: int, round: int, sizes: list[int], fraction: float
) -> list[int]:
    """The clients of a round in which all are there."""
    order = selection.order(seed, round, 0, sizes)
    return [
        order(position) for position in range(selection.wanted(seed, round, len(sizes), fraction))
    ]


@pytest.mark.parametrize("likely", [0, 1, 20, 21, 60, 1000])
def test_how_many_are_likely_to_be_asked_does_not_change_the_order(likely: int) -> None:
    for kind in (Uniform(), Weighted()):
        one, other = kind.order(7, 3, 1, [5] * 90), kind.order(7, 3, 1, [5] * 90, likely)
        assert [one(at) for at in range(90)] == [other(at) for at in range(90)]


def expected_to_be(count: int, p: float) -> bool:
    """Whether a count of independent draws is within four deviations of what the probability
    says."""
    return abs(count - DRAWS * p) < 4 * math.sqrt(DRAWS * p * (1 - p))


@EITHER
def test_one_client_by_weight_is_each_as_often_as_it_has_examples(draws: Draws) -> None:
    counts = Counter(client for draw in draws for client in chosen(Weighted(), *draw, SIZES, 0.1))
    assert counts.total() == DRAWS
    for client, size in enumerate(SIZES):
        assert expected_to_be(counts[client], size / sum(SIZES))


@EITHER
def test_the_second_by_weight_is_one_of_those_left_as_often_as_it_has_examples(
    draws: Draws,
) -> None:
    counts = Counter(tuple(chosen(Weighted(), *draw, SIZES, 0.33)) for draw in draws)
    total = sum(SIZES)
    for first in range(len(SIZES)):
        for second in set(range(len(SIZES))) - {first}:
            p = SIZES[first] / total * SIZES[second] / (total - SIZES[first])
            assert expected_to_be(counts[first, second], p), (first, second)


@EITHER
def test_alike_means_every_pair_as_often(draws: Draws) -> None:
    counts = Counter(
        pair
        for draw in draws
        for pair in combinations(sorted(chosen(Uniform(), *draw, SIZES, 0.5)), 2)
    )
    assert all(expected_to_be(counts[pair], 1 / 5) for pair in combinations(range(6), 2))


@EITHER
@pytest.mark.parametrize("fraction", [0.1, 0.5])
def test_with_poisson_every_client_tosses_its_own_coin(draws: Draws, fraction: float) -> None:
    rounds = [chosen(Poisson(), *draw, SIZES, fraction) for draw in draws]
    alone = Counter(client for some in rounds for client in some)
    pairs = Counter(pair for some in rounds for pair in combinations(sorted(some), 2))
    assert all(expected_to_be(alone[client], fraction) for client in range(6))
    assert all(expected_to_be(pairs[pair], fraction**2) for pair in combinations(range(6), 2))


@EITHER
@pytest.mark.parametrize(("clients", "fraction"), [(12, 0.3), (40, 0.05)])
def test_with_poisson_the_number_of_clients_is_binomial(
    draws: Draws, clients: int, fraction: float
) -> None:
    counts = [Poisson().wanted(*draw, clients, fraction) for draw in draws]
    spread = clients * fraction * (1 - fraction)
    assert abs(fmean(counts) - clients * fraction) < 4 * math.sqrt(spread / DRAWS)
    excess = (
        1 - 6 * fraction * (1 - fraction)
    ) / spread  # kurtosis, which says how well a variance is measured
    assert abs(variance(counts) - spread) < 4 * spread * math.sqrt((2 + excess) / DRAWS)
    off = [count - clients * fraction for count in counts]
    assert abs(fmean(one * after for one, after in pairwise(off))) < 4 * spread / math.sqrt(DRAWS)
    for count in range(5):
        p = math.comb(clients, count) * fraction**count * (1 - fraction) ** (clients - count)
        assert expected_to_be(counts.count(count), p)
