"""Layers that wait like a processor with an accelerator: they take time, and no core."""

from __future__ import annotations

import time
from typing import Any

import torch
from torch import Tensor, nn

WIDTH = 8


@torch.library.custom_op("dure_benchmark::wait", mutates_args=())
def wait(x: Tensor, forward: float, backward: float) -> Tensor:
    """Gives what it gets, `forward` seconds later, and its gradient `backward` seconds later; torch
    traces it."""
    time.sleep(forward)
    return x.clone()


@wait.register_fake
def _(x: Tensor, forward: float, backward: float) -> Tensor:
    return torch.empty_like(x)


def _remember(ctx: Any, inputs: Any, output: Any) -> None:
    ctx.seconds = inputs[2]


def _back(ctx: Any, gradient: Tensor) -> Any:
    time.sleep(ctx.seconds)
    return gradient, None, None


wait.register_autograd(_back, setup_context=_remember)


class Layer(nn.Module):
    """Waits forward and backward, in seconds; its weight is there to be trained."""

    def __init__(self, forward: float, backward: float) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.seconds = forward, backward

    def forward(self, x: Tensor) -> Tensor:
        waited: Tensor = wait(self.linear(x), *self.seconds)
        return waited


def network(layers: int, forward: float, backward: float) -> nn.Module:
    return nn.Sequential(*(Layer(forward, backward) for _ in range(layers)))
