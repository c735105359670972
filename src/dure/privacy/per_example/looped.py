"""Per-example gradients in a loop: a forward and a backward pass for each example.

Slow, but right for every model and loss: the reference for the other ways. Memory: that of one
example, and of one gradient.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from dure.privacy.per_example.clipping import (
    ClippedSums,
    PerExampleClipping,
    count,
    cut,
    factors,
    norm_bounds,
    norms_of,
    trained,
)
from dure.privacy.per_example.losses import Each


class LoopClipping(PerExampleClipping):
    """Clipping in a loop over examples."""

    name = "one example after another"

    def __init__(self, model: nn.Module, each: Each) -> None:
        self.model = model
        self.each = each
        self.parameters = trained(model)

    def clipped(self, inputs: Any, targets: Any, clip: float) -> ClippedSums:
        sums = [torch.zeros_like(parameter) for parameter in self.parameters]
        norms: list[Tensor] = []
        losses: list[Tensor] = []
        for at in range(count(targets)):
            loss, gradients = self._gradients(cut(inputs, at, at + 1), cut(targets, at, at + 1))
            norm = norms_of([norm_bounds(each.reshape(-1)) for each in gradients])
            factor = factors(norm, clip)
            for total, gradient in zip(sums, gradients, strict=True):
                total.add_(gradient * factor.to(gradient.dtype))
            norms.append(norm)
            losses.append(loss)
        return ClippedSums(sums, torch.stack(norms), torch.stack(losses))

    def _gradients(self, inputs: Any, targets: Any) -> tuple[Tensor, list[Tensor]]:
        loss = self.each(self.model(inputs), targets).sum()
        if not loss.requires_grad:
            return loss, [torch.zeros_like(parameter) for parameter in self.parameters]
        found = torch.autograd.grad(loss, self.parameters, allow_unused=True)
        gradients = [
            torch.zeros_like(parameter)
            if gradient is None
            else (gradient.to_dense() if gradient.is_sparse else gradient)
            for parameter, gradient in zip(self.parameters, found, strict=True)
        ]
        return loss.detach(), gradients
