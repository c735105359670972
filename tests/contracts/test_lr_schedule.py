"""Learning rates that change: those of torch's LambdaLR, whoever trains, and in a resumed run
too."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.optim.lr_scheduler import LambdaLR, StepLR

import dure
from dure.contracts.fresh_model import seeded_model
from dure.data.batches import Batches
from small import largest_difference, same_bits, small_task, weights_of

TOLERANCE = 1e-12
adam = partial(torch.optim.AdamW, lr=0.03)
momentum = partial(torch.optim.SGD, lr=0.2, momentum=0.9, nesterov=True, weight_decay=0.01)


def warm_up(step: int) -> float:
    return min(1.0, (step + 1) / 4) * 0.9**step


def half(step: int) -> float:
    return 0.5


def scheduled(**changes: Any) -> dure.Task:
    return small_task(**{"lr_schedule": warm_up, "optimizer": adam, **changes})


def alone(task: dure.Task, stop: dure.Stop, batch_size: int | None = 8) -> dure.Run:
    return dure.train(task, dure.SingleWorker(batch_size), stop=stop, seed=3)


@pytest.mark.parametrize("optimizer", [adam, momentum, lambda parameters: two_groups(parameters)])
def test_one_worker_has_the_bits_of_a_loop_with_torchs_scheduler(
    optimizer: Callable[..., Any],
) -> None:
    task = scheduled(optimizer=optimizer)
    run = alone(task, dure.Stop(steps=9))
    model = seeded_model(task, 3)
    optimizer = task.optimizer(model.parameters())
    scheduler = LambdaLR(optimizer, warm_up)
    batches = Batches(len(task.train), 8, 3)
    for step in range(9):
        inputs, targets = task.train.batch(batches.at(step))
        optimizer.zero_grad()
        task.loss(model(inputs), targets).backward()
        optimizer.step()
        scheduler.step()
    assert all(
        torch.equal(run.model.state_dict()[name], value)
        for name, value in model.state_dict().items()
    )


def two_groups(parameters: Any) -> torch.optim.Optimizer:
    first, *others = parameters
    return torch.optim.Adam(
        [{"params": [first], "lr": torch.tensor(0.05)}, {"params": others, "lr": 0.01}]
    )


@pytest.mark.parametrize(
    ("strategy", "world"),
    [
        (dure.DataParallel(8), dure.Processes(3)),
        (dure.DataParallel(8), dure.Threads(2)),
        (dure.LayersPerCore(8, 3), dure.Threads(2)),
        (dure.Hogwild(8), dure.Threads(1)),
        (dure.ZeRO(1, 8), dure.Processes(2)),
        (dure.ZeRO(3, 8), dure.Processes(2)),
        (dure.Pipeline(8, 3), dure.Processes(2)),
        (dure.TensorParallel(8), dure.Processes(2)),
        (dure.Parallel(dure.Mesh(data=2, tensor=2), 8, 2, zero=1), dure.Processes(4)),
        (dure.LocalSGD(8, 1), dure.Processes(1)),
        (dure.ParallelSGD(8), dure.Processes(1)),
    ],
    ids=lambda one: one.name if hasattr(one, "batch_size") else "",
)
def test_every_system_has_the_rates_of_one_worker(strategy: Any, world: Any) -> None:
    stop = dure.Stop(steps=9) if strategy.traits.unit == "step" else dure.Stop(epochs=2)
    task = scheduled()
    run = dure.train(task, strategy, world, stop, seed=3)
    steps = 9 if strategy.traits.unit == "step" else 12
    assert largest_difference(run, alone(task, dure.Stop(steps=steps))) < TOLERANCE
    assert (
        largest_difference(run, alone(scheduled(lr_schedule=None), dure.Stop(steps=steps))) > 1e-4
    )


ENGINES = ("loop", "batched", "loop-processes", "batched-processes")
sgd = partial(torch.optim.SGD, lr=0.3)


@pytest.mark.parametrize("engine", ENGINES)
def test_one_client_has_the_rates_of_its_round(engine: str) -> None:
    per_round = math.ceil(41 / 7)
    task = scheduled(optimizer=sgd)
    world = dure.Simulated(engine=engine, processes=2)
    run = dure.train(task, dure.FedAvg(clients=1, batch_size=7), world, dure.Stop(rounds=4), seed=3)
    stretched = scheduled(optimizer=sgd, lr_schedule=lambda step: warm_up(step // per_round))
    assert largest_difference(run, alone(stretched, dure.Stop(epochs=4), 7)) < TOLERANCE


@pytest.mark.parametrize("engine", ENGINES[1:])
@pytest.mark.parametrize(
    ("optimizer", "system"),
    [(sgd, partial(dure.FedBuff, buffer=2)), (momentum, dure.FedAvg)],
    ids=["plain", "momentum"],
)
def test_all_engines_have_the_same_rates(engine: str, optimizer: Any, system: Any) -> None:
    strategy = system(
        clients=5, fraction=0.6, local_epochs=2, batch_size=4, partition=dure.QuantitySkew(0.5)
    )

    def rounds(engine: str, schedule: Any = warm_up) -> dure.Run:
        task = scheduled(optimizer=optimizer, lr_schedule=schedule)
        world = dure.Simulated(engine=engine, processes=2, devices="lognormal:1")
        return dure.train(task, strategy, world, dure.Stop(rounds=5), seed=3)

    loop = rounds("loop")
    assert largest_difference(loop, rounds(engine)) < TOLERANCE
    assert largest_difference(loop, rounds("loop", None)) > 1e-4


@pytest.mark.parametrize(
    "strategy",
    [
        dure.FedAvg(clients=4, batch_size=4),
        dure.FedSGD(clients=4),
        dure.Scaffold(clients=4, batch_size=4),
        dure.Ditto(clients=4, batch_size=4),
        dure.FedPer(clients=4, batch_size=4, held_out=0.3, fine_tune=1),
        dure.PerFedAvg(clients=4, batch_size=4),
        dure.FedAsync(clients=4, batch_size=4),
        dure.ByzantineGD(clients=4, groups=2),
    ],
    ids=lambda strategy: strategy.name,
)
@pytest.mark.parametrize("kind", ["plain", "adam"])
def test_half_of_the_rate_is_the_rate_of_half(strategy: Any, kind: str) -> None:
    if kind == "adam" and strategy.name in ("scaffold", "fed-sgd", "byzantine"):
        return  # these want plain SGD
    make = {"plain": torch.optim.SGD, "adam": torch.optim.Adam}[kind]

    def run(lr: float, schedule: Any) -> dure.Run:
        task = small_task(n=80, optimizer=partial(make, lr=lr), lr_schedule=schedule)
        return dure.train(task, strategy, dure.Simulated(), dure.Stop(rounds=4), seed=3)

    halved, slow = run(0.25, half), run(0.125, None)
    assert same_bits(halved, slow)
    assert halved.history.evaluations[-1].metrics == slow.history.evaluations[-1].metrics


def test_a_round_at_rate_zero_leaves_scaffolds_model_and_controls() -> None:
    strategy = dure.Scaffold(clients=4, batch_size=4)

    def run(schedule: Any, rounds: int) -> dure.Run:
        task = scheduled(optimizer=sgd, lr_schedule=schedule)
        return dure.train(task, strategy, dure.Simulated(), dure.Stop(rounds=rounds), seed=3)

    still = run(lambda round: 0.0, 3)
    untouched = seeded_model(small_task(), 3).state_dict()
    assert all(
        torch.equal(still.model.state_dict()[name], value) for name, value in untouched.items()
    )
    assert bool(weights_of(run(lambda round: float(round > 0), 3)).isfinite().all())


@pytest.mark.parametrize(
    ("strategy", "world"),
    [
        (dure.SingleWorker(8), dure.Processes(1)),
        (dure.ZeRO(2, 8), dure.Processes(2)),
        (dure.Pipeline(8, 2), dure.Processes(2)),
        (dure.LocalSGD(8, 3, momentum="reset"), dure.Processes(2)),
        (dure.FedAvg(clients=3, batch_size=4), dure.Simulated()),
    ],
    ids=lambda one: one.name,
)
def test_a_resumed_run_has_the_rates_of_the_whole(
    strategy: Any, world: Any, tmp_path: Path
) -> None:
    task = scheduled()
    unit = strategy.traits.unit + "s"
    whole = dure.train(task, strategy, world, dure.Stop(**{unit: 6}), seed=3)
    dure.train(task, strategy, world, dure.Stop(**{unit: 3}), seed=3, out=tmp_path / "run")
    gone_on = dure.resume(tmp_path / "run", task=task, stop=dure.Stop(**{unit: 6}))
    assert same_bits(whole, gone_on)


@pytest.mark.parametrize(
    ("strategy", "world"),
    [
        (dure.SingleWorker(8), dure.Processes(1)),
        (dure.FedAvg(clients=3, batch_size=4), dure.Simulated()),
    ],
    ids=lambda one: one.name,
)
def test_a_rate_that_is_a_tensor_stays_the_tasks_own(strategy: Any, world: Any) -> None:
    rate = torch.tensor(0.25, dtype=torch.float64)
    stop = dure.Stop(**{strategy.traits.unit + "s": 4})
    make = partial(torch.optim.Adam, lr=rate)
    runs = [
        dure.train(small_task(optimizer=make, lr_schedule=half), strategy, world, stop, seed=3)
        for _ in range(2)
    ]
    slow = dure.train(
        small_task(optimizer=partial(torch.optim.Adam, lr=0.125)), strategy, world, stop, seed=3
    )
    assert float(rate) == 0.25
    assert same_bits(*runs)
    assert largest_difference(runs[0], slow) < TOLERANCE


def test_models_are_tuned_with_the_rate_of_the_last_round() -> None:
    rates = [1.0, 0.5, 0.25]  # no rate for a round behind the last
    strategy = dure.FedAvg(clients=4, batch_size=4, held_out=0.3, fine_tune=2)
    task = small_task(n=80, lr_schedule=lambda round: rates[round])
    run = dure.train(task, strategy, dure.Simulated(), dure.Stop(rounds=3), seed=3)
    last = run.history.evaluations[-1].metrics
    assert last["personal_loss"] != last["client_loss"]


class Alike:
    """What steps like an optimizer, and is none."""

    def __init__(self, parameters: Any) -> None:
        self.parameters = list(parameters)

    def step(self) -> None:
        with torch.no_grad():
            for parameter in self.parameters:
                parameter -= 0.3 * parameter.grad

    def zero_grad(self, set_to_none: bool = True) -> None:
        for parameter in self.parameters:
            parameter.grad = None

    def state_dict(self) -> dict[str, Any]:
        return {}


def test_without_a_schedule_nobody_asks_for_rates() -> None:
    stop = dure.Stop(steps=5)
    run = dure.train(
        small_task(optimizer=Alike), dure.DataParallel(8), dure.Processes(2), stop, seed=3
    )
    assert largest_difference(run, alone(small_task(), stop)) < TOLERANCE
    with pytest.raises(ValueError, match="Alike has no learning rate"):
        dure.train(scheduled(optimizer=Alike), dure.SingleWorker(8), stop=stop)


class NoRate(torch.optim.Optimizer):
    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, {})


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"lr_schedule": lambda step: -1.0}, r"lr_schedule\(0\) is -1.0"),
        ({"lr_schedule": lambda step: math.nan}, r"lr_schedule\(0\) is nan"),
        ({"lr_schedule": lambda: 1.0}, r"lr_schedule\(0\) raised TypeError"),
        (
            {"lr_schedule": partial(StepLR, step_size=3)},
            "a function of the step that returns a factor",
        ),
        ({"optimizer": NoRate}, "NoRate has no learning rate"),
        (
            {"optimizer": lambda parameters: NoRate([{"params": list(parameters), "lr": None}])},
            "NoRate has no learning rate",
        ),
    ],
    ids=["negative", "nan", "no argument", "a scheduler", "no rate", "none"],
)
@pytest.mark.parametrize(
    "strategy", [dure.SingleWorker(), dure.FedAvg(clients=2)], ids=lambda one: one.name
)
def test_what_is_no_schedule_is_refused_before_any_work(
    strategy: Any, changes: Any, said: str
) -> None:
    task = scheduled(**changes)
    with pytest.raises(ValueError, match=said):
        dure.train(task, strategy, stop=dure.Stop(epochs=1))


def test_a_schedule_is_a_function() -> None:
    with pytest.raises(ValueError, match="step -> factor"):
        small_task(lr_schedule=0.9)


def test_a_schedule_that_breaks_later_ends_the_run_with_its_words() -> None:
    task = scheduled(lr_schedule=lambda step: 1.0 if step < 2 else math.inf)
    with pytest.raises(dure.errors.WorkerFailedError, match=r"lr_schedule\(2\) is inf"):
        dure.train(task, dure.DataParallel(8), dure.Processes(2), dure.Stop(steps=5))
