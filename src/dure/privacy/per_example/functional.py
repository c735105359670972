"""Per-example gradients by torch.func, for layers of any kind.

The model is a function of its weights; its gradient with respect to them, for an example, is
vectorised over examples (vmap). Memory: `ELEMENTS` of gradients at a time, for any batch size.
Dropout draws for each example. Layers that torch.vmap cannot vectorise need `looped`.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call, grad_and_value, vmap
from torch.utils._pytree import tree_map

from dure.privacy.per_example.clipping import (
    CannotClipError,
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

ELEMENTS = 1 << 25
"""Maximum number of elements of gradients in memory at once: 128 MiB in float32."""


class FunctionalClipping(PerExampleClipping):
    """Clipping by torch.func."""

    name = "torch.func"

    def __init__(self, model: nn.Module, each: Each) -> None:
        self.model = model
        self.each = each
        self.parameters = trained(model)
        names = {id(parameter): name for name, parameter in model.named_parameters()}
        self.names = [names[id(parameter)] for parameter in self.parameters]
        self.gradients = vmap(
            grad_and_value(self._loss), in_dims=(None, None, 0, 0), randomness="different"
        )
        elements = sum(parameter.numel() for parameter in self.parameters)
        self.chunk = max(1, ELEMENTS // max(1, elements))

    def _loss(
        self, weights: dict[str, Tensor], rest: dict[str, Tensor], inputs: Any, targets: Any
    ) -> Tensor:
        outputs = functional_call(self.model, (weights, rest), (_as_batch(inputs),))
        return self.each(outputs, _as_batch(targets)).sum()

    def clipped(self, inputs: Any, targets: Any, clip: float) -> ClippedSums:
        weights = {
            name: parameter.detach()
            for name, parameter in zip(self.names, self.parameters, strict=True)
        }
        rest = {
            name: tensor.detach()
            for name, tensor in (*self.model.named_parameters(), *self.model.named_buffers())
            if name not in weights
        }
        sums = [torch.zeros_like(parameter) for parameter in self.parameters]
        norms: list[Tensor] = []
        losses: list[Tensor] = []
        for start in range(0, count(targets), self.chunk):
            end = start + self.chunk
            try:
                found, value = self.gradients(
                    weights, rest, cut(inputs, start, end), cut(targets, start, end)
                )
            except (RuntimeError, TypeError, ValueError, NotImplementedError) as error:
                raise CannotClipError(f"torch.func cannot compute the model: {error}") from error
            each = [found[name] for name in self.names]
            norm = norms_of([norm_bounds(gradient.flatten(1)) for gradient in each])
            factor = factors(norm, clip)
            for total, gradient in zip(sums, each, strict=True):
                total.add_(torch.tensordot(factor.to(gradient.dtype), gradient, 1))
            norms.append(norm)
            losses.append(value.detach())
        return ClippedSums(sums, torch.cat(norms), torch.cat(losses))


def _as_batch(example: Any) -> Any:
    return tree_map(lambda leaf: leaf.unsqueeze(0) if isinstance(leaf, Tensor) else leaf, example)
