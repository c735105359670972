"""The task's optimizer, and plain SGD as a single call.

Plain SGD, w <- w - lr g, is a single call for all parameters: the same bits as torch.optim.SGD's,
without its bookkeeping.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from dure.contracts.task import Task
from dure.machine.compiler import deferred_compiler
from dure.tensors.optimizer_state import has_step_hooks


def optimizer_of(task: Task, parameters: Sequence[nn.Parameter]) -> Optimizer:
    """Return the task's optimizer of the parameters."""
    with deferred_compiler():
        return task.optimizer(parameters)


class PlainSGD:
    """Plain SGD: w <- w - lr_factor lr g, as torch.optim.SGD with only a learning rate."""

    def __init__(self, optimizer: Optimizer) -> None:
        self.groups: list[tuple[list[Tensor], float]] = [
            (g["params"], g["lr"]) for g in optimizer.param_groups
        ]
        self.lr_factor = 1.0

    @torch.no_grad()
    def step(self) -> None:
        for parameters, lr in self.groups:
            # As torch.optim: a parameter that took no part in the loss stays unchanged.
            moved = [p for p in parameters if p.grad is not None]
            gradients = [p.grad for p in moved if p.grad is not None]
            if moved:
                torch._foreach_add_(moved, gradients, alpha=-lr * self.lr_factor)


def check_gradients(task: Task, system: str) -> None:
    """Raise ValueError unless the task's optimizer is SGD.

    SGD's first step is along the gradient.
    """
    # A dummy parameter: only the class of the optimizer matters.
    optimizer = optimizer_of(task, [nn.Parameter(torch.zeros(1))])
    if type(optimizer) is not torch.optim.SGD:
        raise ValueError(
            f"{system} sends gradients, so it needs torch.optim.SGD and no other optimizer"
        )


def is_plain(optimizer: Optimizer) -> bool:
    """Return whether the optimizer is SGD with only a learning rate, and without hooks."""
    if type(optimizer) is not torch.optim.SGD:
        return False
    return not has_step_hooks(optimizer) and all(map(_has_lr_alone, optimizer.param_groups))


def _has_lr_alone(group: Mapping[str, Any]) -> bool:
    """Return whether the group has only a learning rate, a plain number, among SGD's settings."""
    extras = ("momentum", "weight_decay", "maximize", "fused", "differentiable")
    return not any(group.get(extra) for extra in extras) and not isinstance(group["lr"], Tensor)
