"""A dataset that raises is one kind of error, in whichever system it is read."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.data import Dataset

import dure
from dure.errors import WorkerFailedError
from small import CLASSES, FEATURES, small_task


class Torn(Dataset[Any]):
    """Twelve examples, of which one cannot be read."""

    def __init__(self, at: int) -> None:
        self.at = at

    def __len__(self) -> int:
        return 12

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        if index == self.at:
            raise LookupError("the page is gone")
        return torch.ones(FEATURES, dtype=torch.float64), index % CLASSES


@pytest.mark.parametrize("at", [0, 7])
@pytest.mark.parametrize(
    ("strategy", "stop"),
    [
        (dure.SingleWorker(4), dure.Stop(epochs=1)),
        (dure.Hogwild(batch_size=4), dure.Stop(epochs=1)),
        (dure.FedAvg(clients=2), dure.Stop(rounds=1)),
        (dure.FedAvg(clients=2, partition="dirichlet:1"), dure.Stop(rounds=1)),  # type: ignore[arg-type]
        (dure.SplitFed(clients=2), dure.Stop(rounds=1)),
        (dure.Downpour(), dure.Stop(epochs=1)),
    ],
    ids=lambda one: getattr(one, "name", ""),
)
def test_it_is_told_with_the_example(strategy: dure.Strategy, stop: dure.Stop, at: int) -> None:
    world = dure.Threads(1) if strategy.name == "hogwild" else None
    reason = f"ExampleError: the dataset cannot give example {at}: LookupError: the page is gone"
    with pytest.raises(WorkerFailedError) as caught:
        dure.train(small_task(train=Torn(at)), strategy, world, stop)
    assert caught.value.reason == reason
