"""Systems of ranks, with few settings of each, and models for runs on the CPU and on a device."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

import dure
from dure.run.registry import parse_strategy
from small import CLASSES, FEATURES

LINEAR = "linear"
"""A model without random draws and batch norm, which some systems require."""

CASES: list[tuple[str, int, str]] = [
    ("data-parallel,batch_size=8", 2, ""),
    ("data-parallel,batch_size=16,all_reduce=native,accumulate=2", 3, ""),
    ("data-parallel,batch_size=8,compression=top-k:0.1", 2, ""),
    ("data-parallel,batch_size=8,compression=power-sgd:1", 2, ""),
    ("data-parallel,batch_size=8,compression=int8", 2, ""),
    ("data-parallel,batch_size=8,recompute=all", 2, ""),
    ("data-parallel,batch_size=8,privacy=dp-sgd:1:1:seed", 2, LINEAR),
    ("zero,batch_size=8,stage=2", 2, ""),
    ("zero,batch_size=8,stage=3", 2, ""),
    ("pipeline,batch_size=8,schedule=gpipe", 2, ""),
    ("pipeline,batch_size=8,schedule=interleaved", 2, LINEAR),
    ("pipeline,batch_size=8,schedule=zero-bubble-v", 2, LINEAR),
    ("pipeline,batch_size=8,schedule=zero-bubble", 3, LINEAR),
    ("tensor-parallel,batch_size=8", 2, LINEAR),
    ("parallel,batch_size=8,microbatches=2,data=2,pipeline=2,zero=1", 4, LINEAR),
    ("parallel,batch_size=8,microbatches=1,data=2,tensor=2", 4, LINEAR),
    ("parallel-sgd,batch_size=4", 2, ""),
    ("local-sgd,batch_size=8,momentum=average,compression=sign", 2, ""),
    ("diloco,batch_size=8", 2, ""),
    ("admm,batch_size=4", 2, LINEAR),
    ("parameter-server,batch_size=8,workers=2,staleness=0", 4, ""),
    ("parameter-server,batch_size=8,workers=1,compression=top-k:0.1", 3, ""),
    ("downpour,batch_size=8,replicas=1,overlap=false", 3, ""),
]


def wide_network() -> nn.Module:
    """6-64-64-3 in float64: its weights have 38 KB, far more than all else that a step moves."""
    return nn.Sequential(
        nn.Linear(FEATURES, 64), nn.Tanh(), nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, CLASSES)
    ).double()


def mixed_network() -> nn.Module:
    """A network with batch norm, dropout and a buffer."""
    return nn.Sequential(
        nn.Linear(FEATURES, 8),
        nn.BatchNorm1d(8),
        nn.ReLU(),
        nn.Dropout(0.3),
        nn.Linear(8, 8),
        nn.Tanh(),
        nn.Linear(8, CLASSES),
    ).double()


def adam(parameters: Any) -> torch.optim.Optimizer:
    """AdamW, whose step is not linear in the gradient."""
    return torch.optim.AdamW(parameters, lr=0.01)


def run_system(task: dure.Task, system: str, ranks: int, device: str, **more: Any) -> dure.Run:
    """Train a few steps or rounds."""
    strategy = parse_strategy(system)
    stop = dure.Stop(steps=5) if strategy.traits.unit == "step" else dure.Stop(rounds=2)
    return dure.train(task, strategy, dure.Processes(ranks, device=device), stop, **more)
