"""A pipeline measures what one worker measures, also of what training does not use."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from beside import CLOSE, compare, on_ranks, pipeline, task_of
from torch import Tensor, nn
from torch.nn import functional as F

import dure
from dure.contracts.world import RankContext
from dure.errors import WorkerFailedError
from small import CLASSES, FEATURES


def numbers(*shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(0), dtype=torch.float64)


def labels(count: int) -> Tensor:
    return torch.randint(0, CLASSES, (count,), generator=torch.Generator().manual_seed(1))


class Mean(nn.Module):
    """Of vectors, as many as there are; their number is in the trace."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(FEATURES, 5)
        self.last = nn.Linear(5, CLASSES)
        self.double()

    def forward(self, inputs: Tensor) -> Tensor:
        scores: Tensor = self.last(torch.tanh(self.first(inputs).sum(1) / inputs.shape[1]))
        return scores


class Calm(Mean):
    """Evaluation uses a parameter and a buffer that training does not, in the places of others."""

    def __init__(self) -> None:
        super().__init__()
        self.other = nn.Linear(5, CLASSES).double()
        self.register_buffer("temperature", torch.full((), 0.3, dtype=torch.float64))

    def forward(self, inputs: Tensor) -> Tensor:
        hidden = torch.tanh(self.first(inputs).mean(1))
        scores: Tensor = (
            self.last(hidden) / 1.0 if self.training else self.other(hidden) / self.temperature
        )
        return scores


def structured() -> dure.Task:
    """Targets of two tensors, and chunks of two lengths."""

    def loss(outputs: Tensor, targets: Any) -> Tensor:
        return (
            F.cross_entropy(outputs, targets["label"], reduction="none") * targets["weight"]
        ).mean()

    train = numbers(20, 3, FEATURES), {"label": labels(20), "weight": numbers(20).abs()}
    test = (
        numbers(21, 3, FEATURES),
        {"label": labels(21), "weight": torch.arange(21.0, dtype=torch.float64)},
    )
    return dure.Task(Mean, loss, train, test)


TASKS = {
    "targets of a structure": structured,
    "longer tests": lambda: task_of(
        Mean, numbers(20, 3, FEATURES), labels(20), test=(numbers(20, 7, FEATURES), labels(20))
    ),
    "parts for evaluation": lambda: task_of(Calm, numbers(20, 3, FEATURES), labels(20)),
}


@pytest.mark.parametrize("ranks", [1, 2])
def test_a_pipeline_measures_what_one_worker_does(ranks: int) -> None:
    def program(context: RankContext) -> dict[str, float]:
        chosen = pipeline(context, microbatches=2)
        return {name: compare(context, make(), chosen, steps=2) for name, make in TASKS.items()}

    found = on_ranks(ranks, program)[0]
    assert all(distance < CLOSE for distance in found.values()), found


class Growing(dure.Examples):
    """Batches that become longer."""

    def batch(self, indices: Tensor) -> tuple[Any, Any]:
        inputs, targets = super().batch(indices)
        self.read = getattr(self, "read", 0) + 1
        return (inputs.repeat(1, 2, 1) if self.read > 6 else inputs), targets


def test_examples_of_another_shape_are_refused() -> None:
    task = dure.Task(Mean, F.cross_entropy, Growing(numbers(20, 3, FEATURES), labels(20)), None)
    with pytest.raises(
        WorkerFailedError, match=r"examples of shape \[6, 6\] come after others of \[3, 6\]"
    ):
        dure.train(task, dure.Pipeline(8, 2), dure.Processes(1), dure.Stop(steps=6), check=False)
