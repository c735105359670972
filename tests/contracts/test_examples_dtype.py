"""In which dtype a model is given its examples: that of what it trains."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import dure
from dure.contracts.strategy import examples_for, seeded_model
from small import CLASSES, FEATURES, network, small_task


class Scaled(nn.Module):
    """A constant that is not trained comes first, in a dtype of its own."""

    def __init__(self, kept: torch.dtype, trained: torch.dtype) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.tensor([0.3], dtype=kept), requires_grad=False)
        self.rest = nn.Linear(FEATURES, CLASSES).to(trained)

    def forward(self, inputs: Tensor) -> Tensor:
        scores: Tensor = self.rest(inputs * self.scale.to(inputs.dtype))
        return scores


def dtypes_of(model: nn.Module, task: dure.Task) -> set[torch.dtype]:
    train, test = examples_for(model, task)
    assert test is not None
    leaves = [*train.batch(torch.arange(2)), *test.batch(torch.arange(2))]
    return {leaf.dtype for leaf in leaves if leaf.is_floating_point()}


@pytest.mark.parametrize("kept", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
@pytest.mark.parametrize("trained", [torch.float32, torch.float64])
def test_examples_have_the_dtype_of_what_is_trained(
    kept: torch.dtype, trained: torch.dtype
) -> None:
    # Targets that are measured are rounded no more than what they are compared with.
    numbers = dure.Examples(torch.randn(8, FEATURES), torch.randn(8, CLASSES))
    task = small_task(loss=F.mse_loss, train=numbers, test=numbers, metrics={})
    assert dtypes_of(Scaled(kept, trained), task) == {trained}


def test_where_nothing_is_trained_what_there_is_decides() -> None:
    task = small_task()
    assert dtypes_of(network(torch.float32).requires_grad_(False), task) == {torch.float32}
    assert dtypes_of(nn.Tanh(), task) == {torch.get_default_dtype()}


@pytest.mark.parametrize(
    "system",
    [dure.SingleWorker(batch_size=None), dure.FedAvg(clients=2, batch_size=None)],
    ids=lambda system: system.name,
)
@pytest.mark.parametrize("kept", [torch.float16, torch.float64])
def test_what_is_frozen_first_changes_no_dtype_in_any_system(
    system: Any, kept: torch.dtype
) -> None:
    seen: set[torch.dtype] = set()

    def loss(outputs: Tensor, targets: Tensor) -> Tensor:
        seen.add(outputs.dtype)
        return F.cross_entropy(outputs, targets)

    task = small_task(model=lambda: Scaled(kept, torch.float32), loss=loss)
    stop = dure.Stop(rounds=2) if system.unit == "round" else dure.Stop(steps=2)
    run = dure.train(task, system, stop=stop)
    assert seen == {torch.float32}
    fresh = seeded_model(task, 0)
    assert not torch.equal(run.model.rest.weight, fresh.rest.weight)  # type: ignore[union-attr]
