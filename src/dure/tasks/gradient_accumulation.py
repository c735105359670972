"""Gradient accumulation: the gradient of a batch in pieces, with less memory.

    g = sum over pieces of (n_piece / n)·g_piece

where n is the loss's count (`dure.tasks.loss_shares`). Batch norm sees a piece, and random draws
such as dropout's are made piece by piece.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager
from typing import Any, NamedTuple

import torch
from torch import Tensor

from dure.tasks.loss_shares import CountedLoss


class AccumulatedLoss(NamedTuple):
    """Result of the backward passes. loss: mean over the counted targets."""

    loss: float
    counted: float


def accumulate_gradient(
    losses: CountedLoss,
    indices: Tensor,
    pieces: int,
    *,
    read: Callable[[Tensor], tuple[Any, Any]],
    forward: Callable[[Any], Any],
    computing: Callable[[Any, Any], AbstractContextManager[object]],
    backward: Callable[[Tensor], None],
    parameters: Iterable[Tensor],
) -> AccumulatedLoss:
    """Accumulate the gradient of the mean loss of a batch in its parameters.

    Args:
        losses: the loss with its counts.
        indices: examples of the batch.
        pieces: number of pieces.
        read: returns inputs and targets of examples.
        forward: returns the model's outputs.
        computing: returns the context of forward and loss, given inputs and targets.
        backward: runs backward from a loss. On an accelerator losses are read once, after the last
            call.
        parameters: parameters with the gradients.
    """
    if pieces == 1:
        inputs, targets = read(indices)
        with computing(inputs, targets):
            found = losses.mean(forward(inputs), targets, len(indices))
        value = _run_backward(found.loss, backward)
        return AccumulatedLoss(read_losses([value])[0], found.counted)
    values: list[float | Tensor] = []
    counted = 0.0
    for piece in indices.tensor_split(pieces):
        if not len(piece):
            continue
        inputs, targets = read(piece)
        share = losses.share(piece, indices)
        with computing(inputs, targets):
            found = losses.part(forward(inputs), targets, len(piece), share)
        values.append(_run_backward(found.loss, backward))
        counted += found.counted
    loss = sum(read_losses(values), 0.0)
    gradients = (one.grad for one in parameters if one.grad is not None)
    mean = losses.settle(loss, indices, counted, gradients)
    return AccumulatedLoss(0.0 if mean is None else mean, counted)


def unread_loss(loss: Tensor) -> float | Tensor:
    """Return the value of a loss; on an accelerator, a tensor that `read_losses` reads later."""
    return float(loss.item()) if loss.is_cpu else loss.detach()


def read_losses(values: Sequence[float | Tensor]) -> list[float]:
    """Return the values of losses; waits once for those that are on an accelerator."""
    waiting = [value for value in values if isinstance(value, Tensor)]
    if len(waiting) > 1:
        read = iter(torch.stack(waiting).tolist())
    else:
        read = iter([float(value.item()) for value in waiting])
    return [next(read) if isinstance(value, Tensor) else value for value in values]


def _run_backward(loss: Tensor, backward: Callable[[Tensor], None]) -> float | Tensor:
    # On an accelerator backward runs while the host has not waited for forward yet.
    value = unread_loss(loss)
    backward(loss)
    return value
