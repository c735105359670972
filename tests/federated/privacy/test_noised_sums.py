"""Differential privacy of clients whose updates nobody sees: clipped by clients, summed, noised."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

import dure
from small import same_bits, small_task, weights_of

SECURE = "secure-aggregation"


def trained(privacy: str, rounds: int = 3, lr: float = 0.3, **settings: Any) -> dure.Run:
    strategy = dure.FedAvg(clients=10, privacy=privacy, **settings)
    return dure.train(small_task(lr), strategy, stop=dure.Stop(rounds=rounds))


@pytest.mark.parametrize("where", ["server", "distributed"])
@pytest.mark.parametrize("clipping", ["flat", "layers"])
def test_without_noise_it_is_what_the_server_would_have_clipped_itself(
    where: str, clipping: str
) -> None:
    seen = trained(f"user-level:0.5:0:server:{clipping}:4")
    summed = trained(f"{SECURE}/user-level:0.5:0:{where}:{clipping}:4")
    # Clients that add noise round to coarser numbers.
    coarse = 1e-3 if where == "distributed" else 1e-5
    torch.testing.assert_close(weights_of(summed), weights_of(seen), atol=coarse, rtol=0)
    # How many examples clients have is told to nobody: passes are counted, of each client one.
    assert [step.samples for step in summed.history.steps] == [10, 20, 30]
    assert summed.summary["epochs"] == 3
    # The loss is the mean over clients, of which some have one example more than others.
    assert summed.history.steps[-1].loss == pytest.approx(seen.history.steps[-1].loss, rel=0.1)


@pytest.mark.parametrize("passes", [1, 3])
def test_epochs_of_clients_whose_examples_nobody_counts_are_their_passes(passes: int) -> None:
    strategy = dure.FedAvg(
        clients=10, privacy=f"{SECURE}/user-level:0.5:1", local_epochs=passes, fraction=1.0
    )
    run = dure.train(small_task(), strategy, stop=dure.Stop(epochs=6))
    assert run.summary["ended"] == "epochs"
    assert run.summary["steps"] == 6 / passes


def test_epochs_are_refused_where_nobody_can_count_passes() -> None:
    strategy = dure.FedAvg(clients=10, privacy=f"{SECURE}/user-level:0.5:1", local_steps=2)
    with pytest.raises(ValueError, match=r"epochs cannot be counted with local_steps.*give rounds"):
        dure.train(small_task(), strategy, stop=dure.Stop(epochs=6))


@pytest.mark.parametrize("where", ["server", "distributed"])
def test_noise_has_the_deviation_that_is_paid_for(where: str) -> None:
    clip, noise, rounds = 0.5, 2.0, 4
    # With a rate of 0 clients send nothing, and the model moves by the noise alone.
    run = trained(f"{SECURE}/user-level:{clip}:{noise}:{where}", rounds=rounds, lr=0.0)
    start = trained("none", rounds=1, lr=0.0)
    moved = weights_of(run) - weights_of(start)
    # Ten clients add what seven or more have to: as much again where nobody is lost.
    fewest = 7 if where == "distributed" else 10
    deviation = noise * clip / 10 * math.sqrt(rounds * 10 / fewest)
    measured = float(moved.std())
    assert measured == pytest.approx(deviation, rel=5 / math.sqrt(2 * len(moved)))


def test_clients_that_are_lost_do_not_take_the_noise_below_what_is_paid_for() -> None:
    strategy = dure.FedAvg(clients=12, privacy=f"{SECURE}/user-level:0.5:2:distributed")
    rounds = 6
    world = dure.Simulated(drop_out=0.15)
    run = dure.train(small_task(0.0), strategy, world, dure.Stop(rounds=rounds))
    start = trained("none", rounds=1, lr=0.0)
    moved = weights_of(run) - weights_of(start)
    summed = sum(step.numbers["updates"] > 0 for step in run.history.steps)
    assert summed > 0
    least = 2 * 0.5 / 12 * math.sqrt(summed)
    assert float(moved.std()) > least * (1 - 5 / math.sqrt(2 * len(moved)))


def test_two_epsilons_are_told_of_noise_that_clients_add_together() -> None:
    run = trained(f"{SECURE}/user-level:0.5:2:distributed", fraction=0.7)
    promises = run.summary["facts"][0]["promises"]
    assert len(promises) == 2
    recipients, server = promises
    # The server knows who was asked: nothing is amplified against it.
    assert server["epsilon"] > recipients["epsilon"]


def test_the_same_seed_gives_the_same_bits() -> None:
    privacy = f"{SECURE}/user-level:0.5:1:distributed"
    assert same_bits(trained(privacy), trained(privacy))


@pytest.mark.parametrize(
    ("user", "said"),
    [
        ("user-level:1:1:local", "use distributed"),
        ("user-level:1:1:server:adaptive", "use flat or layers"),
        ("user-level:inf:0", "clip is inf"),
    ],
)
def test_what_does_not_go_together_is_refused_in_one_line(user: str, said: str) -> None:
    with pytest.raises(ValueError, match=said):
        trained(f"{SECURE}/{user}")
