"""Lower bounds on epsilon: below what is promised, and above 0 where nothing is."""

from __future__ import annotations

import math

import pytest
import torch
from scipy import stats

import dure
from dure.federated.attacks.canaries import Canaries, audited_epsilon, guesses
from dure.federated.attacks.epsilon import (
    one_run_epsilon,
)
from dure.run.audit import canary_epsilon
from small import small_task

DELTA = 1e-5


def gaussian_epsilon(sigma: float, delta: float) -> float:
    """Of one release of sensitivity 1 with this noise: exact (Balle and Wang 2018)."""

    def told(epsilon: float) -> float:
        near = stats.norm.cdf(1 / (2 * sigma) - epsilon * sigma)
        return near - math.exp(epsilon) * stats.norm.cdf(-1 / (2 * sigma) - epsilon * sigma)

    low, high = 0.0, 100.0
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (middle, high) if told(middle) > delta else (low, middle)
    return high


def test_what_hides_everything_has_a_bound_of_nothing() -> None:
    assert one_run_epsilon(100, 100, 50, DELTA) == 0
    assert one_run_epsilon(100, 0, 0, DELTA) == 0


def test_what_hides_nothing_has_a_bound_that_grows_with_the_number_of_canaries() -> None:
    alone = [one_run_epsilon(n, n, n, 0.0) for n in (10, 100, 1000)]
    assert 0 < alone[0] < alone[1] < alone[2]


def test_one_run_of_pure_privacy_is_a_binomial_tail() -> None:
    """With delta 0: epsilon where P[Binomial(r, e^eps/(1+e^eps)) >= v] = 0.05."""
    found = one_run_epsilon(200, 100, 80, 0.0)
    coin = 1 / (1 + math.exp(-found))
    assert float(stats.binom.sf(79, 100, coin)) == pytest.approx(0.05, abs=1e-6)
    # All of n: the n-th root.
    share = 0.05 ** (1 / 50)
    assert one_run_epsilon(50, 50, 50, 0.0) == pytest.approx(math.log(share / (1 - share)))


def test_one_run_of_a_gaussian_mechanism_stays_below_it() -> None:
    sigma = 1.0
    draws = torch.Generator().manual_seed(3)
    coins = torch.rand(2000, generator=draws) < 0.5
    scores = coins + sigma * torch.randn(2000, generator=draws)
    order = scores.argsort()
    right = int((~coins[order[:200]]).sum() + coins[order[-200:]].sum())
    found = one_run_epsilon(2000, 400, right, DELTA)
    assert 0.5 < found < gaussian_epsilon(sigma, DELTA)


def test_canaries_send_their_direction_or_nothing() -> None:
    canaries = Canaries(seed=1, length=5.0)
    like = [torch.zeros(400, dtype=torch.float64), torch.zeros(30)]
    clients = list(range(10))
    sent = canaries.forge([like] * 10, clients[:9], seed=0, turn=0, clients=clients)
    assert sent[9] is like
    for client in clients[:9]:
        norm = math.sqrt(sum(float(one.double().square().sum()) for one in sent[client]))
        assert norm == pytest.approx(5.0 if canaries.is_in(client) else 0.0, rel=1e-6)
        assert sent[client][1].dtype == torch.float32
    assert {canaries.is_in(client) for client in clients[:9]} == {True, False}
    ins = [client for client in clients[:9] if canaries.is_in(client)]
    assert canaries.score(ins[0], sent[ins[0]]) == pytest.approx(5.0, rel=1e-6)
    assert abs(canaries.score(ins[0], sent[ins[1]])) < 1.5


def test_the_surest_are_guessed() -> None:
    scores = {client: float(client) for client in range(8)}
    assert guesses(scores, 0.5) == {0: False, 1: False, 6: True, 7: True}
    assert guesses({0: 1.0}) == {}
    right = Canaries(seed=0)
    known = {client: float(right.is_in(client)) for client in range(100)}
    epsilon, guessed, hits = audited_epsilon(right, known, DELTA)
    assert (guessed, hits) == (50, 50)
    assert epsilon == pytest.approx(one_run_epsilon(100, 50, 50, DELTA))


def test_a_federation_without_noise_gives_its_canaries_away() -> None:
    found = canary_epsilon(
        small_task(), dure.FedAvg(clients=40), dure.Simulated(), dure.Stop(rounds=2), 30
    )
    assert found["canaries"] == 30
    assert found["right"] == found["guessed"]
    assert found["epsilon_at_least"] > 1


@pytest.mark.parametrize("noise", [0.5, 2.0])
def test_canaries_stay_below_the_accountant_and_find_some_of_what_it_says(noise: float) -> None:
    task = dure.load_task("digits", model="logistic")
    strategy = dure.FedAvg(
        clients=120,
        fraction=0.5,
        selection="coins",
        privacy=f"user-level:1:{noise}",  # type: ignore[arg-type]
    )
    stop = dure.Stop(rounds=6)
    promised = dure.train(task, strategy, dure.Simulated(), stop).summary["numbers"]["epsilon"]
    found = canary_epsilon(task, strategy, dure.Simulated(), stop, 100)
    assert 0 < found["epsilon_at_least"] < promised


@pytest.mark.parametrize(
    ("world", "count", "match"),
    [
        (dure.Simulated(), 1, "can have 2 to 40"),
        (dure.Simulated(), 41, "can have 2 to 40"),
        (dure.Simulated(attack="sign-flip", attackers=2), 10, "has malicious clients"),
    ],
)
def test_canaries_that_cannot_be_are_refused(world: dure.Simulated, count: int, match: str) -> None:
    with pytest.raises(ValueError, match=match):
        canary_epsilon(small_task(), dure.FedAvg(clients=40), world, dure.Stop(rounds=1), count)


def test_numbers_that_make_no_sense_are_refused() -> None:
    with pytest.raises(ValueError, match="6 right guesses of 5 about 10 canaries are impossible"):
        one_run_epsilon(10, 5, 6, DELTA)
