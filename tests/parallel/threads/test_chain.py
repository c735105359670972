"""What is a chain of layers, and how it is divided."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.nn import functional as F

import dure
from dure.contracts.fresh_model import seeded_model
from dure.data.examples import Examples
from dure.parallel.threads.chain import (
    check_chain,
    counted_costs,
    divided_layers,
    layers_of,
    measured_costs,
)
from small import CLASSES, FEATURES, examples, network, small_task

COSTS = st.lists(st.floats(0, 1e6), min_size=1, max_size=8)


@given(COSTS, st.integers(1, 8))
def test_no_division_has_a_cheaper_dearest_stage(costs: list[float], stages: int) -> None:
    stages = min(stages, len(costs))
    ranges = divided_layers(costs, stages)
    assert list(itertools.chain.from_iterable(ranges)) == list(range(len(costs)))
    assert len(ranges) == stages
    assert all(len(part) for part in ranges)

    def dearest(cuts: tuple[int, ...]) -> float:
        edges = [0, *cuts, len(costs)]
        return max(sum(costs[a:b]) for a, b in itertools.pairwise(edges))

    best = min(dearest(cuts) for cuts in itertools.combinations(range(1, len(costs)), stages - 1))
    of_stages = [sum(costs[part.start : part.stop]) for part in ranges]
    assert max(of_stages) == pytest.approx(best)


def test_sequentials_within_each_other_are_one_chain() -> None:
    model = nn.Sequential(nn.Sequential(nn.Tanh(), nn.Sequential(nn.ReLU())), nn.Linear(1, 1))
    assert [type(layer).__name__ for layer in layers_of(model)] == ["Tanh", "ReLU", "Linear"]


@pytest.mark.parametrize(
    "task", [dure.load_task("digits", model=model) for model in ("mlp", "cnn")]
)
def test_models_that_call_their_children_in_order_are_chains(task: dure.Task) -> None:
    check_chain(task, seeded_model(task, 0), 2)


class Residual(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(FEATURES, FEATURES).double()
        self.second = nn.Linear(FEATURES, CLASSES).double()

    def forward(self, inputs: Tensor) -> Tensor:
        scores: Tensor = self.second(inputs + self.first(inputs))
        return scores


class HiddenDropout(Residual):
    """Calls its children in order, but for what it does between them in training."""

    def forward(self, inputs: Tensor) -> Tensor:
        scores: Tensor = self.second(F.dropout(self.first(inputs), 0.5, self.training))
        return scores


def shared() -> nn.Module:
    layer = nn.Linear(FEATURES, FEATURES).double()
    return nn.Sequential(layer, nn.Tanh(), layer, nn.Linear(FEATURES, CLASSES).double())


@pytest.mark.parametrize(
    ("model", "complaint"),
    [
        (Residual, "the model is not a chain of its layers"),
        (HiddenDropout, "the model is not a chain of its layers"),
        (lambda: nn.Linear(FEATURES, CLASSES).double(), "the model is not a chain of its layers"),
        (
            lambda: nn.Sequential(nn.Linear(FEATURES, CLASSES).double()),
            "2 threads cannot divide 1 layers",
        ),
        (shared, "layers 0 and 2 share a parameter"),
    ],
)
def test_models_that_cannot_be_divided_are_refused(
    model: Callable[[], nn.Module], complaint: str
) -> None:
    with pytest.raises(ValueError, match=complaint):
        check_chain(small_task(model=model), model(), 2)


class Between(nn.Sequential):
    """Does something between its first two layers, of which outputs tell nothing."""

    def __init__(self, between: Callable[[Tensor], Tensor], zero: bool = False) -> None:
        super().__init__(nn.Linear(FEATURES, 8), nn.Tanh(), nn.Linear(8, CLASSES))
        self.between = between
        if zero:
            nn.init.zeros_(self[2].weight)
        self.double()

    def forward(self, inputs: Tensor) -> Tensor:
        scores: Tensor = self[2](self[1](self.between(self[0](inputs))))
        return scores


def without_grad(values: Tensor) -> Tensor:
    with torch.no_grad():
        return values.clone()


def doubled(values: Tensor) -> Tensor:
    values.register_hook(lambda gradient: 2 * gradient)
    return values


class Reversed(torch.autograd.Function):
    """The gradient reversal of domain adaptation."""

    @staticmethod
    def forward(ctx: Any, values: Tensor) -> Tensor:
        return values.view_as(values)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return -gradient


def listened() -> nn.Module:
    inner = nn.Sequential(nn.Linear(FEATURES, 8), nn.Tanh())
    inner.register_full_backward_pre_hook(lambda module, gradient: (gradient[0] * 3,))
    return nn.Sequential(inner, nn.Linear(8, CLASSES)).double()


@pytest.mark.parametrize(
    "model",
    [
        lambda: Between(Tensor.detach),
        lambda: Between(without_grad),
        lambda: Between(doubled),
        lambda: Between(Reversed.apply),
        lambda: Between(Tensor.detach, zero=True),
        listened,
    ],
    ids=["detach", "no_grad", "hook", "reversal", "a last layer of zeros", "a hook on layers"],
)
def test_what_a_forward_pass_does_to_gradients_between_layers_is_no_chain(
    model: Callable[[], nn.Module],
) -> None:
    task = small_task(model=model)
    with pytest.raises(ValueError, match="have other gradients"):
        check_chain(task, seeded_model(task, 0), 2)


def test_costs_are_counted_for_an_example_and_measuring_leaves_no_gradient() -> None:
    model = network()
    data = Examples(examples().inputs, examples().targets)
    costs = counted_costs(layers_of(model), data)
    assert costs == [2 * 6 * 12 + 120, 120, 2 * 12 * 8 + 80, 80, 2 * 8 * 3 + 30]
    writing = nn.Sequential(nn.Linear(FEATURES, 5).double(), nn.ReLU(inplace=True))
    assert all(cost > 0 for cost in measured_costs(layers_of(writing), data, 7))
    assert all(parameter.grad is None for parameter in writing.parameters())
