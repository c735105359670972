"""Loss scaling: gradients in float16 without losing small numbers.

float16 has no numbers below 6e-8 and none above 65,504, so the loss is multiplied by a scale S
before backward, and the gradients are divided by S before they are used in any way. There are two
rules for a gradient that is not finite:

    skip      no step is made, and S <- S / 2; after 2,000 steps without such a gradient S <- 2 S.
              All who share a step have the same S and skip the same steps (`LossScaling`)
    repeat    the pass is run again with S / 16, with the same random draws and buffers, until its
              gradient is finite (`RepeatedPasses`)

The first is the rule of torch's `GradScaler`. The second is for gradients and steps that others
count on: the worker of a parameter server owes its servers a gradient, and the client of a
federation a number of steps. There the scale begins anew with each gradient or job, so that the
result is a function of weights, examples and seed, whoever computes it and whenever.

Source: Micikevicius et al. 2018, "Mixed Precision Training", section 3.2.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from dure.contracts.task import Task
from dure.errors import GradientNotFiniteError
from dure.randomness.seeds import generators_state, restore_generators
from dure.tensors.buffers import BufferNames

FIRST_SCALE = 2.0**16
GROWTH_STEPS = 2000
"""Steps with finite gradients after which the scale is doubled."""

REPEATED_SCALE = 2.0**12
"""First scale of a pass that is repeated: large enough for most losses, and rarely too large."""

LEAST_SCALE = 2.0**-24
"""Scale below which gradients are not finite for another reason than the range of float16."""

Result = TypeVar("Result")
Agree = Callable[[Tensor], Tensor]
"""Function that returns the largest value of a scalar over all ranks that share a step."""


class LossScaling:
    """Loss scale of a learner that skips the steps of gradients that are not finite.

    Args:
        where: Name of the worker, for errors.
        device: Device of the gradients.
        agree: Makes a flag the same on all ranks, where each rank has a part of the gradient.
        enabled: False for another precision than fp16: nothing is scaled, and no step is skipped.
    """

    def __init__(
        self,
        where: str,
        device: torch.device,
        agree: Agree | None = None,
        enabled: bool = True,
    ) -> None:
        self.enabled = enabled
        self.scale = FIRST_SCALE if enabled else 1.0
        self._where = where
        self._device = device
        self._agree = agree
        self._growth = 0
        self._is_finite = True

    def scaled(self, loss: Tensor) -> Tensor:
        """Return the loss from which backward runs."""
        return loss * self.scale if self.enabled else loss

    def unscale(self, parameters: Iterable[Tensor]) -> None:
        """Divide the gradients by the scale, before they are clipped or used in any other way.

        Waits for the device. With `agree` all ranks call this method together.
        """
        if not self.enabled:
            return
        gradients = [one.grad for one in parameters if one.grad is not None]
        found = unscale_gradients(gradients, self.scale, self._device)
        if self._agree is not None:
            found = self._agree(found)
        self._is_finite = not bool(found)

    def step(self, optimizer: Optimizer) -> None:
        """Make a step of the optimizer unless a gradient is not finite; adapt the scale.

        Raises GradientNotFiniteError if gradients are not finite with any scale.
        """
        if not self.enabled:
            optimizer.step()
            return
        if self._is_finite:
            optimizer.step()
            self._growth += 1
            if self._growth == GROWTH_STEPS:
                self._growth = 0
                # A larger scale would not be finite in float32, the dtype of the loss.
                self.scale = min(2 * self.scale, 2.0**127)
            return
        self._growth = 0
        self.scale /= 2
        if self.scale < LEAST_SCALE:
            raise GradientNotFiniteError(self._where)

    def state(self) -> dict[str, Any]:
        """Return the entry of a checkpoint, for `restore`; empty if disabled.

        The keys of the entry are those of `GradScaler`.
        """
        if not self.enabled:
            return {}
        return {"loss_scaling": {"scale": self.scale, "_growth_tracker": self._growth}}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Continue from a checkpoint with the entry of `state`."""
        if self.enabled:
            self.scale = float(state["loss_scaling"]["scale"])
            self._growth = int(state["loss_scaling"]["_growth_tracker"])


def loss_scaling_of(task: Task, where: str, device: torch.device) -> LossScaling:
    """Return the loss scaling of a task, enabled if its precision is fp16."""
    return LossScaling(where, device, enabled=task.precision == "fp16")


def check_weights(model: nn.Module) -> None:
    """Check that loss scaling can protect the gradients of a model's weights.

    Raises ValueError for weights in float16: their gradients would be too small again when they
    are divided by the scale.
    """
    for name, parameter in model.named_parameters():
        if parameter.requires_grad and parameter.dtype == torch.float16:
            raise ValueError(
                f"precision='fp16' computes in float16 with weights in a larger dtype, but {name} "
                "is in float16: make the model in float32"
            )


def unscale_gradients(gradients: Sequence[Tensor], scale: float, device: torch.device) -> Tensor:
    """Divide gradients by a scale, in place.

    Returns a scalar on `device`: 1 if a gradient is not finite, otherwise 0. The gradients may be
    on several devices.
    """
    groups: dict[tuple[torch.device, torch.dtype], list[Tensor]] = {}
    for gradient in gradients:
        # Values of a sparse gradient, whose indices may occur several times: a sum is linear.
        dense = gradient._values() if gradient.is_sparse else gradient
        groups.setdefault((dense.device, dense.dtype), []).append(dense)
    found = torch.zeros((), device=device)
    for (place, _), group in groups.items():
        flag = torch.zeros((), device=place)
        inverse = torch.full((), 1 / scale, device=place)
        torch._amp_foreach_non_finite_check_and_unscale_(group, flag, inverse)
        found = torch.maximum(found, flag.to(device))
    return found


class RepeatedPasses:
    """Passes of a model that are repeated with a smaller scale until their gradients are finite.

    A smaller scale stays for the passes that follow. Unless the task's precision is fp16 nothing is
    scaled, and each pass runs once.
    """

    def __init__(self, task: Task, model: nn.Module, device: torch.device) -> None:
        self.enabled = task.precision == "fp16"
        self.scale = REPEATED_SCALE if self.enabled else 1.0
        self._model = model
        self._device = device

    def scaled(self, loss: Tensor) -> Tensor:
        """Return the loss from which backward runs."""
        return loss * self.scale if self.enabled else loss

    def backward(self, loss: Tensor) -> None:
        """Run backward from the scaled loss."""
        self.scaled(loss).backward()  # type: ignore[no-untyped-call]

    def run(
        self,
        compute: Callable[[], Result],
        gradients: Callable[[Result], Iterable[Tensor | None]],
    ) -> Result:
        """Return the result of a pass whose gradients are finite, after dividing them by the scale.

        A pass that has no finite gradients with any scale is returned as it is: its loss, or the
        next, is not finite either.

        Args:
            compute: Runs forward, and backward from `scaled`, into gradients that begin empty.
            gradients: Returns the gradients of a result.
        """
        if not self.enabled:
            return compute()
        begun = generators_state()
        names = BufferNames(self._model)
        buffers = [buffer.detach().clone() for buffer in names.of(self._model)]
        while True:
            result = compute()
            found = [one for one in gradients(result) if one is not None]
            if not bool(unscale_gradients(found, self.scale, self._device)):
                return result
            if self.scale / 16 < LEAST_SCALE:
                return result
            self.scale /= 16
            restore_generators(begun)
            names.load(self._model, buffers)
