"""Offloading of gradients to mapped files, as soon as backward has computed them.

    g in memory -> g in its file, whose pages the system writes during backward

A parameter's gradient has a file for the whole run. A second backward pass adds to the gradient in
its file. Only the gradient that is being computed is in memory.
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import partial

import torch
from torch import Tensor, nn

from dure.memory.offload.store import MappedFileStore


class OffloadedGradients:
    """Hooks that move the gradients of parameters to files."""

    def __init__(self, parameters: Iterable[nn.Parameter], files: MappedFileStore) -> None:
        self.files = files
        for parameter in parameters:
            if parameter.requires_grad and parameter.nbytes >= files.least:
                place = files.empty(parameter.shape, parameter.dtype)
                hook = partial(self._is_there, place)
                parameter.register_post_accumulate_grad_hook(hook)  # type: ignore[no-untyped-call]

    def _is_there(self, place: Tensor, parameter: Tensor) -> None:
        gradient = parameter.grad
        # Sparse gradients are small, and a gradient with a graph (create_graph) is left alone.
        if gradient is None or gradient.layout is not torch.strided or gradient.requires_grad:
            return
        if gradient.data_ptr() != place.data_ptr():
            place.copy_(gradient)
            parameter.grad = place
        self.files.behind([place])
