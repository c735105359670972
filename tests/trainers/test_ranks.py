"""A trainer on two ranks is one client, whose steps are those of a trainer alone."""

from __future__ import annotations

import subprocess
import sys
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from hugging_face_cases import causal, served, trainer

import dure
from small import largest_difference


def hugging_face(folder: Path) -> Any:
    model = lambda: causal(torch.float64)  # noqa: E731
    return trainer(folder, model, n=22, optim="adamw_torch")


def join(folder: Path, division: str, url: str) -> int:
    """Take part with two ranks."""
    program = Path(__file__).with_name("ranked_client.py")
    launch = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    command = [*launch, "--nproc-per-node", "2", str(program), url, str(folder), division]
    return subprocess.run(command, timeout=120, check=True).returncode


@pytest.mark.parametrize("division", ["ddp", "fsdp2", "lightning"])
def test_two_ranks_are_one_client(division: str, tmp_path: Path) -> None:
    # The term is a tensor of each parameter's, which has to be divided like the parameter. The
    # last step has a single example for each rank.
    strategy = dure.FedProx(clients=1, batch_size=4, local_epochs=2, mu=0.5)
    if division == "lightning":
        test_lightning = pytest.importorskip("test_lightning")
        task = dure.Task.from_lightning(*test_lightning.in_float64(4), train=None, metrics={})
        make = lambda client: (test_lightning.trainer(), *test_lightning.in_float64(4))  # noqa: E731
    else:
        task = dure.Task.from_trainer(hugging_face(tmp_path), train=None, metrics={})
        make = lambda client: hugging_face(tmp_path)  # noqa: E731

    run, ended = served(task, strategy, partial(join, tmp_path, division), tmp_path / "run")
    assert ended == [0]
    alone = dure.simulate(make, clients=1, strategy=strategy, stop=dure.Stop(rounds=3))
    assert [step.samples for step in run.history.steps] == [44, 88, 132]
    assert largest_difference(run, alone) <= 1e-12


@pytest.mark.parametrize("division", ["keep", "deepspeed"])
def test_ranks_that_go_on_over_rounds_are_one_client(
    division: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In float32, which the optimizer of DeepSpeed has. Its ranks divide one order of the data."""
    if division == "deepspeed":
        pytest.importorskip("deepspeed")
        monkeypatch.setenv("DS_ACCELERATOR", "cpu")
    strategy = dure.FedAvg(clients=1, batch_size=4)

    def make(client: int = 0) -> Any:
        return trainer(tmp_path, n=24, optim="adamw_torch", num_train_epochs=3)

    task = dure.Task.from_trainer(make(), train=None, metrics={})
    run, ended = served(task, strategy, partial(join, tmp_path, division), tmp_path / "run")
    assert ended == [0]
    more: dict[str, Any] = {"between_rounds": "keep", "stop": dure.Stop(rounds=3)}
    alone = dure.simulate(make, clients=1, strategy=strategy, **more)
    assert [step.samples for step in run.history.steps] == [24, 48, 72]
    assert largest_difference(run, alone) <= 1e-5
