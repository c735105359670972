"""Ranks of torchrun on devices: the CPU's weights, and one line where machines do not agree."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from small import weights_of

pytestmark = pytest.mark.usefixtures("accelerator")

PROGRAM = """
import os, sys, torch, dure
from on_device import noting_task
from rank_systems import wide_network
from small import weights_of

rank = os.environ["RANK"]
device = {"unlike": "cpu" if rank == "1" else "acc:0"}.get(sys.argv[1], sys.argv[1])
world = dure.Torchrun(device=device)
run = dure.train(noting_task(wide_network), dure.DataParallel(8), world, dure.Stop(steps=4))
if rank == "0":
    torch.save(weights_of(run), sys.argv[2])
"""


def launch(device: str, folder: Path) -> subprocess.CompletedProcess[str]:
    """Run the program on two ranks of torchrun; rank 0 writes its weights."""
    here = Path(__file__).parent
    script = folder / "program.py"
    script.write_text(PROGRAM)
    path = os.pathsep.join([str(here), str(here.parent), os.environ.get("PYTHONPATH", "")])
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    return subprocess.run(
        [*command, "--nproc-per-node", "2", str(script), device, str(folder / "weights")],
        env={**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        check=False,
    )


def test_ranks_of_torchrun_have_the_weights_of_the_cpu(accelerator: str, tmp_path: Path) -> None:
    from on_device import NOTES, noted, noting_task

    import dure
    from rank_systems import wide_network

    alone = dure.train(noting_task(wide_network), dure.SingleWorker(8), stop=dure.Stop(steps=4))
    os.environ[NOTES] = str(tmp_path / "notes")
    try:
        ended = launch(accelerator, tmp_path)
    finally:
        del os.environ[NOTES]
    assert ended.returncode == 0, ended.stderr[-3000:]
    assert noted(tmp_path / "notes")[accelerator] >= 8
    there = torch.load(tmp_path / "weights")
    assert float((there - weights_of(alone)).abs().max()) <= 1e-12


def test_ranks_that_do_not_agree_on_devices_are_refused(accelerator: str, tmp_path: Path) -> None:
    ended = launch("unlike", tmp_path)
    assert ended.returncode != 0
    assert "rank 1 computes on the CPU, but the other ranks have devices" in ended.stderr
