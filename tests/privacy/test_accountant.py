"""The accountant against dp-accounting by hand, and what any bound has to have."""

from __future__ import annotations

import math

import dp_accounting
import pytest
from dp_accounting.pld import privacy_loss_distribution as pld
from dp_accounting.rdp import rdp_privacy_accountant

from dure.privacy.accountant import (
    Releases,
    epsilon,
    noise_for,
    renyi_epsilon,
    times_within,
)

DELTA = 1e-5


def test_a_known_example_has_its_published_bounds() -> None:
    spent = [Releases(0.01, 1.1, 1000)]
    assert 1.5153 <= epsilon(spent, DELTA) <= 1.5163
    assert renyi_epsilon(spent, DELTA) == pytest.approx(1.71177, abs=1e-5)


@pytest.mark.parametrize(("rate", "noise", "times"), [(0.05, 0.9, 30), (0.3, 2.0, 7)])
def test_it_is_what_dp_accounting_says_by_hand(rate: float, noise: float, times: int) -> None:
    event = dp_accounting.PoissonSampledDpEvent(rate, dp_accounting.GaussianDpEvent(noise))
    renyi = rdp_privacy_accountant.RdpAccountant()
    renyi.compose(event, times)
    by_hand = pld.from_gaussian_mechanism(noise, sampling_prob=rate).self_compose(times)
    spent = [Releases(rate, noise, times)]
    assert renyi_epsilon(spent, DELTA) == pytest.approx(renyi.get_epsilon(DELTA), rel=1e-12)
    # The grid of losses is wider here, so the bound may be a little larger.
    finest = by_hand.get_epsilon_for_delta(DELTA)
    assert finest * (1 - 1e-6) <= epsilon(spent, DELTA) <= finest * (1 + 1e-3)


def test_of_one_release_that_all_are_in_it_is_the_exact_value() -> None:
    # Balle and Wang 2018: delta = Φ(1/2z - εz) - e^ε Φ(-1/2z - εz).
    def delta(told: float, noise: float) -> float:
        def normal(x: float) -> float:
            return math.erfc(-x / math.sqrt(2)) / 2

        left = normal(1 / (2 * noise) - told * noise)
        return left - math.exp(told) * normal(-1 / (2 * noise) - told * noise)

    for noise in (0.7, 3.0):
        told = epsilon([Releases(1.0, noise)], DELTA)
        assert delta(told, noise) == pytest.approx(DELTA, rel=1e-6)
        # Four looks through twice the noise are one look.
        assert epsilon([Releases(1.0, 2 * noise, 4)], DELTA) == pytest.approx(told, rel=1e-9)


def test_it_rises_with_rounds_and_rate_and_falls_with_noise() -> None:
    def told(rate: float = 0.1, noise: float = 3.0, times: int = 20) -> float:
        return epsilon([Releases(rate, noise, times)], DELTA)

    for bounds in (
        [told(times=times) for times in (1, 2, 20, 21, 100)],
        [told(rate=rate) for rate in (0.01, 0.1, 0.11, 0.99, 1.0)],
        [told(noise=noise) for noise in (9.0, 3.01, 3.0, 1.5)],
    ):
        assert bounds == sorted(bounds)
        assert len(set(bounds)) == len(bounds)


def test_it_is_never_below_what_a_limit_theorem_leaves_out() -> None:
    # With a small rate and little noise, Gaussian DP tells less than a single release does: who is
    # in it at all is told with probability q.
    rate, noise, times = 0.01, 0.5, 100
    mu = rate * math.sqrt(times) * math.sqrt(math.expm1(noise**-2))
    limit = epsilon([Releases(1.0, 1 / mu)], DELTA)
    # A lower bound: the true loss of one round alone, by its tail.
    single = pld.from_gaussian_mechanism(
        noise,
        sampling_prob=rate,
        pessimistic_estimate=False,
        use_connect_dots=False,
        value_discretization_interval=5e-4,
    )
    many = single.self_compose(times).get_epsilon_for_delta(DELTA)
    told = epsilon([Releases(rate, noise, times)], DELTA)
    assert told >= many
    assert limit < many  # so the limit would have been a lie


def test_rounds_of_different_kinds_compose_in_any_order() -> None:
    kinds = [Releases(0.1, 1.0, 5), Releases(0.2, 1.3, 3), Releases(1.0, 9.0, 2)]
    told = epsilon(kinds, DELTA)
    assert epsilon(kinds[::-1], DELTA) == pytest.approx(told, rel=1e-6)
    assert told > max(epsilon([kind], DELTA) for kind in kinds)
    # One by one is all together.
    singly = [Releases(0.1, 1.0)] * 5 + kinds[1:]
    assert epsilon(singly, DELTA) == told


def test_who_takes_anothers_place_tells_more_than_who_comes_or_goes() -> None:
    for rate in (0.1, 1.0):
        spent = [Releases(rate, 1.5, 10)]
        one, other = epsilon(spent, DELTA), epsilon(spent, DELTA, "replace")
        assert one < other
    # In all releases it is twice the distance.
    assert other == pytest.approx(epsilon([Releases(1.0, 0.75, 10)], DELTA), rel=1e-12)


def test_without_noise_there_is_no_bound_and_without_releases_no_loss() -> None:
    assert epsilon([Releases(0.1, 0.0)], DELTA) == math.inf
    assert renyi_epsilon([Releases(0.1, 0.0)], DELTA) == math.inf
    assert epsilon([], DELTA) == 0
    assert epsilon([Releases(0.0, 0.0, 9), Releases(0.5, 1.0, 0)], DELTA) == 0
    # Hardly any noise: a number, and an honest one.
    assert epsilon([Releases(0.5, 0.02, 100)], DELTA) > 100


@pytest.mark.parametrize(("wanted", "rate", "times"), [(1.0, 0.1, 10), (1.0, 1.0, 10)])
def test_the_noise_for_an_epsilon_is_the_least_of_four_digits(
    wanted: float, rate: float, times: int
) -> None:
    noise = noise_for(wanted, DELTA, rate, times)
    assert float(f"{noise:.4g}") == noise
    assert epsilon([Releases(rate, noise, times)], DELTA) <= wanted
    assert epsilon([Releases(rate, noise * 0.999, times)], DELTA) > wanted


def test_as_many_rounds_fit_as_keep_to_the_budget() -> None:
    begun = [Releases(0.1, 4.0, 3)]
    more = times_within(1.0, begun, 0.2, 4.0, DELTA)
    assert epsilon([*begun, Releases(0.2, 4.0, more)], DELTA) <= 1.0
    assert epsilon([*begun, Releases(0.2, 4.0, more + 1)], DELTA) > 1.0
    assert times_within(1.0, begun, 0.2, 4.0, DELTA, most=2) == 2
    assert times_within(0.1, begun, 0.2, 4.0, DELTA) == 0


@pytest.mark.parametrize(
    ("spent", "delta", "reason"),
    [
        ([Releases(1.1, 1.0)], 1e-5, "it has to be in"),
        ([Releases(0.1, -1.0)], 1e-5, "0 or more"),
        ([Releases(0.1, 1.0, -1)], 1e-5, "0 or more"),
        ([Releases(0.1, 1.0)], 0.0, "delta is 0.0"),
        ([Releases(0.1, 1.0)], 1.0, "delta is 1.0"),
    ],
)
def test_numbers_that_make_no_sense_are_refused(
    spent: list[Releases], delta: float, reason: str
) -> None:
    with pytest.raises(ValueError, match=reason):
        epsilon(spent, delta)


def test_an_epsilon_that_nobody_can_keep_is_refused() -> None:
    with pytest.raises(
        ValueError, match=r"epsilon is 0\.0, but it has to be greater than 0 and finite"
    ):
        noise_for(0.0, DELTA, 0.1, 10)
