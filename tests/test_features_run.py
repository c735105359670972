"""Every system, in each world in which it lives, does what the right half of the table says.

One run whose rates a schedule sets to 0 leaves every weight as it was, finds its validation set no
better, and is ended early. Another is interrupted, goes on, and has the bits of a third that was
not; a frozen layer has those of the beginning. Systems that do not repeat themselves are resumed,
and their bits are not compared.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import dure
from dure.contracts.fresh_model import seeded_model
from dure.contracts.strategy import Strategy
from dure.contracts.world import Kind
from features import strategies
from small import network, small_task, weights_of

ALONE: dict[str, dict[str, int]] = {"parameter-server": {"workers": 1}, "downpour": {"replicas": 1}}
"""Settings with which systems that start many processes start few."""

CASES = [
    pytest.param(replace(strategy, **ALONE.get(name, {})), kind, id=f"{name}-{kind}")
    for name, strategy in strategies().items()
    for kind in strategy.traits.kinds
]


def world_of(strategy: Strategy, kind: Kind) -> dure.World:
    """As few workers as there can be."""
    if kind == "ranks":
        return dure.Processes(strategy.run_traits.ranks or 1)
    return dure.Threads(1) if kind == "threads" else dure.Simulated()


def half_frozen() -> nn.Module:
    """The small network, whose middle layer is not trained."""
    model = network()
    model[2].requires_grad_(False)
    return model


def still(step: int) -> float:
    """A schedule under which nothing moves."""
    return 0.0


def limit(strategy: Strategy, count: int, **more: Any) -> dure.Stop:
    return dure.Stop(**{f"{strategy.traits.unit}s": count}, **more)


@pytest.mark.parametrize(("strategy", "kind"), CASES)
def test_schedule_validation_and_early_stopping(strategy: Strategy, kind: Kind) -> None:
    task = small_task(lr_schedule=still, validation=0.2)
    stop = limit(strategy, 4, patience=1)
    run = dure.train(task, strategy, world_of(strategy, kind), stop=stop, evaluate_every=1)
    assert torch.equal(weights_of(run), first_weights(task))
    assert "validation_loss" in run.summary
    assert run.summary["ended"] == "patience"


@pytest.mark.parametrize(("strategy", "kind"), CASES)
def test_frozen_layers_and_resume(strategy: Strategy, kind: Kind, tmp_path: Path) -> None:
    task = small_task(model=half_frozen)
    train = partial(dure.train, task, strategy, world_of(strategy, kind))
    straight = train(stop=limit(strategy, 2))
    train(stop=limit(strategy, 1), out=tmp_path / "run")
    resumed = dure.resume(tmp_path / "run", task=task, stop=limit(strategy, 2))
    before = seeded_model(task, 0).state_dict()
    for name, weights in resumed.model.state_dict().items():
        assert torch.equal(weights, before[name]) == name.startswith("2."), name
    if strategy.run_traits.deterministic:
        assert torch.equal(weights_of(resumed), weights_of(straight))


def first_weights(task: dure.Task) -> torch.Tensor:
    state = seeded_model(task, 0).state_dict()
    return torch.cat([value.double().reshape(-1) for value in state.values()])
