"""Per-example losses, from a loss that is the mean over a batch.

The loss of an example is the value of the task's loss for that example alone:

    most losses               the mean over its elements
    cross-entropies           the mean over the targets that count in it; with weights of classes,
                              each target by its weight over the mean weight, for the weight of a
                              single target would cancel
    (sum, count)              sum / count; 0 if nothing counts

So the mean over the batch is the task's loss if all examples count alike. Otherwise the mean is
over examples and not over targets: the count of an example must not change the weight of other
examples, or it would influence the result beyond its gradient.

torch's losses give all per-example losses at once, without the reduction. Other losses are called
for each example; with `torch.vmap` if that gives the same values.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from dure.contracts.task import Loss
from dure.privacy.per_example.clipping import CannotClipError, count, cut
from dure.tasks.known_losses import CrossEntropy, cross_entropy_of, reduction_of, torch_loss
from dure.tasks.loss_shares import CountedLoss

Each = Callable[[Any, Any], Tensor]
"""each(outputs, targets): losses of the b examples, shape (b,)."""


def losses_of(loss: Loss) -> list[Each]:
    """Return the ways to compute per-example losses, the fastest first; the last is always right.

    loss: the task's, with its tensors on the device of the model.
    """
    singly = _Singly(loss)
    found = torch_loss(loss)
    if found is None:
        return [_AtOnce(loss), singly]
    reduction = reduction_of(found[1])
    if reduction not in ("mean", "batchmean"):
        return [singly]
    # Only this way weights cross-entropies as the module's docstring defines.
    known = cross_entropy_of(loss)
    unreduced = _Unreduced(_without_mean(loss), known, sums=reduction == "batchmean")
    return [unreduced] if known is not None else [unreduced, singly]


class _Unreduced:
    """A loss of torch without its reduction."""

    def __init__(self, loss: Callable[..., Tensor], known: CrossEntropy | None, sums: bool) -> None:
        self.loss = loss
        self.known = known
        self.sums = sums

    def __call__(self, outputs: Any, targets: Any) -> Tensor:
        values = self.loss(outputs, targets)
        if values.ndim == 0 or len(values) != count(targets):
            raise CannotClipError("the loss does not return a number for each example")
        values = values.reshape(len(values), -1)
        if self.known is not None and not targets.is_floating_point():
            return values.sum(1) / self._counted(self.known, targets)
        return values.sum(1) if self.sums else values.mean(1)

    def _counted(self, known: CrossEntropy, targets: Tensor) -> Tensor:
        """Return the divisor of each example's sum."""
        counted = (targets != known.ignore_index).reshape(len(targets), -1).sum(1).clamp(min=1)
        return counted if known.weight is None else counted * known.weight.mean()


def _without_mean(loss: Any) -> Any:
    """Return torch's loss with a value for each element."""
    if isinstance(loss, partial):
        keywords = {
            name: value
            for name, value in loss.keywords.items()
            if name not in ("reduction", "size_average", "reduce")
        }
        return partial(_without_mean(loss.func), **keywords)
    if isinstance(loss, nn.Module):
        twin = copy.copy(loss)
        twin.reduction = "none"  # type: ignore[assignment]
        return twin
    return partial(loss, reduction="none")


class _Singly:
    """A loss that is called for one example after another."""

    def __init__(self, loss: Loss) -> None:
        self.loss = CountedLoss(loss, None)

    def __call__(self, outputs: Any, targets: Any) -> Tensor:
        losses = []
        for at in range(count(targets)):
            one = self.loss.mean(cut(outputs, at, at + 1), cut(targets, at, at + 1), 1)
            losses.append(one.loss.reshape(()))
        return torch.stack(losses)


class _AtOnce:
    """A loss that is vectorised over examples, each as a batch of size 1."""

    def __init__(self, loss: Loss) -> None:
        self.loss = loss

    def __call__(self, outputs: Any, targets: Any) -> Tensor:
        try:
            each: Tensor = torch.vmap(self._one)(outputs, targets)
        except (RuntimeError, TypeError, ValueError) as error:
            raise CannotClipError(f"torch.vmap cannot compute the loss: {error}") from error
        return each

    def _one(self, outputs: Any, targets: Any) -> Tensor:
        value = self.loss(_as_batch(outputs), _as_batch(targets))
        if isinstance(value, tuple):
            raise CannotClipError("what the loss counts is known when it is computed")
        return value.reshape(())


def _as_batch(example: Any) -> Any:
    return torch.utils._pytree.tree_map(
        lambda leaf: leaf.unsqueeze(0) if isinstance(leaf, Tensor) else leaf, example
    )
