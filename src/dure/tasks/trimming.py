"""What becomes of a gradient between backward and the optimizer, the same in every system.

    g_i <- none                            of parameters that are frozen still (`Task.unfreeze`)
    g   <- g · min(1, clip_norm / |g|)     over all that is left (`Task.clip_norm`)

A parameter without a gradient is left alone by its optimizer: it has no momentum and no decay.
Nothing travels: whoever steps has the whole gradient already.
"""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import AbstractContextManager, nullcontext

import torch
from torch import Tensor, nn

from dure.contracts.learning import trained_from
from dure.contracts.task import Task


def computing(task: Task, device: torch.device) -> AbstractContextManager[object]:
    """Around forward and loss: autocast, if the task's precision is bf16.

    Weights, their gradients and sums stay as they are.
    """
    if task.precision == "full":
        return nullcontext()
    return torch.autocast(device.type, torch.bfloat16)


class Trimming:
    """The gradients of a model that an optimizer is about to step with.

    parameters: by name, as the task's model calls them.
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
        """Whether there is anything to do."""
        return self.norm is not None or bool(self._from)

    def at(self, step: int) -> None:
        """Before the optimizer's step number `step`, from 0 on."""
        self.drop(step)
        if self.norm is not None:
            clip(self.parameters, self.norm)

    def drop(self, step: int) -> None:
        """Takes the gradients of what is not yet trained."""
        for parameter, first in self._from:
            if step < first:
                parameter.grad = None


def clip(parameters: Iterable[Tensor], norm: float) -> None:
    """Gradients no longer than `norm`, all of them together."""
    found = [one for one in parameters if one.grad is not None]
    for parameter in found:
        gradient = parameter.grad
        if gradient is not None and gradient.is_sparse:
            # torch takes no norms of sparse gradients.
            parameter.grad = gradient.to_dense()
    torch.nn.utils.clip_grad_norm_(found, norm)
