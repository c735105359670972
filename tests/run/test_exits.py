"""`sys.exit` in the user's own code is a failure, by name, wherever it is called."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, NoReturn

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import dure
from dure.cli.main import main
from dure.errors import WorkerFailedError
from small import examples, network, small_task


def leave(*given: Any) -> NoReturn:
    sys.exit(0)


class Net(nn.Module):
    def __init__(self, at: int) -> None:
        super().__init__()
        self.layers = network()
        self.left = at

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        if self.training:
            self.left -= 1
            if not self.left:
                leave()
        return self.layers(inputs)


class Data(torch.utils.data.Dataset[Any]):
    def __len__(self) -> int:
        return 12

    def __getitem__(self, index: int) -> Any:
        if index == 7:
            leave()
        whole = examples(12)
        return whole.inputs[index], whole.targets[index]


def loss_in_step(step: int) -> Callable[..., torch.Tensor]:
    left = step

    def loss(outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        nonlocal left
        left -= torch.is_grad_enabled()
        return F.cross_entropy(outputs, targets) if left else leave()

    return loss


def lasting(outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    return leave() if torch.is_grad_enabled() else F.cross_entropy(outputs, targets)


STEPS, ROUNDS = dure.Stop(steps=6), dure.Stop(rounds=3)


@pytest.mark.parametrize(
    ("strategy", "world"),
    [(dure.SingleWorker(8), dure.Processes(1)), (dure.DataParallel(8), dure.Processes(2))],
)
def test_in_the_loss_of_a_rank(strategy: Any, world: Any) -> None:
    with pytest.raises(WorkerFailedError, match="rank 0 failed in step 3: SystemExit: 0"):
        dure.train(small_task(loss=loss_in_step(3)), strategy, world, STEPS)


@pytest.mark.parametrize(
    ("strategy", "said"),
    [
        (dure.DataParallel(8), r"(replica|master|worker).* failed in step 1: SystemExit: 0"),
        (dure.Hogwild(batch_size=8), "(worker|hog|thread).* failed in step [12]: SystemExit: 0"),
        (dure.LayersPerCore(8), "failed in step 1: SystemExit: 0"),
    ],
)
def test_in_the_loss_of_a_thread(strategy: Any, said: str) -> None:
    stop = dure.Stop(steps=6, rounds=6)
    with pytest.raises(WorkerFailedError, match=said):
        dure.train(small_task(loss=lasting), strategy, dure.Threads(2), stop)


@pytest.mark.parametrize("engine", ["loop", "loop-processes"])
def test_in_the_loss_of_a_client(engine: Any) -> None:
    world = dure.Simulated(engine=engine, processes=2)
    with pytest.raises(WorkerFailedError, match="client 0 failed in round 1: SystemExit: 0"):
        dure.train(small_task(loss=lasting), dure.FedAvg(clients=3), world, ROUNDS)


def test_in_the_meta_steps_of_a_client() -> None:
    task = small_task(loss=lasting)
    with pytest.raises(WorkerFailedError, match="client 0 failed in round 1: SystemExit: 0"):
        dure.train(task, dure.PerFedAvg(clients=3), stop=ROUNDS)


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"model": lambda: Net(3)}, "rank 0 failed in step 3: SystemExit: 0"),
        ({"train": Data()}, "failed in step 1: SystemExit: 0"),
        ({"metrics": {"own": leave}}, "rank 0 failed in the first evaluation: SystemExit: 0"),
        ({"optimizer": leave}, "task failed in the checks before the first step: SystemExit: 0"),
        ({"lr_schedule": leave}, "task failed in the checks before the first step: SystemExit: 0"),
        ({"model": leave}, "task failed in the checks before the first step: SystemExit: 0"),
    ],
)
def test_in_whatever_else_is_the_user_s(changes: dict[str, Any], said: str) -> None:
    with pytest.raises(WorkerFailedError, match=said):
        dure.train(small_task(**changes), dure.SingleWorker(12), stop=STEPS)


def test_a_comparison_goes_on_with_the_next_system() -> None:
    done = dure.compare(small_task(loss=lasting), [dure.SingleWorker(8)], stop=STEPS)
    assert [str(error) for error in done.failed.values()] == [
        "rank 0 failed in step 1: SystemExit: 0"
    ]
    with pytest.raises(WorkerFailedError, match="the task failed in creating the model"):
        dure.compare(small_task(model=leave), [dure.SingleWorker(8)], stop=STEPS)


@pytest.mark.parametrize(
    ("text", "status"),
    [("import sys\nsys.exit(0)\n", 2), ("import sys\ndef task():\n    sys.exit(0)\n", 1)],
)
def test_in_the_file_of_a_task(
    text: str, status: int, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "mine.py").write_text(text)
    assert main(["train", f"{tmp_path}/mine.py:task", "single-worker", "--steps", "1"]) == status
    (line,) = capsys.readouterr().err.splitlines()
    assert "SystemExit: 0" in line
    assert "mine.py" in line


def test_help_is_none() -> None:
    assert main(["report", "--help"]) == 0
