"""Same seed, same world: same bits. Another seed: other bits."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import nn

import dure
from small import CLASSES, FEATURES, same_bits, small_task


def with_dropout() -> nn.Module:
    return nn.Sequential(
        nn.Linear(FEATURES, 16), nn.BatchNorm1d(16), nn.Dropout(0.3), nn.Linear(16, CLASSES)
    )


SYSTEMS: dict[str, Callable[[], tuple[object, object]]] = {
    "single worker": lambda: (dure.SingleWorker(10), dure.Processes(1)),
    "gradient descent": lambda: (dure.SingleWorker(None), dure.Processes(1)),
    "ring": lambda: (dure.DataParallel(20, "ring"), dure.Processes(3)),
    "master": lambda: (dure.DataParallel(20, "master"), dure.Processes(3)),
    "native": lambda: (dure.DataParallel(20, "native"), dure.Processes(2)),
    "local-sgd": lambda: (dure.LocalSGD(20, 2), dure.Processes(3)),
    "diloco": lambda: (dure.DiLoCo(20, 2), dure.Processes(2)),
    "admm": lambda: (dure.ADMM(20), dure.Processes(2)),
    "parallel-sgd": lambda: (dure.ParallelSGD(20), dure.Processes(2)),
    "threads": lambda: (dure.DataParallel(20), dure.Threads(3)),
    "layers-per-core": lambda: (dure.LayersPerCore(20, 3), dure.Threads(2)),
    "fed-avg": lambda: (dure.FedAvg(5, 0.6, 2, batch_size=4), dure.Simulated()),
}


@pytest.mark.parametrize("name", SYSTEMS)
def test_the_same_seed_gives_the_same_bits_with_dropout_and_batch_norm(name: str) -> None:
    def run(seed: int) -> dure.Run:
        torch.manual_seed(seed + 100)  # the global generator must not matter
        strategy, world = SYSTEMS[name]()
        task = small_task(
            n=40, model=with_dropout, dtype=torch.float32
        )  # no batch of one, which batch norm refuses
        return dure.train(task, strategy, world, dure.Stop(epochs=3), seed=seed)  # type: ignore[arg-type]

    first, again, other = run(1), run(1), run(2)
    assert same_bits(first, again)
    assert [r.loss for r in first.history.steps] == [r.loss for r in again.history.steps]
    assert [e.metrics for e in first.history.evaluations] == [
        e.metrics for e in again.history.evaluations
    ]
    assert not same_bits(first, other)
