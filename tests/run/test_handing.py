"""Runs go on from checkpoints that lie in files: those of rank 0, or what it sends."""

from __future__ import annotations

import shutil
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import dure
from dure.contracts.strategy import Strategy
from dure.record.disk_tensors import DiskTensor
from dure.record.run import RunFolder
from dure.run import checkpoint_transfer
from small import same_bits

WIDTH = 600
"""So that a layer's weights are more than a megabyte, and lie on a disk."""


def network(blind: bool) -> nn.Module:
    """blind: this rank sees no file of rank 0's."""
    if blind:
        checkpoint_transfer._where_they_lie = lambda told: None
    return nn.Sequential(
        nn.Linear(5, WIDTH), nn.ReLU(), nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 3)
    )


def task(blind: bool = False) -> dure.Task:
    generator = torch.Generator().manual_seed(3)
    inputs = torch.randn(24, 5, generator=generator)
    train = (inputs, torch.arange(24) % 3)
    adam = partial(torch.optim.AdamW, lr=1e-2)
    return dure.Task(partial(network, blind), F.cross_entropy, train, optimizer=adam)


SYSTEMS: list[tuple[Strategy, list[bool]]] = [
    (dure.ZeRO(stage=3, batch_size=8), [False, True]),
    (dure.TensorParallel(batch_size=8), [False]),
    (dure.Pipeline(batch_size=8), [True]),
    (dure.DataParallel(batch_size=8), [True]),
]


@pytest.mark.parametrize(("strategy", "sights"), SYSTEMS, ids=lambda one: getattr(one, "name", ""))
def test_they_end_with_the_same_bits(
    strategy: Strategy, sights: list[bool], tmp_path: Path
) -> None:
    world = dure.Processes(2, deadline=20)

    def train(steps: int, **more: Any) -> dure.Run:
        return dure.train(task(), strategy, world, dure.Stop(steps=steps), seed=4, **more)

    whole = train(4)
    train(2, out=tmp_path / "run")
    newest = RunFolder(tmp_path / "run").read_checkpoint()
    assert newest is not None
    large = [leaf for leaf in newest.tensors.values() if leaf.nbytes > 1 << 20]
    assert large
    assert all(isinstance(leaf, DiskTensor) for leaf in newest.weights.values())
    for blind in sights:
        folder = tmp_path / str(blind)
        shutil.copytree(tmp_path / "run", folder)
        on = dure.resume(folder, task=task(blind), stop=dure.Stop(steps=4))
        assert same_bits(on, whole)
        assert same_bits(dure.load_run(folder, partial(network, False)), whole)
