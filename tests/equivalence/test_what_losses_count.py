"""Every system weighs its parts by what the loss counts in them: float64, 1e-12.

In the data most examples of some ranks, micro-batches and clients count little, and some nothing.
"""

from __future__ import annotations

import dataclasses
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import dure
from dure.contracts.fresh_model import examples_for
from dure.contracts.strategy import Strategy
from dure.contracts.world import World
from dure.data.batches import Batches
from small import largest_difference, network, small_task

TOLERANCE = 1e-12
WEIGHT = torch.tensor([0.2, 1.0, 3.0], dtype=torch.float64)


def sum_and_count(outputs: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
    """A cross-entropy of one's own, that ignores a class and weighs the others."""
    total = F.cross_entropy(outputs, targets, WEIGHT, ignore_index=1, reduction="sum")
    return total, WEIGHT[targets[targets != 1]].sum()


LOSSES: dict[str, Any] = {
    "ignored targets": partial(F.cross_entropy, ignore_index=1),
    "class weights": nn.CrossEntropyLoss(WEIGHT),
    "sum and count": sum_and_count,
}
EVERY = pytest.mark.parametrize("loss", LOSSES)
# For systems whose ranks are processes: one that dure knows, and one that says itself what it
# counts, which is nothing for some examples.
TWO = pytest.mark.parametrize("loss", ["class weights", "sum and count"])


def task_of(loss: str, **changes: Any) -> dure.Task:
    return small_task(loss=LOSSES[loss], **changes)


def alone(task: dure.Task, batch_size: int | None, stop: dure.Stop) -> dure.Run:
    return dure.train(task, dure.SingleWorker(batch_size), stop=stop, seed=3)


@EVERY
def test_one_worker_walks_the_path_of_a_plain_loop(loss: str) -> None:
    task = task_of(loss)
    run = alone(task, 8, dure.Stop(steps=6))
    model = dure.train(task, dure.SingleWorker(8), stop=dure.Stop(steps=1), seed=3).model
    # From the weights after one step on, with the sums written out.
    examples, _ = examples_for(task)
    batches = Batches(len(examples), 8, 3)
    optimizer = task.optimizer(model.parameters())
    for step in range(1, 6):
        inputs, targets = examples.batch(batches.at(step))
        scores = torch.log_softmax(model(inputs), 1).gather(1, targets.unsqueeze(1)).squeeze(1)
        counts = WEIGHT[targets] if loss != "ignored targets" else torch.ones(len(targets))
        if loss != "class weights":
            counts = counts * (targets != 1)
        optimizer.zero_grad()
        (-(counts * scores).sum() / counts.sum()).backward()
        optimizer.step()
    pairs = zip(model.parameters(), run.model.parameters(), strict=True)
    assert max(float((a - b).detach().abs().max()) for a, b in pairs) < TOLERANCE


@pytest.mark.parametrize(
    ("strategy", "world"),
    [
        (dure.DataParallel(8, accumulate=2), dure.Processes(3)),
        (dure.DataParallel(8), dure.Processes(2)),
        (dure.ZeRO(1, 8, accumulate=2), dure.Processes(2)),
        (dure.ZeRO(2, 8), dure.Processes(3)),
        (dure.ZeRO(3, 8, accumulate=3), dure.Processes(2)),
        (dure.Pipeline(8, 5), dure.Processes(2)),
        (dure.Pipeline(8, 4, "zero-bubble"), dure.Processes(2)),
        (dure.TensorParallel(8), dure.Processes(2)),
        (dure.Parallel(dure.Mesh(data=2, tensor=2), 8, 3, zero=2), dure.Processes(4)),
        (dure.Parallel(dure.Mesh(data=2, pipeline=2), 8, 2), dure.Processes(4)),
        (dure.DataParallel(8), dure.Threads(3)),
        (dure.LayersPerCore(8, 5), dure.Threads(2)),
    ],
    ids=[
        "data parallel",
        "data parallel, clipped",
        "ZeRO 1",
        "ZeRO 2, clipped",
        "ZeRO 3",
        "pipeline",
        "zero-bubble",
        "tensor",
        "ZeRO 2 and tensor",
        "data and pipeline, clipped",
        "threads",
        "layers per core",
    ],
)
@TWO
def test_parts_of_a_batch_count_as_the_loss_counts(
    loss: str, strategy: Strategy, world: World, request: pytest.FixtureRequest
) -> None:
    task, stop = task_of(loss), dure.Stop(steps=8)
    if "clipped" in request.node.callspec.id:
        task = dataclasses.replace(task, clip_norm=0.1)
    one = alone(task, 8, stop)
    many = dure.train(task, strategy, world, stop, seed=3)
    assert largest_difference(many, one) < TOLERANCE
    check_losses(many, one)


def check_losses(many: dure.Run, one: dure.Run) -> None:
    assert [step.loss for step in many.history.steps] == pytest.approx(
        [step.loss for step in one.history.steps], abs=TOLERANCE
    )
    assert many.summary["test_loss"] == pytest.approx(one.summary["test_loss"], abs=TOLERANCE)


@pytest.mark.parametrize(
    "strategy",
    [
        dure.LocalSGD(8, 1),
        dure.DiLoCo(8, 1, outer_lr=1.0, outer_momentum=0.0),
        dure.LocalSGD(8, 1, momentum="average"),
    ],
    ids=["local SGD", "DiLoCo", "momentum"],
)
@TWO
def test_rounds_of_one_step_are_one_worker(loss: str, strategy: Strategy) -> None:
    task = task_of(loss)
    many = dure.train(task, strategy, dure.Processes(3), dure.Stop(rounds=8), seed=3)
    one = alone(task, 8, dure.Stop(steps=8))
    assert largest_difference(many, one) < TOLERANCE
    check_losses(many, one)


@pytest.mark.parametrize("world", [dure.Threads(1), dure.Processes(1)], ids=lambda one: one.name)
@EVERY
def test_hogwild_with_one_worker_is_one_worker(loss: str, world: World) -> None:
    task = task_of(loss)
    many = dure.train(task, dure.Hogwild(8, period=1), world, dure.Stop(rounds=8), seed=3)
    check_losses(many, alone(task, 8, dure.Stop(steps=8)))


@pytest.mark.parametrize("engine", ["loop", "batched", "loop-processes"])
@EVERY
def test_one_full_step_of_all_clients_is_gradient_descent(loss: str, engine: str) -> None:
    task = task_of(loss)
    strategy = dure.FedSGD(clients=4, partition=dure.QuantitySkew(0.5))
    many = dure.train(task, strategy, dure.Simulated(engine=engine), dure.Stop(rounds=4), seed=3)
    one = alone(task, None, dure.Stop(steps=4))
    assert largest_difference(many, one) < TOLERANCE
    check_losses(many, one)


@pytest.mark.parametrize(
    "strategy",
    [
        dure.PerFedAvg(clients=3, batch_size=None, alpha=0.0, held_out=0.0, fine_tune=0),
        dure.FedProx(clients=3, batch_size=None, mu=0.0),
        dure.Scaffold(clients=3, batch_size=None, by_examples=True),
        dure.Ditto(clients=3, batch_size=None, held_out=0.0),
        dure.FedAvgM(clients=3, batch_size=None, beta1=0.0),
    ],
    ids=lambda one: one.name,
)
@EVERY
def test_so_is_that_of_other_algorithms(loss: str, strategy: Strategy) -> None:
    task, rounds = task_of(loss), 1 if strategy.name == "scaffold" else 3
    many = dure.train(task, strategy, dure.Simulated(), dure.Stop(rounds=rounds), seed=3)
    assert largest_difference(many, alone(task, None, dure.Stop(steps=rounds))) < TOLERANCE


@TWO
def test_parallel_sgd_is_one_round_of_fed_avg(loss: str) -> None:
    task = task_of(loss)
    partition = dure.QuantitySkew(0.5)
    apart = dure.train(
        task,
        dure.ParallelSGD(12, partition=partition),
        dure.Processes(3),
        dure.Stop(rounds=2),
        seed=3,
    )
    strategy = dure.FedAvg(clients=3, local_epochs=2, batch_size=4, partition=partition)
    federated = dure.train(task, strategy, stop=dure.Stop(rounds=1), seed=3)
    assert largest_difference(apart, federated) < TOLERANCE


def test_admm_goes_to_the_minimum_of_the_loss_of_all_data() -> None:
    convex = {"model": lambda: nn.Linear(6, 3).double(), "lr": 0.5}
    optimizer = partial(torch.optim.SGD, lr=0.5, weight_decay=0.1)
    task = task_of("sum and count", optimizer=optimizer, **convex)
    strategy = dure.ADMM(None, local_steps=60, partition=dure.QuantitySkew(0.5), rho=0.3)
    run = dure.train(task, strategy, dure.Processes(2), dure.Stop(rounds=60), seed=3)
    best = alone(task, None, dure.Stop(steps=500))
    assert largest_difference(run, best) < 1e-5
    assert run.history.steps[0].loss is not None


@pytest.mark.parametrize(
    ("strategy", "world"),
    [
        (dure.DataParallel(8), dure.Processes(2)),
        (dure.LocalSGD(8, 1), dure.Processes(2)),
        (dure.FedSGD(clients=3), dure.Simulated(engine="loop")),
    ],
    ids=lambda one: one.name,
)
def test_a_dataset_that_is_read_example_by_example_counts_too(
    strategy: Strategy, world: World
) -> None:
    full = None if strategy.name == "fed-sgd" else 8
    given = small_task().train
    items = list(zip(given.inputs, given.targets.tolist(), strict=True))
    stop = dure.Stop(rounds=4) if strategy.traits.unit == "round" else dure.Stop(steps=4)
    for loss in LOSSES:
        many = dure.train(task_of(loss, train=items), strategy, world, stop, seed=3)
        one = alone(task_of(loss), full, dure.Stop(steps=4))
        assert largest_difference(many, one) < TOLERANCE
        check_losses(many, one)


def of_nothing() -> dict[str, Any]:
    """Data of which most counts nothing."""
    given = small_task().train
    targets = given.targets.clone()
    targets[4:] = 1
    return {"train": (given.inputs, targets)}


@pytest.mark.parametrize(
    ("strategy", "world"),
    [
        (dure.SingleWorker(4), dure.Processes(1)),
        (dure.DataParallel(4), dure.Processes(2)),
        (dure.ZeRO(3, 4), dure.Processes(2)),
        (dure.Pipeline(4, 2), dure.Processes(2)),
        (dure.DataParallel(4), dure.Threads(2)),
        (dure.LocalSGD(4, 1), dure.Processes(2)),
        (dure.Hogwild(4, period=1), dure.Threads(1)),
    ],
    ids=lambda one: one.name,
)
@pytest.mark.parametrize("loss", ["ignored targets", "sum and count"])
def test_a_batch_that_counts_nothing_moves_nothing_and_has_no_loss(
    loss: str, strategy: Strategy, world: World
) -> None:
    task = task_of(loss, model=network, **of_nothing())
    stop = dure.Stop(rounds=6) if strategy.traits.unit == "round" else dure.Stop(steps=6)
    many = dure.train(task, strategy, world, stop, seed=3)
    one = alone(task, 4, dure.Stop(steps=6))
    losses = [step.loss for step in one.history.steps]
    assert None in losses
    assert any(losses)
    assert [step.loss for step in many.history.steps] == [
        None if loss is None else pytest.approx(loss) for loss in losses
    ]
    assert largest_difference(many, one) < TOLERANCE


@pytest.mark.parametrize("engine", ["loop", "batched"])
@pytest.mark.parametrize("loss", ["ignored targets", "sum and count"])
def test_a_client_that_counts_nothing_adds_nothing(loss: str, engine: str) -> None:
    given = small_task().train
    targets = given.targets.clone()
    targets[30:] = 1
    # The numbers of clients, from which batches follow, are in the order of their names.
    keys = ["a"] * 12 + ["b"] * 18 + ["z"] * (len(targets) - 30)
    stop = dure.Stop(rounds=3)
    strategy = dure.FedAvg(clients=None, partition="natural-key", batch_size=4)  # type: ignore[arg-type]
    all_of_them, without = (
        dure.train(
            task_of(loss, train=dure.Examples(given.inputs[:n], targets[:n], keys=keys[:n])),
            strategy,
            dure.Simulated(engine=engine),
            stop,
            seed=3,
        )
        for n in (len(targets), 30)
    )
    assert largest_difference(all_of_them, without) < TOLERANCE
    check_losses(all_of_them, without)
