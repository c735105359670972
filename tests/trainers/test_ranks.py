"""A trainer on two ranks is one client, whose steps are those of a trainer alone."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch
from hugging_face_cases import causal, served, trainer

import dure
from small import largest_difference


@pytest.mark.parametrize("division", ["ddp", "fsdp2"])
def test_two_ranks_are_one_client(division: str, tmp_path: Path) -> None:
    # Its term is a tensor of each parameter's, which has to be divided like the parameter.
    strategy = dure.FedProx(clients=1, batch_size=4, local_epochs=2, mu=0.5)

    def make(client: int = 0) -> object:
        model = lambda: causal(torch.float64)  # noqa: E731
        return trainer(tmp_path, model, n=24, optim="adamw_torch")

    task = dure.Task.from_trainer(make(), train=None, metrics={})

    def join(url: str) -> int:
        program = Path(__file__).with_name("ranked_client.py")
        launch = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
        command = [*launch, "--nproc-per-node", "2", str(program), url, str(tmp_path), division]
        return subprocess.run(command, timeout=120, check=True).returncode

    run, ended = served(task, strategy, join, tmp_path / "run")
    assert ended == [0]
    alone = dure.simulate(make, clients=1, strategy=strategy, stop=dure.Stop(rounds=3))
    assert [step.samples for step in run.history.steps] == [48, 96, 144]
    assert largest_difference(run, alone) <= 1e-12
