"""The Skellam mechanism: integers that add up to the sum, with as much noise as was promised."""

from __future__ import annotations

import math
from functools import partial

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import special

from dure.federated.privacy.user_level import distributed
from dure.federated.privacy.user_level.distributed import ORDERS, DistributedNoisePlan
from dure.privacy.accountant import Releases, renyi_epsilon
from dure.randomness.secret import Secret

SIGNS = Secret.simulated(1).key("signs")


def keys(client: int, purpose: str, attempt: int) -> bytes:
    return Secret.simulated(5).key(purpose, client, attempt)


def update(client: int, elements: int, length: float) -> torch.Tensor:
    draws = torch.Generator().manual_seed(client)
    vector = torch.randn(elements, generator=draws, dtype=torch.float64)
    return vector * (length / float(vector.norm()))


def encoded(plan: DistributedNoisePlan, clients: int) -> list[torch.Tensor]:
    return [
        distributed.encode(plan, update(one, plan.elements, plan.clip), SIGNS, partial(keys, one))
        for one in range(clients)
    ]


@settings(max_examples=30)
@given(st.integers(1, 70), st.integers(1, 6), st.floats(0.01, 100.0))
def test_without_noise_the_sum_modulo_r_is_the_sum(
    elements: int, clients: int, clip: float
) -> None:
    plan = DistributedNoisePlan(elements, clip, 0.0, clients, clients)
    total = sum(encoded(plan, clients)).remainder(1 << plan.bits)  # type: ignore[union-attr]
    found = distributed.decode(plan, total, SIGNS)
    expected = sum(update(one, elements, clip) for one in range(clients))
    # Each coordinate of each client is rounded by less than 1.
    furthest = clients * math.sqrt(plan.padded) / plan.scale
    assert float((found - expected).norm()) <= furthest


def test_what_a_client_adds_is_no_longer_than_the_rounded_bound() -> None:
    for bits in (10, 16, 32):
        plan = DistributedNoisePlan(300, 1.0, 0.0, 3, 2, bits)
        for one in encoded(plan, 20):
            assert float(one.double().norm()) <= plan.l2
            assert float(one.abs().sum()) <= plan.l1
    # With few bits rounding costs something, with many next to nothing.
    coarse = DistributedNoisePlan(300, 1.0, 0.0, 3, 2, 10)
    assert coarse.l2 > 1.01 * coarse.scale
    assert plan.l2 < (1 + 1e-3) * plan.scale


def test_a_rotation_keeps_lengths_and_spreads_what_is_in_one_place() -> None:
    plan = DistributedNoisePlan(1000, 1.0, 1.0, 3, 2)
    spike = torch.zeros(1000, dtype=torch.float64)
    spike[7] = 1.0
    rotated = distributed.rotate(plan, spike, SIGNS)
    assert float(rotated.norm()) == pytest.approx(1.0, rel=1e-12)
    torch.testing.assert_close(rotated.abs(), torch.full((1024,), 1 / 32, dtype=torch.float64))
    torch.testing.assert_close(distributed.unrotate(plan, rotated, SIGNS), spike)


@pytest.mark.parametrize("variance", [0.3, 40.0, 2.0**28])
def test_skellam_numbers_have_their_mean_variance_and_shape(variance: float) -> None:
    count = 100_000
    found = distributed.skellam(Secret.simulated(2).key("noise"), variance, count).double()
    deviation = math.sqrt(variance)
    assert abs(float(found.mean())) < 5 * deviation / math.sqrt(count)
    # Its kurtosis is 3 + 1/μ, by which the variance of a variance is known.
    spread = math.sqrt((2 + 1 / variance) / count)
    assert abs(float(found.var()) / variance - 1) < 5 * spread
    zeros = special.ive(0, variance)
    assert abs(float((found == 0).double().mean()) - zeros) < 5 * math.sqrt(zeros / count)


def test_as_few_clients_as_the_threshold_add_the_noise_that_was_promised() -> None:
    plan = DistributedNoisePlan(4096, 1.0, 0.8, 10, 6)

    def variance(clients: int) -> float:
        total = torch.stack(encoded(plan, clients)).sum(0)
        plain = sum(update(one, 4096, 1.0) for one in range(clients))
        return float((distributed.decode(plan, total, SIGNS) - plain).var())

    promised = plan.variance / plan.scale**2
    assert promised == pytest.approx(0.8**2, rel=1e-3)
    # The variance of 4096 numbers is known to √(2/4096).
    within = 5 * math.sqrt(2 / 4096)
    assert abs(variance(6) / promised - 1) < within
    # More clients add more, and fewer are refused.
    assert abs(variance(9) / promised - 9 / 6) < 1.5 * within
    with pytest.raises(ValueError, match="less noise than planned"):
        distributed.divergences(plan, 5)
    assert distributed.divergences(plan, 9)[0] < distributed.divergences(plan, 6)[0]


@pytest.mark.parametrize(("moved", "variance"), [(1, 2.0), (3, 5.0), (4, 60.0)])
def test_the_bound_is_above_the_true_divergence_of_shifted_noise(
    moved: int, variance: float
) -> None:
    far = math.ceil(14 * math.sqrt(variance) + 60)
    places = np.arange(-far, far + 1)
    mass = special.ive(np.abs(places), variance)
    other = special.ive(np.abs(places - moved), variance)
    known = (mass > 1e-290) & (other > 1e-290)
    for order in (2, 3, 8):
        log = order * np.log(other[known]) - (order - 1) * np.log(mass[known])
        true = special.logsumexp(log) / (order - 1)
        told = distributed.divergence(variance, moved, moved, order)
        assert true <= told
        # With much noise it is near the Gaussian's, order moved² / 2 variance.
        assert variance < 50 or told <= 1.1 * true


def test_sampling_by_the_general_bound_is_above_that_of_the_gaussian() -> None:
    rate, noise, times = 0.05, 2.0, 100

    def gaussian(order: int) -> float:
        return order / (2 * noise**2)

    told = distributed.sampled(rate, gaussian)
    whole = [gaussian(order) for order in ORDERS]
    assert all(0 <= one <= other for one, other in zip(told, whole, strict=True))
    exact = renyi_epsilon([Releases(rate, noise, times)], 1e-5)
    found = distributed.epsilon_of([times * one for one in told], 1e-5)
    assert exact * (1 - 1e-9) <= found <= 1.6 * exact
    # All in it: nothing is amplified.
    assert distributed.sampled(1.0, gaussian) == whole


def test_the_two_epsilons_are_those_of_a_gaussian_where_bits_are_many() -> None:
    plan = DistributedNoisePlan(1000, 1.0, 1.5, 20, 14)
    server = distributed.against_server(plan, 10, 1e-5)
    assert server == pytest.approx(renyi_epsilon([Releases(1.0, 1.5, 10)], 1e-5), rel=0.02)
    recipients = distributed.against_recipients(plan, 0.1, 100, 1e-5)
    assert recipients < distributed.against_server(plan, 100, 1e-5)
    more = distributed.against_recipients(plan, 0.1, 101, 1e-5)
    assert recipients < more


def test_without_noise_there_is_no_bound() -> None:
    plan = DistributedNoisePlan(10, 1.0, 0.0, 3, 2)
    assert distributed.against_server(plan, 1, 1e-5) == math.inf
    assert distributed.against_recipients(plan, 0.5, 1, 1e-5) == math.inf


@pytest.mark.parametrize("length", [1.1, math.nan])
def test_an_update_that_is_not_clipped_is_refused(length: float) -> None:
    plan = DistributedNoisePlan(10, 1.0, 1.0, 3, 2)
    with pytest.raises(ValueError, match="clipped to S"):
        distributed.encode(plan, update(0, 10, length), SIGNS, partial(keys, 0))


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"threshold": 4}, "a sum can have 1 to 3"),
        ({"bits": 3}, "are too few"),
        ({"clip": 0.0}, "clip"),
    ],
)
def test_numbers_that_do_not_fit_are_refused(changes: dict[str, float], reason: str) -> None:
    with pytest.raises(ValueError, match=reason):
        DistributedNoisePlan(
            **{"elements": 5, "clip": 1.0, "noise": 1.0, "clients": 3, "threshold": 2, **changes}
        )  # type: ignore[arg-type]
