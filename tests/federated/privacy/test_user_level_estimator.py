"""The estimator of user-level privacy: what one client can move, and how large the noise is."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from dure.federated.privacy.user_level import clipping
from dure.federated.privacy.user_level.estimator import (
    ClientPopulation,
    Estimator,
    client_population,
    weight,
)
from dure.federated.privacy.user_level.settings import UserLevel
from dure.randomness.secret import Secret

SECRET = Secret.simulated(11)
SIZES = [[4, 3], [5]]


def drawn(seed: int, length: float = 1.0) -> list[Tensor]:
    """A contribution of two tensors with about this length."""
    draws = torch.Generator().manual_seed(seed)
    one = [torch.randn(sum(of), generator=draws, dtype=torch.float64) for of in SIZES]
    return [each * (length / clipping.norm_of(one)) for each in one]


def estimator(user: UserLevel, rate: float = 0.5, weight: float = 8.0) -> Estimator:
    return Estimator(user, ClientPopulation(rate, 8, weight), SIZES, user.clip)


def made(one: Estimator, number: int = 0) -> list[Tensor]:
    keys = SECRET.key("noise", number), SECRET.key("count", number)
    return one.noised(drawn(0), *keys)


@given(
    st.sampled_from(["flat", "layers"]),
    st.floats(1e-3, 1e3),
    st.integers(0, 100),
    st.sampled_from([torch.float32, torch.float64]),
)
def test_what_is_clipped_is_no_longer_than_the_bound(
    kind: str, length: float, seed: int, dtype: torch.dtype
) -> None:
    user = UserLevel(clip=0.7, clipping=kind)  # type: ignore[arg-type]
    before = [each.to(dtype) for each in drawn(seed, length)]
    after = estimator(user).clipped(before)
    assert clipping.norm_of(after) <= 0.7 * (1 + 1e-12)
    if kind == "flat":
        by = min(1.0, 0.7 / clipping.norm_of(before))
        for old, new in zip(before, after, strict=True):
            torch.testing.assert_close(new, old.double() * by, rtol=1e-6, atol=0)
    else:
        pieces = [*before[0].split(SIZES[0]), before[1]]  # type: ignore[no-untyped-call]
        found = [*after[0].split(SIZES[0]), after[1]]  # type: ignore[no-untyped-call]
        for old, new in zip(pieces, found, strict=True):
            expected = min(float(old.double().norm()), 0.7 / math.sqrt(3))
            assert float(new.norm()) == pytest.approx(expected, rel=1e-6)


def test_nothing_and_what_is_not_finite_are_nothing() -> None:
    zero = [torch.zeros(7), torch.zeros(5)]
    for kind in ("flat", "layers"):
        one = estimator(UserLevel(clip=0.7, clipping=kind))  # type: ignore[arg-type]
        assert clipping.norm_of(one.clipped(zero)) == 0
        for wrong in (math.inf, math.nan):
            spoilt = drawn(1)
            spoilt[1][2] = wrong
            assert all(torch.equal(each, torch.zeros_like(each)) for each in one.clipped(spoilt))


@settings(max_examples=60)
@given(
    st.lists(st.tuples(st.integers(1, 1000), st.floats(0.01, 100.0)), min_size=1, max_size=8),
    st.sampled_from([0, 10, 300]),
    st.sampled_from(["flat", "layers"]),
    st.data(),
)
def test_one_client_moves_the_mean_by_its_share_of_the_fixed_denominator(
    clients: list[tuple[int, float]], most: int, kind: str, data: st.DataObject
) -> None:
    user = UserLevel(clip=0.5, clipping=kind, most_examples=most)  # type: ignore[arg-type]
    whole = client_population(user, 0.5, [examples for examples, _ in clients])
    gone = data.draw(st.integers(0, len(clients) - 1))

    def mean(without: int | None) -> list[Tensor]:
        one = Estimator(user, whole, SIZES, user.clip)
        for place, (examples, length) in enumerate(clients):
            if place != without:
                one.fold(drawn(place, length), examples)
        return made(one)

    moved = [a - b for a, b in zip(mean(None), mean(gone), strict=True)]
    # S w_max / (qW), whatever the others have.
    assert clipping.norm_of(moved) <= 0.5 * 1.0 / whole.expected * (1 + 1e-9)


def test_a_large_client_weighs_no_more_than_one() -> None:
    user = UserLevel(most_examples=100)
    assert [weight(user, examples) for examples in (10, 100, 1000)] == [0.1, 1.0, 1.0]
    assert weight(UserLevel(), 1000) == 1.0
    # Who is not known yet counts as one: the mean may be too short, and tells no more.
    assert client_population(user, 0.5, [10, 0, 1000]) == ClientPopulation(0.5, 3, 2.1)


@pytest.mark.parametrize("clip", [0.5, 20.0])
def test_the_noise_has_the_deviation_that_the_accountant_counts_on(clip: float) -> None:
    user = UserLevel(clip=clip, noise=1.3)
    one = Estimator(user, ClientPopulation(0.5, 8, 8.0), [[20_000]], clip)
    like = [torch.zeros(20_000)]
    found = one.noised(like, SECRET.key("deviation"), SECRET.key("count"))[0]
    expected = 1.3 * clip / (0.5 * 8)
    # The deviation of n numbers is known to 1/√(2n): five of those.
    assert abs(float(found.std()) / expected - 1) < 5 / math.sqrt(2 * 20_000)
    assert abs(float(found.mean())) < 5 * expected / math.sqrt(20_000)
    # Rounded to a grid that says nothing of the last bits.
    steps = found * one.roster.expected / 2.0**-40
    assert torch.equal(steps, steps.round())


def test_absence_makes_the_mean_shorter_and_changes_no_noise() -> None:
    user = UserLevel(clip=1.0)
    few, many = estimator(user, 1.0), estimator(user, 1.0)
    for place in range(8):
        many.fold(drawn(place), 1)
    for place in range(2):
        few.fold(drawn(place), 1)
    two = sum(drawn(place)[0] for place in range(2))
    torch.testing.assert_close(made(few)[0], two / 8)
    noisy = estimator(replace(user, noise=2.0), 1.0)
    noise = made(noisy)
    noisy.forget()
    noisy.fold(drawn(0), 1)
    with_one = made(noisy)
    for a, b, c in zip(with_one, noise, drawn(0), strict=True):
        torch.testing.assert_close(a - b, c / 8, rtol=0, atol=2.0 / 8 * 2**-10)


def test_the_same_round_has_the_same_noise_in_a_simulation_and_another_has_other() -> None:
    user = UserLevel(noise=1.0)
    first, again, other = made(estimator(user)), made(estimator(user)), made(estimator(user), 1)
    assert all(map(torch.equal, first, again))
    assert not any(map(torch.equal, first, other))


def test_adaptive_clipping_pays_for_its_count() -> None:
    one = estimator(UserLevel(noise=1.0, clipping="adaptive"), 0.5)
    assert one.count_noise == 1.0  # qK/20 is less than z
    beside = clipping.noise_beside_count(1.0, 1.0)
    # The two together are one release with z: precisions add up.
    assert beside**-2 + (2 * one.count_noise) ** -2 == pytest.approx(1.0)
    assert one.deviation == pytest.approx(beside * one.bound)
    assert clipping.count_noise(1000.0, 1.0) == 50.0
    assert clipping.noise_beside_count(0.0, 0.0) == 0.0


@pytest.mark.parametrize("start", [0.02, 50.0])
def test_an_adaptive_bound_goes_to_the_median_of_the_lengths(start: float) -> None:
    user = UserLevel(clip=start, clipping="adaptive")
    one = Estimator(user, ClientPopulation(1.0, 9, 9.0), SIZES, start)
    for number in range(120):
        for place in range(9):
            one.fold(drawn(place, 0.5 + 0.1 * place), 1)
        made(one, number)
        one.forget()
    # With an odd number it swings around the middle one, 0.9.
    assert 0.8 < one.bound < 1.0


def test_a_share_that_noise_throws_far_off_moves_the_bound_by_one_step() -> None:
    assert clipping.followed(1.0, 40.0) == pytest.approx(math.exp(-0.1))
    assert clipping.followed(1.0, -40.0) == pytest.approx(math.exp(0.1))
