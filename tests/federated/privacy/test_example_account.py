"""Clients that train by DP-SGD: their steps, and the account of what each tells."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from msgspec.structs import replace

import dure
from dure.federated.engines.job import ClientJob
from dure.federated.engines.loop import LoopEngine
from dure.federated.engines.noised import NoisedSteps, StepNoise
from dure.federated.privacy.example_level import ExampleAccount, check_own_noise
from dure.privacy.accountant import Releases, epsilon
from dure.privacy.dp_sgd import DPSGD
from dure.randomness.secret import Secret
from small import largest_difference, same_bits, small_task

ROUNDS = dure.Stop(rounds=2)


def fed_avg(**given: Any) -> dure.FedAvg:
    fields: dict[str, Any] = {"clients": 4, "batch_size": 5, "privacy": "dp-sgd:1:1.1", **given}
    return dure.FedAvg(**fields)


def test_without_noise_and_clip_and_with_all_data_it_is_federated_averaging() -> None:
    task = small_task()
    plain = dure.train(task, fed_avg(batch_size=None, privacy="none"), stop=ROUNDS)
    private = dure.train(task, fed_avg(batch_size=None, privacy="dp-sgd:inf:0"), stop=ROUNDS)
    assert largest_difference(plain, private) < 1e-12


def test_the_noise_of_a_simulation_repeats_itself_whichever_engine_computes() -> None:
    task = small_task()
    first = dure.train(task, fed_avg(fraction=0.5), stop=ROUNDS)
    assert first.summary["facts"][0]["engine"] == "loop"
    world = dure.Simulated(engine="loop-processes", processes=2)
    assert same_bits(first, dure.train(task, fed_avg(fraction=0.5), world=world, stop=ROUNDS))


def test_clients_and_turns_have_noise_and_batches_of_their_own() -> None:
    task = small_task()
    model = task.model()
    noised = StepNoise(DPSGD(1.0, 1.0), Secret.simulated(0))
    steps = NoisedSteps(noised, task, model, task.train, batch_size=4)
    seen = []
    for client, turn in ((0, 0), (1, 0), (0, 1)):
        job = job_of(client, turn)
        assert steps.batches(job).batch_size == 4
        for step in range(2):
            sums, loss = steps.clipped(None)
            steps.leave(sums, 4, job, step)
            assert loss == 0
            seen.append(torch.cat([one.grad.flatten() for one in model.parameters()]))  # type: ignore[union-attr]
    drawn = torch.stack(seen)
    assert drawn.abs().max() > 0
    assert len(drawn.unique(dim=0)) == 6


def job_of(client: int, turn: int) -> ClientJob:
    return ClientJob(
        client=client,
        round=turn,
        indices=torch.arange(20),
        weights=[],
        buffers=[],
        first_step=0,
        steps=1,
        turn=turn,
    )


def account_of_three() -> ExampleAccount:
    return ExampleAccount(
        DPSGD(1.0, 1.1),
        1e-5,
        sizes=[100, 50, 200],
        steps=[10, 5, 20],
        batch_size=10,
        simulated=True,
    )


def test_the_epsilon_is_that_of_the_client_that_has_told_most() -> None:
    account = account_of_three()
    account.asked([0, 1, 2, 0, 1])
    own = [
        epsilon([Releases(rate, 1.1, times)], 1e-5)
        for rate, times in ((0.1, 20), (0.2, 10), (0.05, 20))
    ]
    assert account.numbers() == {
        "epsilon": max(own),
        "epsilon_least": min(own),
    }
    other = account_of_three()
    other.restore(account.state())
    assert other.numbers() == account.numbers()


def test_a_run_tells_the_epsilon_of_its_rounds() -> None:
    task = small_task()
    strategy = fed_avg()
    run = dure.train(task, strategy, stop=ROUNDS)
    sizes = [len(part) for part in strategy.divide(task, 0)]
    for number, step in enumerate(run.history.steps, 1):
        told = [epsilon([Releases(5 / size, 1.1, number * -(-size // 5))], 1e-5) for size in sizes]
        assert (step.numbers or {})["epsilon"] == pytest.approx(max(told))
    facts = run.summary["facts"][0]["promises"][0]
    assert facts["unit"] == "example"
    assert "does not know its seed" in facts["said"]


def test_a_client_elsewhere_draws_from_its_own_system() -> None:
    with pytest.raises(ValueError, match="the server knows the seed"):
        check_own_noise(fed_avg(privacy="dp-sgd:1:1:seed").privacy)
    task = small_task()
    engines = [
        LoopEngine(
            task, task.model(), task.train, 5, 0, StepNoise(DPSGD(1.0, 1.0), Secret.system())
        )
        for _ in range(2)
    ]
    weights = [one.clone() for one in engines[0].flat.buffers]
    found = []
    for engine in engines:
        job = replace(job_of(1, 0), weights=weights, steps=3)
        (trained,) = engine.train([job])
        # B in every step, whatever the coins gave.
        assert trained.samples == 15
        found.append(trained.delta[0])
    assert not torch.equal(*found)


@pytest.mark.parametrize(
    ("strategy", "world", "reason"),
    [
        (fed_avg(), dure.Simulated(engine="batched"), "the engine batched does not clip"),
        (fed_avg(epsilon=3.0), dure.Simulated(), "the noise cannot be chosen for an epsilon"),
        (fed_avg(held_out=0.2, fine_tune=1), dure.Simulated(), "fine_tune trains"),
        (fed_avg(), dure.Simulated(arrival="arriving:0.1:3600"), "examples change over time"),
        (dure.Ditto(clients=4, privacy="dp-sgd:1:1"), dure.Simulated(), "a client of ditto"),
    ],
)
def test_what_does_not_go_with_it_is_refused_by_name(
    strategy: dure.Strategy, world: dure.World, reason: str
) -> None:
    with pytest.raises(ValueError, match=reason):
        dure.train(small_task(), strategy, world=world, stop=ROUNDS)
