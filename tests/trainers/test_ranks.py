"""A trainer on two ranks is one client, whose steps are those of a trainer alone."""

from __future__ import annotations

import subprocess
import sys
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

    def join(url: str) -> int:
        program = Path(__file__).with_name("ranked_client.py")
        launch = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
        command = [*launch, "--nproc-per-node", "2", str(program), url, str(tmp_path), division]
        return subprocess.run(command, timeout=120, check=True).returncode

    run, ended = served(task, strategy, join, tmp_path / "run")
    assert ended == [0]
    alone = dure.simulate(make, clients=1, strategy=strategy, stop=dure.Stop(rounds=3))
    assert [step.samples for step in run.history.steps] == [44, 88, 132]
    assert largest_difference(run, alone) <= 1e-12
