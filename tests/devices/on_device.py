"""Tasks for runs on the stand-in device, whose loss notes where it was computed."""

from __future__ import annotations

import os
from collections import Counter
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import dure
import stand_in_backend  # noqa: F401 - ranks that have this task have the device and its backend
from small import CLASSES, FEATURES, examples, small_task

NOTES = "NOTED_DEVICES"
"""Variable with the path of the file in which losses note their devices."""


def noting_loss(outputs: Tensor, targets: Tensor) -> Tensor:
    """Cross-entropy, which notes the device of the outputs."""
    path = os.environ.get(NOTES)
    if path:
        with Path(path).open("a") as file:
            file.write(outputs.device.type + "\n")
    return F.cross_entropy(outputs, targets)


def noted(path: Path) -> Counter[str]:
    """How often the loss was computed on each type of device."""
    return Counter(path.read_text().split()) if path.exists() else Counter()


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


def noting_task(model: Any = mixed_network, **changes: Any) -> dure.Task:
    """The small task with this model and the noting loss."""
    return small_task(
        **{"model": model, "loss": noting_loss, "optimizer": adam, "train": examples(32), **changes}
    )


def ready(program: Any, *args: Any) -> Any:
    """Return program(*args): a rank that runs this function has the device and its backend."""
    return program(*args)
