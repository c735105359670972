"""Buffers that a forward pass makes, or puts anew, are trained beside as those that it writes
into."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import dure
from dure.errors import DureError
from small import CLASSES, FEATURES, same_bits, small_task, weights_of


class Scaled(nn.Module):
    """late: its scale is made in the first forward pass. anew: its mean is put anew by each; else
    written in place."""

    def __init__(self, late: bool, anew: bool, persistent: bool = False) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(FEATURES, 8).double(), nn.Linear(8, CLASSES).double()
        self.register_buffer("scale", None if late else self.angles(), persistent)
        self.register_buffer("mean", torch.zeros(8, dtype=torch.float64))
        self.anew = anew

    def angles(self) -> Tensor:
        return torch.linspace(0.5, 1.5, 8, dtype=torch.float64)

    def forward(self, inputs: Tensor) -> Tensor:
        if self.scale is None:
            self.scale = self.angles()
        hidden = torch.tanh(self.first(inputs)) * self.scale
        if self.training:
            mean = 0.9 * self.mean + 0.1 * hidden.detach().mean(0)
            if self.anew:
                self.mean = mean
            else:
                self.mean.copy_(mean)
        scores: Tensor = self.second(hidden - self.mean)
        return scores


def run(strategy: Any, world: Any, late: bool, anew: bool) -> dure.Run:
    stop = dure.Stop(steps=4) if strategy.traits.unit == "step" else dure.Stop(rounds=3)
    return dure.train(small_task(model=partial(Scaled, late, anew)), strategy, world, stop)


PROCESSES = dure.Processes(2, deadline=120)
RUNS: list[tuple[Any, Any]] = [
    (dure.DataParallel(8), PROCESSES),
    (dure.DataParallel(8), dure.Threads(2)),
    (dure.ZeRO(1, 8), PROCESSES),
    (dure.ZeRO(3, 8), PROCESSES),
    (dure.ParallelSGD(8), PROCESSES),
    (dure.LocalSGD(8, 2), PROCESSES),
    (dure.DiLoCo(8, 2), PROCESSES),
    (dure.ADMM(8), PROCESSES),
    (dure.FedAvg(clients=6, fraction=0.5, batch_size=4), dure.Simulated()),
    (dure.Ditto(clients=6, fraction=0.5, batch_size=4), dure.Simulated()),
    (dure.PerFedAvg(clients=6, fraction=0.5, batch_size=4), dure.Simulated()),
]
NAMES = [f"{type(strategy).__name__} {type(world).__name__}" for strategy, world in RUNS]


@pytest.mark.parametrize(("strategy", "world"), RUNS, ids=NAMES)
def test_what_a_forward_pass_makes_or_puts_anew(strategy: Any, world: Any) -> None:
    usual, unusual = run(strategy, world, False, False), run(strategy, world, True, True)
    assert weights_of(usual).isfinite().all()
    assert same_bits(usual, unusual)
    assert float(usual.model.get_buffer("mean").abs().sum()) > 0


@pytest.mark.parametrize(
    ("strategy", "world"),
    [RUNS[0], RUNS[5], RUNS[8], (dure.SingleWorker(8), dure.Processes(1))],
    ids=["data parallel", "local SGD", "FedAvg", "single worker"],
)
def test_a_run_whose_state_dict_has_grown_is_loaded_and_gone_on_with(
    strategy: Any, world: Any, tmp_path: Path
) -> None:
    task = small_task(model=partial(Scaled, True, True, persistent=True))
    unit = "steps" if strategy.traits.unit == "step" else "rounds"
    whole = dure.train(task, strategy, world, dure.Stop(**{unit: 4}))
    dure.train(task, strategy, world, dure.Stop(**{unit: 2}), out=tmp_path / "run")
    assert same_bits(dure.resume(tmp_path / "run", task=task, stop=dure.Stop(**{unit: 4})), whole)
    assert same_bits(dure.load_run(tmp_path / "run", task.model), whole)


class Gone(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.out = nn.Linear(FEATURES, CLASSES).double()
        self.register_buffer("mean", torch.zeros(FEATURES, dtype=torch.float64))

    def forward(self, inputs: Tensor) -> Tensor:
        self.mean = None
        scores: Tensor = self.out(inputs)
        return scores


@pytest.mark.parametrize(("strategy", "world"), [RUNS[0], RUNS[5], RUNS[8]])
def test_a_buffer_that_is_gone_is_named(strategy: Any, world: Any) -> None:
    with pytest.raises(DureError, match="the buffer mean existed at the start and was removed"):
        dure.train(small_task(model=Gone), strategy, world, dure.Stop(epochs=1))
