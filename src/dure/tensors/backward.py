"""Backward from tensors whose gradients are given, as by another rank.

    end    a tensor of the graph        ->  a number that depends on it, and on nothing else
    given  what is to be its gradient   ->  what that number sends back, whatever it receives

So `torch.autograd.backward` begins at numbers, which need no gradients. With gradients it would
first compare their shapes with sympy, which it imports for that: a second of CPU and 70 MB, in
every process. The engine compares them anyway.

Cost: a number and a node of the graph for each tensor.

Source: `_make_grads` in torch/autograd/__init__.py.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor


class _Given(torch.autograd.Function):
    """The number."""

    @staticmethod
    def forward(context: Any, end: Tensor, gradient: Tensor) -> Tensor:
        context.gradient = gradient
        return torch.zeros((), device=end.device)

    @staticmethod
    def backward(context: Any, _: Tensor) -> tuple[Tensor, None]:
        gradient = context.gradient
        # Who gets it may keep it, instead of a copy, if nobody else has it.
        context.gradient = None
        return gradient, None


def backward_from(pairs: Iterable[tuple[Tensor, Tensor]]) -> None:
    """Backward from tensors, each with the gradient that it is given, of the same shape.

    As `torch.autograd.backward(tensors, gradients)`. Raises RuntimeError for a tensor that needs no
    gradient, and for a gradient of another shape.
    """
    with torch.enable_grad():
        numbers = [
            _Given.apply(end, gradient)  # type: ignore[no-untyped-call]
            for end, gradient in pairs
        ]
    torch.autograd.backward(numbers)
