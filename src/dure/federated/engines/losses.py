"""Losses of many clients at once: each client's value, and the gradient of the outputs, by hand.

Each loss is the mean over the client's own examples: row (a, b) weighs w(a, b) = 1 / b_a, or 0
where it is padding.

                          loss                                 gradient
    cross-entropy         -log p(target), p = softmax(y)       w (p - one-hot)
    mean squared error    mean of (y - t)^2 over k elements    2 w (y - t) / k
    binary, with logits   mean of log(1 + e^y) - y t over k    w (sigmoid(y) - t) / k

for outputs y and targets t.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from dure.federated.engines.sgd import CannotBatchError

Loss = Callable[[Tensor, Tensor, Tensor], tuple[Tensor, Tensor]]
"""(outputs, targets, weights of rows) -> (a loss a client, the outputs' gradient).

Shapes: outputs (A, B, ...), weights (A, B), losses (A,).
"""

REGISTER = 64
"""Bytes of a vector register, where it is long (AVX-512)."""

MANY = 2_000
"""Outputs, from which on it pays to turn short rows around."""


def cross_entropy(
    outputs: Tensor, targets: Tensor, weights: Tensor, in_company: bool = False
) -> tuple[Tensor, Tensor]:
    """Cross-entropy with class indices, and its gradient.

    in_company: whether a client's rounding may depend on the rows of the others.
    """
    logs = _log_softmax(outputs) if in_company else torch.log_softmax(outputs, -1)
    columns = targets.unsqueeze(-1)
    rows = weights.unsqueeze(-1)
    loss = -(logs.gather(-1, columns) * rows).sum((1, 2))
    # In place: the loss has been read from it, and p = exp(log p) is next.
    gradient = logs.exp_()
    gradient.scatter_(-1, columns, -1.0, reduce="add")
    return loss, gradient.mul_(rows)


def _log_softmax(outputs: Tensor) -> Tensor:
    """log softmax along the last dimension.

    Where that is shorter than a vector register, torch's goes one number at a time, but computes
    many rows side by side where they lie side by side: ten times faster for ten classes.
    """
    # Turning rows around costs two copies, which few outputs do not earn back.
    wide = outputs.numel() < MANY or outputs.shape[-1] * outputs.element_size() >= REGISTER
    if wide or outputs.device.type != "cpu":
        return torch.log_softmax(outputs, -1)
    return torch.log_softmax(outputs.movedim(-1, 0).contiguous(), 0).movedim(0, -1).contiguous()


def mse(outputs: Tensor, targets: Tensor, weights: Tensor) -> tuple[Tensor, Tensor]:
    difference = outputs - targets
    rows = _rows(weights, outputs)
    # From left to right: the loss has its squares before the gradient takes the memory.
    return (difference.square() * rows).flatten(1).sum(1), difference.mul_(rows).mul_(2)


def binary_cross_entropy(
    outputs: Tensor, targets: Tensor, weights: Tensor
) -> tuple[Tensor, Tensor]:
    rows = _rows(weights, outputs)
    loss = F.binary_cross_entropy_with_logits(outputs, targets, reduction="none")
    return (loss * rows).flatten(1).sum(1), torch.sigmoid(outputs).sub_(targets).mul_(rows)


def _rows(weights: Tensor, outputs: Tensor) -> Tensor:
    """The weight of each element of the outputs."""
    # torch's "mean" is over elements too, and not over examples alone.
    elements = outputs.shape[2:].numel()
    return (weights / elements).view(*weights.shape, *[1] * (outputs.ndim - 2))


def loss_of(function: Any) -> Loss:
    """What computes `function` for many clients. Raises CannotBatchError if that is not known."""
    for loss, functions, module in (
        (cross_entropy, (F.cross_entropy,), nn.CrossEntropyLoss),
        (mse, (F.mse_loss,), nn.MSELoss),
        (binary_cross_entropy, (F.binary_cross_entropy_with_logits,), nn.BCEWithLogitsLoss),
    ):
        if function in functions or (type(function) is module and _plain(function)):
            return loss
    name = getattr(function, "__name__", type(function).__name__)
    raise CannotBatchError(
        f"the loss is {name}, not cross_entropy, mse_loss or binary_cross_entropy_with_logits"
    )


def _plain(module: nn.Module) -> bool:
    """Whether the module is as its class makes it: a mean, no weights, no smoothing."""
    plain = type(module)()
    names = ("reduction", "ignore_index", "label_smoothing")
    same = all(getattr(module, name, None) == getattr(plain, name, None) for name in names)
    return (
        same
        and not list(module.buffers())
        and getattr(module, "weight", None) is None
        and not hooked(module)
    )


def hooked(module: nn.Module) -> bool:
    """Whether somebody listens to the module's calls."""
    forward = (module._forward_hooks, module._forward_pre_hooks)
    backward = module._backward_hooks
    return bool(any(forward) or backward or module._backward_pre_hooks)
