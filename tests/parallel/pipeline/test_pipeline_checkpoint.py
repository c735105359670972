"""Pipelines go on from a checkpoint: with the same bits, on other ranks, by other schedules."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from beside import CLOSE
from safetensors.torch import load_file
from torch import Tensor, nn

import dure
from dure.parallel.mesh.mesh import Mesh
from dure.parallel.mesh.pipeline import Pipeline
from dure.parallel.mesh.strategy import Parallel
from small import CLASSES, FEATURES, largest_difference, same_bits, small_task


class Odd(nn.Module):
    """Dropout, batch norm, a shared weight, a buffer that is not kept, a layer that is not used."""

    def __init__(self, chance: float = 0.2) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(FEATURES)
        self.first = nn.Linear(FEATURES, FEATURES)
        self.middle = nn.Linear(FEATURES, 8)
        self.drop = nn.Dropout(chance)
        self.never = nn.Linear(2, 2)
        self.last = nn.Linear(8, FEATURES)
        self.out = nn.Linear(FEATURES, CLASSES)
        self.again = nn.Linear(FEATURES, FEATURES)
        self.again.weight = self.first.weight
        self.register_buffer("count", torch.zeros((), dtype=torch.float64), persistent=False)
        self.double()

    def forward(self, inputs: Tensor) -> Tensor:
        if self.training:
            self.count += 1
        hidden = torch.tanh(self.first(self.norm(inputs) * (1 + 0.01 * self.count)))
        hidden = self.last(self.drop(torch.tanh(self.middle(hidden))))
        scores: Tensor = self.out(torch.tanh(self.again(hidden)))
        return scores


def groups(parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
    """Short parameters have settings of their own; a rank that holds none has an empty group."""
    own = list(parameters)
    long = [p for p in own if p.dim() > 1]
    short = [p for p in own if p.dim() <= 1]
    parted = [{"params": short, "lr": 0.02, "weight_decay": 0.0}, {"params": long}]
    return torch.optim.AdamW(parted, lr=0.01, weight_decay=0.1)


def without_biases() -> nn.Module:
    """The last stage has nothing short."""
    layers = [
        nn.Linear(FEATURES, 8),
        nn.Tanh(),
        nn.Linear(8, 8, bias=False),
        nn.Tanh(),
        nn.Linear(8, CLASSES, False),
    ]
    return nn.Sequential(*layers).double()


MOMENTUM = partial(torch.optim.SGD, lr=0.1, momentum=0.9)


def moved(folder: Path, task: dure.Task, strategy: Any, ranks: int, steps: int) -> dure.Run:
    """The run in `folder` goes on elsewhere, up to so many steps."""
    world = dure.Processes(ranks)
    return dure.resume(
        folder, task=task, strategy=strategy, world=world, stop=dure.Stop(steps=steps)
    )


def test_a_resumed_run_ends_with_the_same_bits(tmp_path: Path) -> None:
    strategy = Parallel(Mesh(2, 2), 12, 3, "zero-bubble", recompute=True)
    task = small_task(n=48, model=Odd, optimizer=groups)
    world = dure.Processes(4)
    whole = dure.train(task, strategy, world, dure.Stop(steps=8))
    dure.train(task, strategy, world, dure.Stop(steps=3), out=tmp_path / "run")
    resumed = dure.resume(tmp_path / "run", task=task, stop=dure.Stop(steps=8))
    assert same_bits(whole, resumed)
    assert torch.equal(whole.model.count, resumed.model.count)  # type: ignore[arg-type]
    assert float(whole.model.count) == 8 * strategy.microbatches  # type: ignore[arg-type]
    assert resumed.summary["test_loss"] == whole.summary["test_loss"]
    assert resumed.summary["bytes_sent"] == whole.summary["bytes_sent"]


def test_ctrl_c_ends_all_stages_after_their_step_and_the_run_goes_on(tmp_path: Path) -> None:
    def interrupt(event: Mapping[str, Any]) -> None:
        if event["step"] == 2:
            os.kill(os.getpid(), signal.SIGINT)

    task = small_task(n=48, model=Odd, optimizer=groups)
    world = dure.Processes(2)
    strategy = Pipeline(12, 3)
    run = dure.train(
        task,
        strategy,
        world,
        dure.Stop(steps=10**6),
        out=tmp_path,
        evaluate_every=1,
        on_progress=interrupt,
    )
    done = run.summary["steps"]
    assert run.summary["ended"] == "interrupt"
    assert done >= 2
    more = dure.Stop(steps=done + 2)
    assert same_bits(
        dure.resume(tmp_path, task=task, stop=more), dure.train(task, strategy, world, more)
    )


@pytest.mark.parametrize("optimizer", [groups, MOMENTUM])
def test_a_run_goes_on_with_other_ranks_and_schedules(optimizer: Any, tmp_path: Path) -> None:
    task = small_task(n=48, model=partial(Odd, 0.0), optimizer=optimizer)
    out = tmp_path / "run"
    one = dure.train(task, Pipeline(12, 2, "gpipe"), dure.Processes(1), dure.Stop(steps=8))
    dure.train(task, Pipeline(12, 2), dure.Processes(2), dure.Stop(steps=3), out=out)
    moved(out, task, Pipeline(12, 2, "zero-bubble"), 3, 5)
    interleaved = Pipeline(12, 2, "interleaved", cut=("middle", "last", "again"))
    run = moved(out, task, interleaved, 2, 8)
    assert largest_difference(run, one) < CLOSE
    assert abs(run.summary["test_loss"] - one.summary["test_loss"]) < CLOSE


@pytest.mark.parametrize("zero", [0, 1])
def test_groups_of_the_optimizer_go_to_other_meshes(zero: Any, tmp_path: Path) -> None:
    task = small_task(n=48, model=without_biases, optimizer=groups)
    out = tmp_path / "run"
    one = dure.train(task, Parallel(Mesh(), 12, 2), dure.Processes(1), dure.Stop(steps=8))
    dure.train(
        task, Parallel(Mesh(2), 12, 2, zero=zero), dure.Processes(2), dure.Stop(steps=3), out=out
    )
    moved(out, task, Parallel(Mesh(pipeline=2), 12, 2), 2, 5)
    run = moved(out, task, Parallel(Mesh(2), 12, 2, zero=zero), 2, 8)
    assert largest_difference(run, one) < CLOSE


def test_the_weights_are_those_of_the_plain_model(tmp_path: Path) -> None:
    task = small_task(n=48, model=Odd)
    run = dure.train(
        task, Pipeline(8, 2), dure.Processes(3), dure.Stop(steps=2), out=tmp_path / "run"
    )
    model = Odd()
    model.load_state_dict(load_file(tmp_path / "run" / "model.safetensors"))
    for name, value in run.model.state_dict().items():
        assert torch.equal(model.state_dict()[name], value)
    assert model.again.weight is model.first.weight
