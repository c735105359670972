"""The gradient of a batch, computed in pieces: less memory, the same gradient.

    g = sum over pieces of (n_piece / n)·g_piece

where n is what the loss counts (`dure.tasks.loss_shares`). Batch norm sees a piece, and draws such
as dropout's are made piece by piece.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager
from typing import Any, NamedTuple

from torch import Tensor

from dure.tasks.loss_shares import Computed, CountedLoss


class Learned(NamedTuple):
    """What backward was called for. loss: the mean over what was counted."""

    loss: float
    counted: float


def check_accumulate(accumulate: int) -> None:
    """Raises ValueError for a number of pieces that no gradient can have."""
    if accumulate < 1:
        raise ValueError(
            f"accumulate is {accumulate}, but a part is computed in at least one piece"
        )


def learn(
    losses: CountedLoss,
    indices: Tensor,
    pieces: int,
    *,
    read: Callable[[Tensor], tuple[Any, Any]],
    forward: Callable[[Any], Any],
    computing: Callable[[Any, Any], AbstractContextManager[object]],
    backward: Callable[[Tensor], None],
    parameters: Iterable[Tensor],
) -> Learned:
    """Leaves the gradient of the mean loss of a batch with its parameters.

    read: the inputs and targets of some examples. forward: the model's outputs. computing: around
    forward and loss, given inputs and targets. backward: from a loss; what it costs to wait for the
    loss, as on a GPU, was before.
    """
    if pieces == 1:
        inputs, targets = read(indices)
        with computing(inputs, targets):
            found = losses.mean(forward(inputs), targets, len(indices))
        return _whole(found, backward)
    loss, counted = 0.0, 0.0
    for piece in indices.tensor_split(pieces):
        if not len(piece):
            continue
        inputs, targets = read(piece)
        share = losses.share(piece, indices)
        with computing(inputs, targets):
            found = losses.part(forward(inputs), targets, len(piece), share)
        part = _whole(found, backward)
        loss += part.loss
        counted += part.counted
    gradients = (one.grad for one in parameters if one.grad is not None)
    mean = losses.settle(loss, indices, counted, gradients)
    return Learned(0.0 if mean is None else mean, counted)


def _whole(found: Computed, backward: Callable[[Tensor], None]) -> Learned:
    value = float(found.loss.item())
    backward(found.loss)
    return Learned(value, found.counted)
