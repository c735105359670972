"""Loss scaling: gradients in float16 without losing small numbers.

float16 has no numbers below 6e-8, so the loss is multiplied by a scale before backward, and the
gradients are divided by it before an optimizer sees them:

    backward of S · loss;   g <- g / S;   a g that is not finite: no step, and S <- S / 2
                                          2,000 steps without such a g: S <- 2 S

torch's `GradScaler` keeps S. Where ranks sum gradients, all have the same sum, and therefore skip
the same steps.

Source: Micikevicius et al. 2018, "Mixed Precision Training", section 3.2.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from dure.contracts.task import Task


class LossScaling:
    """Loss scale of a learner, and its optimizer's steps.

    Args:
        device: Device of the gradients.
        optimizer: Optimizer that steps with them.
    """

    def __init__(self, device: torch.device, optimizer: Optimizer) -> None:
        self._optimizer = optimizer
        self._scaler = torch.amp.GradScaler(device.type)

    def scaled(self, loss: Tensor) -> Tensor:
        """Return the loss from which backward runs."""
        scaled: Tensor = self._scaler.scale(loss)
        return scaled

    def unscale(self) -> None:
        """Divide the gradients by the scale, before they are clipped or used in any other way."""
        if self._any_gradient():
            self._scaler.unscale_(self._optimizer)

    def step(self) -> None:
        """Make a step of the optimizer unless a gradient is not finite, and adapt the scale."""
        if not self._any_gradient():
            self._optimizer.step()
            return
        self._scaler.step(self._optimizer)
        self._scaler.update()

    def _any_gradient(self) -> bool:
        groups = self._optimizer.param_groups
        return any(one.grad is not None for group in groups for one in group["params"])

    @property
    def scale(self) -> float:
        """Present scale; waits for the device."""
        return float(self._scaler.get_scale())

    def state(self) -> dict[str, Any]:
        """Return the scale and its counter, for `restore`."""
        return dict(self._scaler.state_dict())

    def restore(self, state: Mapping[str, Any]) -> None:
        """Continue from a `state`."""
        self._scaler.load_state_dict(dict(state))


def loss_scaling_of(task: Task, device: torch.device, optimizer: Optimizer) -> LossScaling | None:
    """Return the loss scaling of a task's precision; None unless it is fp16."""
    return LossScaling(device, optimizer) if task.precision == "fp16" else None
