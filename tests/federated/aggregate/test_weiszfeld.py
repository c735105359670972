"""The geometric median, its means of groups, and its smoothed and weighted form."""

from __future__ import annotations

import math
from collections.abc import Callable
from itertools import chain, pairwise

import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from update_matrices import DIMENSIONS, SEEDS, TURN, close, combine, normal, rows, tied, update

from dure.federated.aggregate import RFA, GeometricMedian, GeometricMedianOfMeans
from dure.federated.aggregate.weiszfeld import coordinates, descent
from dure.randomness.seeds import RoundSeed

Matrix = Callable[[int, int, int], torch.Tensor]
POINTS = st.integers(1, 12)


def objective(values: torch.Tensor, z: torch.Tensor, weights: torch.Tensor | None = None) -> float:
    distances = (values - z).norm(dim=1)
    return float(distances.sum() if weights is None else weights @ distances)


def excess(values: torch.Tensor, z: torch.Tensor) -> float:
    """How far the pull of all others exceeds what the points at z withstand: 0 where z is the
    geometric median."""
    towards = values - z
    distances = towards.norm(dim=1)
    here = distances <= 1e-12 * values.norm(dim=1)
    pull = (towards[~here] / distances[~here, None]).sum(0)
    return max(float(pull.norm()) - int(here.sum()), 0.0)


@given(POINTS, DIMENSIONS, SEEDS)
def test_nothing_pulls_at_the_geometric_median(m, d, seed):
    values = normal(m, d, seed)
    assert excess(values, combine(GeometricMedian(), values)) < 1e-6 * m


@given(POINTS, DIMENSIONS, SEEDS, st.sampled_from([normal, tied]))
def test_its_objective_is_no_worse_than_anywhere_else(m, d, seed, matrix):
    values = matrix(m, d, seed)
    result = combine(GeometricMedian(), values)
    found = objective(values, result)
    nearby = result + 1e-4 * normal(5, d, seed + 1)
    for other in (*values, values.mean(0), values.median(0).values, torch.zeros(d), *nearby):
        assert found <= objective(values, other) * (1 + 1e-10)


def no_less_than(values: torch.Tensor, z: torch.Tensor) -> float:
    """A bound that the objective is nowhere below: (sum of u_i·x_i) for any u_i no longer than 1
    that sum to 0.

    They are chosen to make it high: as unit vectors from z to the points, and at z so that they sum
    to 0.
    """
    towards = values - z
    distances = towards.norm(dim=1, keepdim=True)
    here = distances <= 1e-13 * (1 + values.norm(dim=1).max())
    u = torch.where(here, 0.0, towards / torch.where(here, 1.0, distances))
    balance = -u.sum(0) / max(int(here.sum()), 1)
    u = torch.where(here, balance / max(float(balance.norm()), 1.0), u)
    u = u - u.mean(0)
    u = u / max(float(u.norm(dim=1).max()), 1.0)
    return float((u * towards).sum())


@given(POINTS, DIMENSIONS, SEEDS, st.sampled_from([normal, tied]))
def test_its_objective_is_the_least_to_a_relative_accuracy_of_1e_12(
    m: int, d: int, seed: int, matrix: Matrix
) -> None:
    """But where the others pull at an update by barely more than it withstands: it only creeps away
    from there."""
    values = matrix(m, d, seed)
    assume(not any(1e-9 < excess(values, value) < 5e-3 for value in values))
    result = combine(GeometricMedian(), values)
    found = objective(values, result)
    assert found - no_less_than(values, result) <= 1e-12 * found + 1e-15 * m


@given(POINTS, DIMENSIONS, SEEDS, st.sampled_from([0.0, 0.3]))
def test_the_objective_falls_with_every_step(m, d, seed, smoothing):
    values = normal(m, d, seed)
    weights = (
        torch.rand(m, dtype=torch.float64, generator=torch.Generator().manual_seed(seed)) + 0.1
    )
    start = values.mean(0)

    def smoothed(z: torch.Tensor) -> float:
        distances = (values - z).norm(dim=1)
        inside = (distances.square() / smoothing + smoothing) / 2 if smoothing else distances
        return float(weights @ torch.where(distances < smoothing, inside, distances))

    path = descent(values.numpy(), weights.numpy(), start.numpy(), smoothing)
    heights = [smoothed(start), *(smoothed(torch.from_numpy(c) @ values) for c in path)]
    assert all(after <= before * (1 + 1e-12) for before, after in pairwise(heights))


@given(st.integers(1, 15), DIMENSIONS, SEEDS)
def test_on_a_line_it_is_the_median(m, d, seed):
    places = normal(1, m, seed)[0]
    origin, direction = normal(2, d, seed + 1)
    result = combine(GeometricMedian(), origin + places[:, None] * direction)
    place = float((result - origin) @ direction / direction.square().sum())
    close(result, origin + place * direction, 1e-7)
    ordered = places.sort().values.tolist()
    assert ordered[(m - 1) // 2] - 1e-7 <= place <= ordered[m // 2] + 1e-7


def test_an_update_at_which_the_others_pull_just_as_much_as_it_withstands():
    values = torch.tensor([[0, 2], [2, 0], [1, 1], [0, -2]], dtype=torch.float64)
    assert abs(excess(values, values[2])) < 1e-12
    close(combine(GeometricMedian(), values), values[2], 1e-12)
    with_outlier = torch.cat([values, torch.tensor([[1e30, 0], [-1e30, 0]], dtype=torch.float64)])
    close(combine(GeometricMedian(), with_outlier), values[2], 1e-12)


@given(st.integers(1, 5), SEEDS)
def test_of_all_minima_between_two_updates_it_is_the_same_in_any_order(half, seed):
    generator = torch.Generator().manual_seed(seed)
    places = torch.randn(2 * half, dtype=torch.float64, generator=generator).sort().values
    line = places[:, None] * torch.tensor([[3.0, -4.0]], dtype=torch.float64)
    found = combine(GeometricMedian(), line)
    ordered = torch.randperm(2 * half, generator=generator)
    close(combine(GeometricMedian(), line[ordered]), found, 1e-9)
    close(combine(GeometricMedian(), -line), -found, 1e-9)
    place = float(found[0]) / 3
    assert places[half - 1] - 1e-9 <= place <= places[half] + 1e-9
    if half == 1:
        close(found, line.mean(0), 1e-9)


def test_it_ends_at_an_update_only_where_that_is_the_median():
    corners = torch.tensor([[0, 0], [4, 0], [0, 4]], dtype=torch.float64)
    inside = torch.cat([corners, torch.tensor([[1.0, 1.0]], dtype=torch.float64)])
    assert torch.equal(combine(GeometricMedian(), inside), inside[3])
    started_at_a_point = torch.tensor(
        [[0, 0], [0, 0], [1, 0], [0, 1], [1, 1], [1, 1.1]], dtype=torch.float64
    )
    assert excess(started_at_a_point, combine(GeometricMedian(), started_at_a_point)) < 1e-6


def test_copies_of_an_update_count_each():
    values = torch.cat([normal(1, 6, 0).expand(5, 6), 3 + normal(4, 6, 1)])
    close(combine(GeometricMedian(), values), values[0])


@pytest.mark.parametrize("far", [1e6, 1e30, 1e148])
def test_an_outlier_pulls_with_unit_force_from_wherever_it_is(far):
    honest, directions = normal(13, 40, 0), normal(6, 40, 1)
    values = torch.cat([honest, far * directions])
    result = combine(GeometricMedian(), values)
    towards = honest - result
    pull = (towards / towards.norm(dim=1, keepdim=True)).sum(0) + (
        directions / directions.norm(dim=1, keepdim=True)
    ).sum(0)
    assert float(pull.norm()) < (1e-4 if far == 1e6 else 1e-8)


@given(POINTS, DIMENSIONS, SEEDS, st.integers(1, 60))
def test_few_coordinates_keep_all_distances(m, d, seed, numbers):
    values = normal(m, d, seed)
    values[0] *= 1e30
    centre = normal(1, d, seed + 1)[0]
    points = torch.from_numpy(coordinates(rows(values, numbers=numbers), update(centre)))
    assert points.shape == (m, min(m, d))
    close(points.norm(dim=1), (values - centre).norm(dim=1))
    close(torch.cdist(points, points), torch.cdist(values, values), 1e-9)


@given(st.integers(1, 8), st.integers(0, 8), DIMENSIONS, SEEDS)
def test_of_means_is_the_geometric_median_of_the_groups_means(k, more, d, seed):
    m = k + more
    values, rule = normal(m, d, seed), GeometricMedianOfMeans(k)
    groups = rule.groups(m, TURN)
    assert sorted(chain(*groups)) == list(range(m))
    assert {len(group) for group in groups} <= {m // k, -(-m // k)}
    means = torch.stack([values[group].mean(0) for group in groups])
    close(combine(rule, values), combine(GeometricMedian(), means), 1e-7)


def test_with_one_group_it_is_the_mean_by_weight():
    values, weights = normal(6, 9, 0), [1.0, 5, 2, 2, 40, 3]
    expected = torch.tensor(weights, dtype=torch.float64) @ values / sum(weights)
    close(combine(GeometricMedianOfMeans(1), values, weights), expected, 1e-13)


def test_groups_are_drawn_anew_in_every_turn():
    rule = GeometricMedianOfMeans(4)
    drawn = [rule.groups(12, RoundSeed(seed, number)) for seed in (0, 1) for number in (0, 1)]
    assert all(one != other for i, one in enumerate(drawn) for other in drawn[:i])
    assert rule.groups(12, RoundSeed(0, 0)) == drawn[0]


@pytest.mark.parametrize(("liars", "holds"), [(2, True), (4, True), (5, False)])
def test_ten_groups_of_twenty_withstand_four_liars_each_in_a_group_of_its_own_and_not_five(
    liars, holds
):
    values, rule = normal(20, 30, 0), GeometricMedianOfMeans(10)
    for group in rule.groups(20, TURN)[:liars]:
        values[group[0]] = 1e6
    error = float(combine(rule, values).norm())
    assert error < 2 * math.sqrt(30) if holds else error > 1e4


def of_liars(liars: list[int], seed: int) -> tuple[float, float, int]:
    """Of twenty updates in ten groups of turn `seed` the liars' are far out: (how far the result is
    from the centre of the honest groups' means, how far it can be, how many groups are spoiled).

    The means are h points no farther than r from their centre. Seen from a distance D > r, each
    pulls towards it with at least sqrt(1 - (r/D)²), and each of the q other groups away with at
    most 1: D is at most h·r / sqrt(h² - q²).
    """
    values, rule, turn = normal(20, 5, seed), GeometricMedianOfMeans(10), RoundSeed(seed, 0)
    honest = [group for group in rule.groups(20, turn) if not set(group) & set(liars)]
    means = torch.stack([values[group].mean(0) for group in honest])
    values[liars] = 1e6
    h, q, centre = len(honest), 10 - len(honest), means.mean(0)
    r = float((means - centre).norm(dim=1).max())
    return (
        float((combine(rule, values, turn=turn) - centre).norm()),
        h * r / math.sqrt(h**2 - q**2) if q < h else 0,
        q,
    )


def at_random(liars: int, seed: int) -> list[int]:
    return torch.randperm(20, generator=torch.Generator().manual_seed(seed))[:liars].tolist()


def each_in_a_group(liars: int, seed: int) -> list[int]:
    return [group[0] for group in GeometricMedianOfMeans(10).groups(20, RoundSeed(seed, 0))[:liars]]


def test_four_liars_move_it_no_farther_than_the_honest_are_spread_and_less_at_random() -> None:
    errors = {at_random: 0.0, each_in_a_group: 0.0}
    for place in errors:
        for seed in range(25):
            error, most, spoiled = of_liars(place(4, seed), seed)
            assert error <= most
            assert spoiled == 4 or place is at_random
            errors[place] += error
    assert errors[at_random] < errors[each_in_a_group]


def test_five_liars_at_random_break_it_exactly_where_each_has_a_group_of_its_own() -> None:
    outcomes = [of_liars(at_random(5, seed), seed) for seed in range(12)]
    assert {spoiled for _, _, spoiled in outcomes} >= {4, 5}
    for error, most, spoiled in outcomes:
        assert error > 1e4 if spoiled == 5 else error <= most


def rfa(values: torch.Tensor, weights: torch.Tensor, nu: float) -> torch.Tensor:
    """Smoothed Weiszfeld as the paper has it, from the mean, for very long."""
    z = weights @ values / weights.sum()
    for _ in range(20_000):
        b = weights / (values - z).norm(dim=1).clamp(min=nu)
        before, z = z, b @ values / b.sum()
        if torch.equal(before, z):
            break
    return z


@settings(max_examples=30)
@given(st.integers(1, 9), DIMENSIONS, SEEDS, st.sampled_from([0.01, 1.0, 100.0]))
def test_rfa_is_the_papers(m, d, seed, nu):
    values, weights = normal(m, d, seed), 1 + normal(1, m, seed + 1)[0].abs()
    close(combine(RFA(nu), values, weights.tolist()), rfa(values, weights, nu), 1e-6)


def test_rfa_with_a_large_nu_is_the_weighted_mean():
    values = normal(3, 4, 0)
    close(combine(RFA(1e6), values, [1, 2, 5]), (values[0] + 2 * values[1] + 5 * values[2]) / 8)


def test_rfa_follows_the_majority_of_weight():
    values = torch.tensor([[0.0, 0.0], [1.0, 1.0], [2.0, 5.0]], dtype=torch.float64)
    close(combine(RFA(), values, [1, 1, 10]), values[2], 1e-5)
