"""Backward from tensors with given gradients, such as gradients received from another rank.

    end    a tensor of the graph        ->  a scalar that depends on this tensor alone
    given  the gradient of the tensor   ->  sent back by the scalar, whatever the scalar receives

`torch.autograd.backward` then starts at scalars, for which no gradients are passed. With explicit
gradients torch would first compare shapes with sympy, and import sympy for this purpose: a second
of CPU and 70 MB in every process. The autograd engine checks the shapes anyway.

Cost: a scalar and a node of the graph for each tensor.
Source: `_make_grads` in torch/autograd/__init__.py.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor


class _Given(torch.autograd.Function):
    """Autograd function that turns a tensor into a scalar and sends the given gradient back."""

    @staticmethod
    def forward(context: Any, end: Tensor, gradient: Tensor) -> Tensor:
        context.gradient = gradient
        return torch.zeros((), device=end.device)

    @staticmethod
    def backward(context: Any, _: Tensor) -> tuple[Tensor, None]:
        gradient = context.gradient
        # Without this reference autograd may reuse the gradient's memory instead of a copy.
        context.gradient = None
        return gradient, None


def backward_from(pairs: Iterable[tuple[Tensor, Tensor]]) -> None:
    """Run backward from tensors, each with a given gradient of the same shape.

    Equivalent to `torch.autograd.backward(tensors, gradients)`. Raises RuntimeError for a tensor
    that needs no gradient and for a gradient of another shape.
    """
    with torch.enable_grad():
        numbers = [
            _Given.apply(end, gradient)  # type: ignore[no-untyped-call]
            for end, gradient in pairs
        ]
    torch.autograd.backward(numbers)


def has_hooks(parameter: Tensor) -> bool:
    """Return whether a hook sees, and may change, the gradient that autograd computes."""
    return bool(
        parameter._backward_hooks or getattr(parameter, "_post_accumulate_grad_hooks", None)
    )
