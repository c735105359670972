"""NoPeek: the head learns to reveal little of the inputs in its output.

    loss of the head = the task's loss + alpha dCor(X, Z)        X inputs, Z output, of a batch

The client adds the gradient of the second term, with respect to Z, to the gradient from the server:
no additional bytes are sent. NoPeek makes inputs harder to rebuild, without a guarantee; labels are
not protected.

Cost: O(n² (d_in + d)) a batch of n examples.

Source: P. Vepakomma et al., "NoPeek: Information leakage reduction to share activations in
distributed deep learning", 2020.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import ClassVar, Literal

import torch
from torch import Tensor

from dure.arguments import above
from dure.data.examples import Examples
from dure.split.leakage.defence import Defence
from dure.split.leakage.distance_correlation import distance_correlation


@dataclass(frozen=True)
class NoPeek(Defence):
    """Distance correlation in the head's loss. alpha: its weight."""

    name: ClassVar[str] = "no-peek"
    guards: ClassVar[Literal["activations"]] = "activations"
    alpha: float = field(default=1.0, metadata=above(0, finite=True))

    def check(self, examples: Examples, labels_stay: bool) -> None:
        inputs = getattr(examples, "inputs", None)
        if isinstance(inputs, Tensor) and not inputs.is_floating_point():
            raise ValueError(
                "no-peek measures distances between inputs, but those of the task are not "
                "floating-point: leave it out"
            )

    def activations(self, inputs: Tensor, values: Tensor) -> Tensor:
        if len(values) < 2:
            return torch.zeros_like(values)
        leaf = values.detach().requires_grad_()
        with torch.enable_grad():
            term = self.alpha * distance_correlation(inputs.to(leaf.dtype), leaf)
        (gradient,) = torch.autograd.grad(term, leaf)
        return gradient
