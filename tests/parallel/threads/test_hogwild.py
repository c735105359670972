"""What holds of workers without locks: one is SGD, several learn, nobody's error is lost."""

from __future__ import annotations

import json
import os
import signal
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import dure
from dure.collectives.group import Group
from dure.errors import LossNotFiniteError, WorkerFailedError
from dure.parallel.threads.hogwild import share_weights
from small import CLASSES, FEATURES, same_bits, small_task

WORLDS = [dure.Threads(1), dure.Processes(1)]
SEVERAL = [dure.Threads(3), dure.Processes(2)]
MOMENTUM = partial(torch.optim.SGD, lr=0.1, momentum=0.9)


def train(task: dure.Task, world: Any, epochs: float = 2, **options: Any) -> dure.Run:
    return dure.train(task, dure.Hogwild(8), world, dure.Stop(epochs=epochs), seed=3, **options)


class Dropping(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(FEATURES).double()
        self.linear = nn.Linear(FEATURES, CLASSES).double()

    def forward(self, inputs: Tensor) -> Tensor:
        scores: Tensor = self.linear(F.dropout(self.norm(inputs), 0.3, self.training))
        return scores


@pytest.mark.parametrize("world", WORLDS, ids=lambda world: world.name)
@pytest.mark.parametrize("period", [None, 1, 4, 100])
def test_one_worker_is_sgd_to_the_last_bit(world: Any, period: int | None) -> None:
    task = small_task(n=40, model=Dropping, optimizer=MOMENTUM)
    wild = dure.train(task, dure.Hogwild(10, period), world, dure.Stop(rounds=3), seed=3)
    steps = 3 * (period or 4)
    assert same_bits(
        wild, dure.train(task, dure.SingleWorker(10), stop=dure.Stop(steps=steps), seed=3)
    )


@pytest.mark.parametrize("world", SEVERAL, ids=lambda world: world.name)
def test_several_workers_learn_from_every_example_of_an_epoch(world: Any) -> None:
    run = train(small_task(), world, epochs=20)
    assert run.summary["samples"] == 20 * 41
    assert (
        run.history.evaluations[-1].metrics["test_loss"]
        < 0.9 * run.history.evaluations[0].metrics["test_loss"]
    )
    assert run.summary["workers"] == world.workers
    assert run.summary["bytes_sent"] == 0


@pytest.mark.parametrize("world", SEVERAL, ids=lambda world: world.name)
def test_weights_of_a_million_numbers_survive_writers_at_the_same_time(world: Any) -> None:
    """Nothing is torn: all that is written are multiples of 1/1024, and so are their sums."""

    class Wide(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weights = nn.Parameter(torch.zeros(1_000_000))

        def forward(self, inputs: Tensor) -> Tensor:
            return self.weights.sum() * torch.ones(len(inputs))

    task = small_task(
        model=Wide,
        loss=lambda outputs, targets: outputs.mean(),
        test=None,
        optimizer=partial(torch.optim.SGD, lr=1 / 1024),
    )
    weights = train(task, world).model.state_dict()["weights"]
    assert torch.equal(weights, (weights * 1024).round() / 1024)
    assert -12 / 1024 <= float(weights.min()) <= float(weights.max()) < 0


@pytest.mark.parametrize("world", SEVERAL, ids=lambda world: world.name)
def test_no_workers_error_is_lost_and_the_others_stop(world: Any) -> None:
    class Broken(nn.Linear):
        def forward(self, inputs: Tensor) -> Tensor:
            if self.training and bool((inputs[:, 0] == bad).any()):
                raise ZeroDivisionError("my own mistake")
            return super().forward(inputs)

    task = small_task(model=lambda: Broken(FEATURES, CLASSES).double())
    order = dure.data.batches.Batches(41, 8, 3)
    bad = float(task.train.inputs[order.at(1)[0], 0])
    who = "worker 1" if world.name == "threads" else "rank 1"
    with pytest.raises(
        WorkerFailedError, match=f"{who} failed in step 2: ZeroDivisionError: my own mistake"
    ) as caught:
        train(task, world)
    assert "raise ZeroDivisionError" in caught.value.traceback


def test_a_loss_that_is_not_finite_names_its_worker_and_step() -> None:
    def loss(outputs: Tensor, targets: Tensor) -> Tensor:
        return F.cross_entropy(outputs, targets) / (0 if outputs.requires_grad else 1)

    with pytest.raises(LossNotFiniteError, match=r"the loss is inf at step \d on worker \d"):
        train(small_task(loss=loss), dure.Threads(2))


@pytest.mark.parametrize(
    "world", [*WORLDS, *SEVERAL], ids=lambda world: f"{world.workers} {world.name}"
)
def test_a_run_goes_on_with_the_optimizers_of_all_its_workers(tmp_path: Path, world: Any) -> None:
    task = small_task(optimizer=MOMENTUM)
    train(task, world, epochs=2, out=tmp_path)
    assert json.loads((tmp_path / "config.json").read_text())["deterministic"] is False
    resumed = dure.resume(tmp_path, task=task, stop=dure.Stop(epochs=4))
    assert resumed.summary["samples"] == 4 * 41
    if world.workers == 1:
        assert same_bits(resumed, train(task, world, epochs=4))


def test_ctrl_c_ends_a_round_after_the_steps_at_hand(tmp_path: Path) -> None:
    steps = 0
    pressed = False

    def loss(outputs: Tensor, targets: Tensor) -> Tensor:
        nonlocal steps, pressed
        steps += outputs.requires_grad
        if steps >= 20 and not pressed:  # two threads count: one of them may never see 20 itself
            pressed = True
            os.kill(os.getpid(), signal.SIGINT)
        return F.cross_entropy(outputs, targets)

    strategy = dure.Hogwild(8, period=10**6)
    run = dure.train(
        small_task(loss=loss), strategy, dure.Threads(2), dure.Stop(rounds=5), out=tmp_path
    )
    assert run.summary["ended"] == "interrupt"
    assert run.summary["steps"] == 1
    assert 20 <= steps < 10_000


def test_several_devices_are_refused_before_any_work(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    with pytest.raises(ValueError, match="compute on one device: give only one"):
        train(small_task(), dure.Threads(2, devices=("cuda:0", "cuda:1")), out=tmp_path / "run")
    assert not (tmp_path / "run").exists()


def test_a_period_without_steps_is_refused() -> None:
    with pytest.raises(ValueError, match="period is 0"):
        dure.train(small_task(), dure.Hogwild(8, 0), dure.Threads(2))


def test_processes_of_two_hosts_cannot_share_weights(monkeypatch: pytest.MonkeyPatch) -> None:
    group = Group()
    monkeypatch.setattr(group, "size", 2)
    monkeypatch.setattr(group, "hosts", lambda: ((0,), (1,)))
    with pytest.raises(ValueError, match="all ranks have to be on one machine"):
        share_weights(nn.Linear(1, 1), group)
