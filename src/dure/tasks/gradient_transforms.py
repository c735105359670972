"""Changes of a gradient between backward and the optimizer, the same in every system.

    g_i <- none                            of parameters that are frozen still (`Task.unfreeze`)
    g   <- g · min(1, clip_norm / |g|)     over all that is left (`Task.clip_norm`)

An optimizer skips a parameter without a gradient: no momentum and no decay. Nothing travels: the
process of the optimizer has the whole gradient already.
"""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import AbstractContextManager, nullcontext

import torch
from torch import Tensor, nn

from dure.contracts.task import Task
from dure.contracts.training_options import trained_from


def forward_context(task: Task, device: torch.device) -> AbstractContextManager[object]:
    """Return the context of forward and loss: autocast, if the task's precision is reduced.

    Weights, their gradients and sums keep their dtype.
    """
    if task.precision == "full":
        return nullcontext()
    reduced = torch.bfloat16 if task.precision == "bf16" else torch.float16
    return torch.autocast(device.type, reduced)


class GradientTransforms:
    """The gradients of a model before an optimizer step.

    parameters: by name, as in the task's model.
    """

    def __init__(self, task: Task, parameters: Iterable[tuple[str, nn.Parameter]]) -> None:
        named = dict(parameters)
        self.norm = task.clip_norm
        self.parameters = list(named.values())
        self._from = [
            (named[name], step) for name, step in sorted(trained_from(task, named).items())
        ]

    @property
    def asked(self) -> bool:
        """Whether the task requests any change."""
        return self.norm is not None or bool(self._from)

    def at(self, step: int) -> None:
        """Change the gradients before the optimizer's step number `step`, from 0 on."""
        self.drop(step)
        if self.norm is not None:
            clip(self.parameters, self.norm)

    def drop(self, step: int) -> None:
        """Remove the gradients of parameters that are not trained yet."""
        for parameter, first in self._from:
            if step < first:
                parameter.grad = None


def clip(parameters: Iterable[Tensor], norm: float) -> None:
    """Clip the gradients to a joint norm of at most `norm`, in place."""
    found = [one for one in parameters if one.grad is not None]
    for parameter in found:
        gradient = parameter.grad
        if gradient is not None and gradient.is_sparse:
            # torch computes no norms of sparse gradients.
            parameter.grad = gradient.to_dense()
    torch.nn.utils.clip_grad_norm_(found, norm)
