"""The two models that are cut, and examples for them: noise, since only time is asked for.

mlp    784-200 | 200-10: head of 157,000 weights, 51 KB at the cut for 64 examples
cnn    the CNN of FedAvg's paper for 28 x 28, cut behind its first block (a convolution of 5 x 5
       with 32 channels, and pooling): head of 832 weights, tail of 1.7 million, 1.6 MB at the
       cut
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

import torch
from torch import nn

import dure

BATCH = 64
CUT = "tail"
"""Where both are cut, for dure: before this module."""

STEPS = {"mlp": 400, "cnn": 20}
"""Of a round: as many batches are there."""

Half = Callable[[], nn.Module]

HALVES: dict[str, tuple[Half, Half]] = {
    "mlp": (
        lambda: nn.Sequential(nn.Flatten(), nn.Linear(784, 200), nn.ReLU()),
        lambda: nn.Sequential(nn.Linear(200, 10)),
    ),
    "cnn": (
        lambda: nn.Sequential(nn.Conv2d(1, 32, 5, padding=2), nn.ReLU(), nn.MaxPool2d(2)),
        lambda: nn.Sequential(
            *[nn.Conv2d(32, 64, 5, padding=2), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten()],
            *[nn.Linear(3136, 512), nn.ReLU(), nn.Linear(512, 10)],
        ),
    ),
}


class Whole(nn.Module):
    """Head and tail."""

    def __init__(self, name: str) -> None:
        super().__init__()
        head, tail = HALVES[name]
        self.head = head()
        self.tail = tail()

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = self.tail(self.head(inputs))
        return found


def optimizer(parameters: Sequence[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.01)


def examples(name: str) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    count = BATCH * STEPS[name]
    inputs = torch.randn(count, 1, 28, 28, generator=generator)
    return inputs, torch.randint(0, 10, (count,), generator=generator)


def _task(name: str) -> dure.Task:
    return dure.Task(
        model=partial(Whole, name),
        loss=nn.functional.cross_entropy,
        train=examples(name),
        optimizer=optimizer,
    )


def mlp() -> dure.Task:
    return _task("mlp")


def cnn() -> dure.Task:
    return _task("cnn")
