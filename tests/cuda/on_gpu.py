"""What tests on a GPU share: the device, models that are made there, and their comparison."""

from __future__ import annotations

import pickle
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

import dure
from dure.contracts.world import RankContext
from small import CLASSES, FEATURES, network

GPU = torch.device("cuda", 0)
CLOSE = 1e-9
"""float64 on both sides, so that only the order of sums differs."""


BACKENDS: list[Any] = ["gloo", "dure"]


def on_ranks(ranks: int, program: Callable[[RankContext], Any], backend: Any) -> list[Any]:
    """What `program` returns on every rank, in order of rank."""

    def gathered(context: RankContext) -> list[Any]:
        return [
            pickle.loads(part)
            for part in context.group.gather_bytes(pickle.dumps(program(context)))
        ]

    result: list[Any] = dure.Processes(ranks, deadline=30, backend=backend).run(
        gathered, lambda event: None
    )
    return result


def there(make: Callable[[], nn.Module] = network) -> Callable[[], nn.Module]:
    """A task's model function that makes its models on the GPU."""
    return lambda: make().to(GPU)


def drawn_there() -> nn.Module:
    """A model whose weights are drawn on the GPU."""
    layers = [
        nn.Linear(FEATURES, 12, dtype=torch.float64, device=GPU),
        nn.Dropout(0.3),
        nn.Linear(12, CLASSES, dtype=torch.float64, device=GPU),
    ]
    return nn.Sequential(*layers)


def with_dropout() -> nn.Module:
    layers = [
        nn.Linear(FEATURES, 16),
        nn.BatchNorm1d(16),
        nn.ReLU(),
        nn.Dropout(0.3),
        nn.Linear(16, CLASSES),
    ]
    return nn.Sequential(*layers).double()


def vector(run: dure.Run) -> Tensor:
    """All weights and buffers of a run's model, on the CPU."""
    return torch.cat([one.cpu().double().reshape(-1) for one in run.model.state_dict().values()])


def apart(one: dure.Run, other: dure.Run) -> float:
    """The largest difference of two runs' models."""
    return float((vector(one) - vector(other)).abs().max())


def alike(one: dure.Run, other: dure.Run) -> bool:
    """Whether two runs have the same losses and the same bits."""
    losses = [[step.loss for step in run.history.steps] for run in (one, other)]
    return losses[0] == losses[1] and torch.equal(vector(one), vector(other))
