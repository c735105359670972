"""Systems are one another's special cases: float64, 1e-12 (DESIGN.md, the equivalence lattice)."""

from __future__ import annotations

from functools import partial

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import dure
from dure.collectives.all_reduce import Algorithm
from dure.contracts.strategy import Strategy
from dure.contracts.world import World
from small import EXAMPLES, largest_difference, small_task

TOLERANCE = 1e-12


def alone(batch_size: int | None, stop: dure.Stop) -> dure.Run:
    return dure.train(small_task(), dure.SingleWorker(batch_size), stop=stop, seed=3)


@pytest.mark.parametrize("algorithm", ["ring", "master", "native"])
@pytest.mark.parametrize("ranks", [1, 2, 3, 4])
def test_data_parallel_walks_the_path_of_one_worker(ranks: int, algorithm: Algorithm) -> None:
    stop = dure.Stop(epochs=3)
    many = dure.train(
        small_task(), dure.DataParallel(8, algorithm), dure.Processes(ranks), stop, seed=3
    )
    assert largest_difference(many, alone(8, stop)) < TOLERANCE


@pytest.mark.parametrize(
    "algorithm", ["one_shot", "tree", "halving_doubling", "hierarchical", "auto"]
)
def test_it_does_so_with_every_all_reduce(algorithm: Algorithm) -> None:
    stop = dure.Stop(epochs=2)
    many = dure.train(
        small_task(), dure.DataParallel(8, algorithm), dure.Processes(3), stop, seed=3
    )
    assert largest_difference(many, alone(8, stop)) < TOLERANCE


@pytest.mark.parametrize("batch_size", [4, 7, EXAMPLES, None])
@pytest.mark.parametrize("local_epochs", [1, 2])
def test_a_federation_of_one_client_is_one_worker(
    batch_size: int | None, local_epochs: int
) -> None:
    federated = dure.train(
        small_task(),
        dure.FedAvg(clients=1, local_epochs=local_epochs, batch_size=batch_size),
        stop=dure.Stop(rounds=3),
        seed=3,
    )
    assert (
        largest_difference(federated, alone(batch_size, dure.Stop(epochs=3 * local_epochs)))
        < TOLERANCE
    )


def test_one_client_that_counts_steps_is_one_worker() -> None:
    federated = dure.train(
        small_task(),
        dure.FedAvg(clients=1, local_steps=6, batch_size=7),
        stop=dure.Stop(rounds=4),
        seed=3,
    )
    assert largest_difference(federated, alone(7, dure.Stop(steps=24))) < TOLERANCE


@pytest.mark.parametrize(
    "partition",
    [dure.QuantitySkew(0.5), dure.LabelShards(2), dure.Dirichlet(0.3), dure.NaturalKey()],
)
def test_full_batch_fed_avg_over_unequal_clients_is_gradient_descent(
    partition: dure.QuantitySkew,
) -> None:
    clients = None if isinstance(partition, dure.NaturalKey) else 4
    strategy = dure.FedAvg(
        clients=clients, fraction=1.0, local_epochs=1, batch_size=None, partition=partition
    )
    federated = dure.train(small_task(), strategy, stop=dure.Stop(rounds=5), seed=3)
    counts = {len(part) for part in strategy.divide(small_task(), 3)}
    assert len(counts) > 1 or clients is None, (
        "the clients have to be unequal for this test to say something"
    )
    assert largest_difference(federated, alone(None, dure.Stop(steps=5))) < TOLERANCE


@pytest.mark.parametrize("ranks", [2, 3])
def test_full_batch_data_parallel_is_gradient_descent_and_fed_avg(ranks: int) -> None:
    many = dure.train(
        small_task(), dure.DataParallel(None), dure.Processes(ranks), dure.Stop(steps=5), seed=3
    )
    federated = dure.train(
        small_task(), dure.FedAvg(clients=3, batch_size=None), stop=dure.Stop(rounds=5), seed=3
    )
    assert largest_difference(many, alone(None, dure.Stop(steps=5))) < TOLERANCE
    assert largest_difference(many, federated) < TOLERANCE


@pytest.mark.parametrize("optimizer", ["momentum", "adam"])
def test_data_parallel_equals_one_worker_under_optimizers_with_state(optimizer: str) -> None:
    from functools import partial

    import torch

    made = {
        "momentum": partial(torch.optim.SGD, lr=0.1, momentum=0.9, weight_decay=1e-3),
        "adam": partial(torch.optim.Adam, lr=0.01),
    }[optimizer]
    task = small_task(optimizer=made)
    stop = dure.Stop(epochs=3)
    many = dure.train(task, dure.DataParallel(8), dure.Processes(3), stop, seed=3)
    one = dure.train(task, dure.SingleWorker(8), stop=stop, seed=3)
    assert largest_difference(many, one) < 1e-10  # Adam divides by small square roots


@pytest.mark.parametrize("partition", [dure.IID(), dure.QuantitySkew(0.5)])
def test_parallel_sgd_is_one_round_of_fed_avg(partition: dure.IID) -> None:
    apart = dure.train(
        small_task(),
        dure.ParallelSGD(12, partition=partition),
        dure.Processes(3),
        dure.Stop(rounds=2),
        seed=3,
    )
    strategy = dure.FedAvg(clients=3, local_epochs=2, batch_size=4, partition=partition)
    assert (
        largest_difference(
            apart, dure.train(small_task(), strategy, stop=dure.Stop(rounds=1), seed=3)
        )
        < TOLERANCE
    )


@pytest.mark.parametrize(
    ("passes", "partition"), [(1, dure.QuantitySkew(0.5)), (2, dure.LabelShards(1))]
)
def test_parallel_sgd_that_repeats_is_fed_avg_of_all_clients(
    passes: int, partition: dure.QuantitySkew
) -> None:
    task = small_task(optimizer=partial(torch.optim.SGD, lr=0.1, momentum=0.9))
    stop = dure.Stop(rounds=3)
    repeats = dure.ParallelSGD(12, partition=partition, combine_every=passes)
    apart = dure.train(task, repeats, dure.Processes(3), stop, seed=3)
    strategy = dure.FedAvg(
        clients=3, fraction=1.0, local_epochs=passes, batch_size=4, partition=partition
    )
    federated = dure.train(task, strategy, stop=stop, seed=3)
    assert largest_difference(apart, federated) < TOLERANCE
    assert apart.summary["epochs"] == federated.summary["epochs"] == 3 * passes
    assert [step.loss for step in apart.history.steps] == pytest.approx(
        [step.loss for step in federated.history.steps]
    )


def test_local_sgd_and_diloco_with_full_batches_are_fed_avg_where_every_round_is_one_step() -> None:
    federated = dure.train(
        small_task(), dure.FedAvg(clients=3, batch_size=None), stop=dure.Stop(rounds=5), seed=3
    )
    for strategy in (
        dure.LocalSGD(None, 1),
        dure.DiLoCo(None, 1, outer_lr=1.0, outer_momentum=0.0),
    ):
        many = dure.train(small_task(), strategy, dure.Processes(2), dure.Stop(rounds=5), seed=3)
        assert largest_difference(many, federated) < TOLERANCE


@pytest.mark.parametrize("workers", [1, 2, 3])
@pytest.mark.parametrize(
    "strategy", [dure.DataParallel(8), dure.LayersPerCore(8, 3)], ids=lambda one: one.name
)
def test_worker_threads_walk_the_path_of_one_worker(strategy: Strategy, workers: int) -> None:
    stop = dure.Stop(epochs=3)
    many = dure.train(small_task(), strategy, dure.Threads(workers), stop, seed=3)
    assert largest_difference(many, alone(8, stop)) < TOLERANCE


UNEQUAL = {
    "targets that are ignored": partial(F.cross_entropy, ignore_index=1),
    "weighted classes": nn.CrossEntropyLoss(torch.tensor([0.2, 1.0, 3.0], dtype=torch.float64)),
}
"""Losses that divide by what they count: parts of one example may count nothing."""


@pytest.mark.parametrize(
    ("strategy", "world"),
    [
        (dure.DataParallel(8, accumulate=2), dure.Processes(3)),
        (dure.ZeRO(1, 8, accumulate=2), dure.Processes(2)),
        (dure.ZeRO(3, 8, accumulate=3), dure.Processes(2)),
        (dure.Pipeline(8, 5), dure.Processes(2)),
        (dure.Parallel(dure.Mesh(data=2, tensor=2), 8, 3, zero=2), dure.Processes(4)),
        (dure.DataParallel(8), dure.Threads(3)),
        (dure.LayersPerCore(8, 5), dure.Threads(2)),
    ],
    ids=[
        "data parallel",
        "ZeRO 1",
        "ZeRO 3",
        "pipeline",
        "ZeRO 2 and tensor",
        "threads",
        "layers per core",
    ],
)
@pytest.mark.parametrize("loss", UNEQUAL)
def test_parts_of_a_batch_count_as_the_loss_counts(
    loss: str, strategy: Strategy, world: World
) -> None:
    task, stop = small_task(loss=UNEQUAL[loss]), dure.Stop(epochs=2)
    one = dure.train(task, dure.SingleWorker(8), dure.Processes(1), stop, seed=3)
    many = dure.train(task, strategy, world, stop, seed=3)
    assert largest_difference(many, one) < TOLERANCE
    assert [step.loss for step in many.history.steps] == pytest.approx(
        [step.loss for step in one.history.steps]
    )
    assert many.summary["test_loss"] == pytest.approx(one.summary["test_loss"], abs=TOLERANCE)


@pytest.mark.parametrize("world", [dure.Threads(1), dure.Processes(1)], ids=lambda one: one.name)
def test_hogwild_with_one_worker_is_one_worker(world: World) -> None:
    many = dure.train(small_task(), dure.Hogwild(8), world, dure.Stop(rounds=3), seed=3)
    assert largest_difference(many, alone(8, dure.Stop(epochs=3))) < TOLERANCE


@pytest.mark.parametrize(
    ("strategy", "ranks"),
    [
        (dure.Pipeline(8, 3, "1f1b"), 2),
        (dure.Pipeline(8, 2, "zero-bubble"), 2),
        (dure.TensorParallel(8), 2),
        (dure.Parallel(dure.Mesh(data=2, tensor=2), 8, 2), 4),
    ],
    ids=["1f1b", "zero-bubble", "tensor", "data and tensor"],
)
def test_a_divided_model_walks_the_path_of_one_worker(strategy: Strategy, ranks: int) -> None:
    stop = dure.Stop(epochs=2)
    many = dure.train(small_task(), strategy, dure.Processes(ranks), stop, seed=3)
    assert largest_difference(many, alone(8, stop)) < TOLERANCE
