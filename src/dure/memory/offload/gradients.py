"""Gradients in mapped files: each goes there as soon as backward has made it.

    g in memory -> g in its file, whose pages the system writes while backward goes on

A parameter's gradient has one file for the whole run. A second backward pass adds to it there. In
memory is the gradient that is being made.
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import partial

import torch
from torch import Tensor, nn

from dure.memory.offload.store import Files


class OffloadedGradients:
    """Watches the gradients of parameters."""

    def __init__(self, parameters: Iterable[nn.Parameter], files: Files) -> None:
        self.files = files
        for parameter in parameters:
            if parameter.requires_grad and parameter.nbytes >= files.least:
                place = files.empty(parameter.shape, parameter.dtype)
                hook = partial(self._is_there, place)
                parameter.register_post_accumulate_grad_hook(hook)  # type: ignore[no-untyped-call]

    def _is_there(self, place: Tensor, parameter: Tensor) -> None:
        gradient = parameter.grad
        # Sparse ones are small, and one that has a graph is somebody's own affair.
        if gradient is None or gradient.layout is not torch.strided or gradient.requires_grad:
            return
        if gradient.data_ptr() != place.data_ptr():
            place.copy_(gradient)
            parameter.grad = place
        self.files.behind([place])
