"""Federated algorithms are one another's special cases: float64, 1e-12."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch

import dure
from dure.contracts.fresh_model import seeded_model
from dure.randomness.permutation import Permutation
from dure.randomness.seeds import derive
from small import examples, largest_difference, same_bits, small_task

TOLERANCE = 1e-12
SKEWED = dure.QuantitySkew(0.5)
ENGINE = pytest.mark.parametrize("engine", ["loop", "batched"])


def train(strategy: Any, rounds: int = 4, task: dure.Task | None = None, **world: Any) -> dure.Run:
    return dure.train(
        task or small_task(), strategy, dure.Simulated(**world), dure.Stop(rounds=rounds), seed=3
    )


def alone(batch_size: int | None, stop: dure.Stop) -> dure.Run:
    return dure.train(small_task(), dure.SingleWorker(batch_size), stop=stop, seed=3)


@pytest.mark.parametrize(
    "strategy",
    [
        dure.FedProx(
            clients=5, fraction=0.6, local_epochs=2, batch_size=4, partition=SKEWED, mu=0.0
        ),
        dure.FedAvgM(
            clients=5, fraction=0.6, local_epochs=2, batch_size=4, partition=SKEWED, beta1=0.0
        ),
        dure.FedPer(
            clients=5,
            fraction=0.6,
            local_epochs=2,
            batch_size=4,
            partition=SKEWED,
            held_out=0,
            personal_layers=0,
        ),
        dure.Ditto(
            clients=5, fraction=0.6, local_epochs=2, batch_size=4, partition=SKEWED, held_out=0.0
        ),
    ],
    ids=lambda strategy: strategy.name,
)
def test_fed_avg_is_what_others_are_without_what_is_theirs(strategy: Any) -> None:
    plain = dure.FedAvg(clients=5, fraction=0.6, local_epochs=2, batch_size=4, partition=SKEWED)
    assert largest_difference(train(plain), train(strategy)) < TOLERANCE


@ENGINE
@pytest.mark.parametrize(
    "options",
    [
        {"local_epochs": 2, "batch_size": 4},
        {"batch_size": None},
        {"batch_size": None, "local_steps": 3, "selection": "weighted"},
        {"batch_size": 5, "aggregate": "median", "held_out": 0.2},
    ],
    ids=["batches", "one step", "by size", "median"],
)
@pytest.mark.parametrize("momentum", [0.0, 0.9])
def test_without_a_pull_fed_prox_has_the_bits_of_fed_avg(
    engine: str, options: dict[str, Any], momentum: float
) -> None:
    task = small_task(
        optimizer=partial(torch.optim.SGD, lr=0.2, momentum=momentum, weight_decay=0.01)
    )
    shared: dict[str, Any] = {"clients": 5, "fraction": 0.6, "partition": SKEWED, **options}
    plain, proximal = (
        train(strategy, task=task, engine=engine, devices="lognormal:1")
        for strategy in (dure.FedAvg(**shared), dure.FedProx(mu=0.0, **shared))
    )
    assert same_bits(plain, proximal)
    assert [step.loss for step in plain.history.steps] == [
        step.loss for step in proximal.history.steps
    ]
    assert plain.summary["bytes_sent"] == proximal.summary["bytes_sent"]


def test_scaffold_with_controls_of_zero_is_fed_avg() -> None:
    options: dict[str, Any] = {"clients": 5, "fraction": 0.6, "batch_size": 4, "partition": SKEWED}
    first_round = train(dure.Scaffold(by_examples=True, **options), rounds=1)
    assert largest_difference(train(dure.FedAvg(**options), rounds=1), first_round) < TOLERANCE
    later = train(dure.Scaffold(by_examples=True, **options), rounds=3)
    assert largest_difference(train(dure.FedAvg(**options), rounds=3), later) > 1e-6, (
        "afterwards they are not zero"
    )


@pytest.mark.parametrize(
    "strategy",
    [
        dure.Scaffold(clients=1, batch_size=7),
        dure.FedAsync(clients=1, fraction=1.0, batch_size=7, alpha=1.0, rho=0.0),
        dure.FedBuff(clients=1, fraction=1.0, batch_size=7, buffer=1),
        dure.FedProx(clients=1, batch_size=7, mu=0.0),
        dure.FedAvg(clients=1, batch_size=7, aggregate="median"),
    ],
    ids=lambda strategy: strategy.label,
)
def test_a_federation_of_one_client_is_one_worker(strategy: Any) -> None:
    assert largest_difference(train(strategy), alone(7, dure.Stop(epochs=4))) < TOLERANCE


@pytest.mark.parametrize(
    "strategy",
    [
        dure.FedSGD(clients=4, partition=SKEWED),
        dure.PerFedAvg(
            clients=4, batch_size=None, partition=SKEWED, alpha=0.0, held_out=0.0, fine_tune=0
        ),
    ],
    ids=lambda strategy: strategy.name,
)
def test_one_full_step_of_all_clients_by_examples_is_gradient_descent(strategy: Any) -> None:
    assert largest_difference(train(strategy), alone(None, dure.Stop(steps=4))) < TOLERANCE


def equal_shares() -> dure.Task:
    return small_task(n=40)


@pytest.mark.parametrize(
    "strategy",
    [
        dure.ByzantineGD(clients=4, groups=1),
        dure.FedBuff(clients=4, fraction=1.0, batch_size=None, buffer=4),
        dure.FedSGD(clients=4, aggregate="trimmed-mean:0"),
    ],
    ids=lambda strategy: strategy.name,
)
def test_one_full_step_of_equal_clients_is_data_parallel(strategy: Any) -> None:
    many = dure.train(
        equal_shares(), dure.DataParallel(None), dure.Processes(2), dure.Stop(steps=4), seed=3
    )
    assert largest_difference(train(strategy, task=equal_shares()), many) < TOLERANCE


def test_fed_buff_of_all_clients_without_delays_is_fed_avg() -> None:
    options: dict[str, Any] = {"clients": 4, "local_epochs": 2, "batch_size": 5}
    buffered = train(dure.FedBuff(fraction=1.0, buffer=4, **options), task=equal_shares())
    assert (
        largest_difference(buffered, train(dure.FedAvg(**options), task=equal_shares())) < TOLERANCE
    )


@pytest.mark.parametrize("alpha", [0.0, 1.0])
def test_fed_async_takes_the_whole_model_or_nothing(alpha: float) -> None:
    strategy = dure.FedAsync(clients=3, fraction=0.4, batch_size=None, alpha=alpha, rho=0.0)
    run = train(strategy, rounds=3)
    task, parts = small_task(), strategy.divide(small_task(), 3)
    model = seeded_model(task, 3)
    optimizer = task.optimizer(model.parameters())
    asked = Permutation(3, derive(3, "candidates", 0)).first(3)
    for client in (
        asked if alpha else ()
    ):  # one at a time: each goes on from the model of the one before it
        inputs, targets = task.train.batch(parts[client])
        optimizer.zero_grad()
        task.loss(model(inputs), targets).backward()  # type: ignore[no-untyped-call]
        optimizer.step()
    pairs = zip(run.model.parameters(), model.parameters(), strict=True)
    assert max(float((one - other).detach().abs().max()) for one, other in pairs) < TOLERANCE


OWNERS: dict[str, Any] = {
    "clients": None,
    "partition": "natural-key",
    "batch_size": None,
    "local_steps": 3,
}


@ENGINE
@pytest.mark.parametrize("strategy", [dure.FedAvg, dure.FedProx, dure.Scaffold])
def test_clients_with_the_same_data_are_together_what_each_is_alone(
    strategy: Any, engine: str
) -> None:
    one = examples(13)
    keys = [name for name in "abcd" for _ in range(13)]
    four = dure.Examples(one.inputs.repeat(4, 1), one.targets.repeat(4), keys=keys)
    together = train(strategy(**OWNERS), task=small_task(train=four), engine=engine)
    alone = train(
        strategy(clients=1, batch_size=None, local_steps=3),
        task=small_task(train=one),
        engine=engine,
    )
    assert largest_difference(together, alone) < TOLERANCE


def test_slow_devices_change_nothing_where_everybody_is_waited_for() -> None:
    options: dict[str, Any] = {"clients": 6, "fraction": 0.5, "batch_size": 4}
    fast, slow = (
        train(dure.FedAvg(**options), devices=devices) for devices in ("equal", "lognormal:2")
    )
    assert largest_difference(fast, slow) == 0.0
    seconds = [run.history.steps[-1].numbers["virtual_seconds"] for run in (fast, slow)]  # type: ignore[index]
    assert seconds[0] != seconds[1]


def test_adam_on_the_server_is_the_recursion_by_hand() -> None:
    task = small_task()
    run = train(
        dure.FedAdam(clients=1, batch_size=None, server_lr=0.3, beta1=0.9, beta2=0.99, tau=1e-3),
        rounds=3,
        task=task,
    )
    torch.manual_seed(0)
    model = dure.train(
        task, dure.FedAvg(clients=1, server_lr=1e-300), stop=dure.Stop(rounds=1), seed=3
    ).model
    weights = [p.detach().clone() for p in model.parameters()]
    m, v = [torch.zeros_like(w) for w in weights], [torch.full_like(w, 1e-6) for w in weights]
    inputs, targets = task.train.inputs, task.train.targets
    for _ in range(3):
        for parameter, weight in zip(model.parameters(), weights, strict=True):
            parameter.data = weight.clone()
        gradients = torch.autograd.grad(
            torch.nn.functional.cross_entropy(model(inputs), targets), list(model.parameters())
        )
        for i, gradient in enumerate(gradients):
            delta = -0.3 * gradient
            m[i] = 0.9 * m[i] + 0.1 * delta
            v[i] = 0.99 * v[i] + 0.01 * delta**2
            weights[i] = weights[i] + 0.3 * m[i] / (v[i].sqrt() + 1e-3)
    for parameter, weight in zip(run.model.parameters(), weights, strict=True):
        assert torch.allclose(parameter, weight, atol=1e-12)


ENGINES = ["loop", "batched", "loop-processes", "batched-processes"]


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize(
    "strategy",
    [
        dure.FedAvg(clients=6, fraction=0.5, local_epochs=2, batch_size=4, partition=SKEWED),
        dure.Scaffold(clients=6, fraction=0.5, batch_size=4, partition=SKEWED),
        dure.FedBuff(clients=6, fraction=0.5, batch_size=4, partition=SKEWED, buffer=2),
        dure.FedProx(clients=6, fraction=0.5, batch_size=4, partition=SKEWED, mu=0.1),
    ],
    ids=lambda strategy: strategy.name,
)
def test_every_engine_computes_the_same(strategy: Any, engine: Any) -> None:
    task = small_task(optimizer=partial(torch.optim.SGD, lr=0.2))
    loop = train(strategy, task=task, engine="loop")
    other = train(strategy, task=task, engine=engine)
    difference = largest_difference(loop, other)
    assert difference < TOLERANCE
    assert difference == 0.0 or engine.startswith("batched")
