"""A small task for tests: a network of about 200 parameters in float64, on data made from a
seed."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

import dure
from dure.contracts.fresh_model import seeded_model

EXAMPLES, FEATURES, CLASSES = 41, 6, 3


def network(dtype: torch.dtype = torch.float64) -> nn.Module:
    """6-12-8-3 with tanh: 215 parameters."""
    return nn.Sequential(
        nn.Linear(FEATURES, 12), nn.Tanh(), nn.Linear(12, 8), nn.Tanh(), nn.Linear(8, CLASSES)
    ).to(dtype)


def examples(n: int = EXAMPLES, seed: int = 0) -> dure.Examples:
    generator = torch.Generator().manual_seed(seed)
    inputs = torch.randn(n, FEATURES, generator=generator, dtype=torch.float64)
    targets = (inputs[:, :CLASSES] + 0.3 * torch.randn(n, CLASSES, generator=generator)).argmax(
        dim=1
    )
    return dure.Examples(inputs, targets, keys=[f"owner {i % 3}" for i in range(n)])


def small_task(lr: float = 0.3, n: int = EXAMPLES, **changes: Any) -> dure.Task:
    settings: dict[str, Any] = {
        "model": network,
        "loss": F.cross_entropy,
        "train": examples(n),
        "test": examples(20, seed=1),
        "optimizer": partial(torch.optim.SGD, lr=lr),
        "name": "small",
    }
    return dure.Task(**{**settings, **changes})


def diverging_task() -> dure.Task:
    """Its weights are not finite after a step. As a tensor a rate is the optimizer's own affair."""
    return small_task(lr=torch.tensor(1e308, dtype=torch.float64))  # type: ignore[arg-type]


def weights_of(run: dure.Run) -> torch.Tensor:
    """All weights of a run's model in one vector."""
    weights = [
        torch.view_as_real(v) if v.is_complex() else v for v in run.model.state_dict().values()
    ]
    return torch.cat([value.double().reshape(-1) for value in weights])


def largest_difference(first: dure.Run, second: dure.Run) -> float:
    return float((weights_of(first) - weights_of(second)).abs().max())


def same_bits(first: dure.Run, second: dure.Run) -> bool:
    mine, other = first.model.state_dict(), second.model.state_dict()
    return mine.keys() == other.keys() and all(
        torch.equal(mine[name], other[name]) for name in mine
    )


def check_all(strategy: dure.Strategy, task: dure.Task, workers: int | None) -> None:
    """What a strategy checks before any work: its fields, then the model."""
    world = dure.Simulated() if workers is None else dure.Processes(workers)
    strategy.check(task, world)
    strategy.check_model(task, seeded_model(task, 0), world)
