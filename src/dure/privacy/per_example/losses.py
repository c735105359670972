"""The losses of single examples, of a loss that is the mean over a batch.

The loss of an example is what the task's loss gives for that example alone:

    most losses               the mean over its elements
    cross-entropies           the mean over the targets that count in it; with weights of classes,
                              each target by its weight over the mean weight, for the weight of a
                              single target would cancel
    (sum, count)              sum / count; 0 where nothing counts

So the mean over the batch is the task's loss where all examples count alike. Elsewhere it is
another mean, of examples and not of targets: what an example counts may not decide how much others
weigh, or it would be in the result beside its gradient.

torch's losses give all of them at once, without their last step. Others are asked example by
example; all at once (`torch.vmap`) where that is the same.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from dure.contracts.task import Loss
from dure.privacy.per_example.way import CannotClipError, count, cut
from dure.tasks.known_losses import CrossEntropy, cross_entropy_of, reduction_of, torch_loss
from dure.tasks.loss_shares import CountedLoss

Each = Callable[[Any, Any], Tensor]
"""(outputs, targets) of b examples to their losses, shape (b,)."""


def losses_of(loss: Loss) -> list[Each]:
    """The ways to the losses of single examples, the fastest first; the last one is always right.

    loss: the task's, where its tensors are on the device of the model.
    """
    singly = _Singly(loss)
    found = torch_loss(loss)
    if found is None:
        return [_AtOnce(loss), singly]
    reduction = reduction_of(found[1])
    if reduction not in ("mean", "batchmean"):
        return [singly]
    # Cross-entropies have no other way: see the docstring of the module.
    known = cross_entropy_of(loss)
    unreduced = _Unreduced(_without_mean(loss), known, sums=reduction == "batchmean")
    return [unreduced] if known is not None else [unreduced, singly]


class _Unreduced:
    """A loss of torch's before it takes the mean."""

    def __init__(self, loss: Callable[..., Tensor], known: CrossEntropy | None, sums: bool) -> None:
        self.loss = loss
        self.known = known
        self.sums = sums

    def __call__(self, outputs: Any, targets: Any) -> Tensor:
        values = self.loss(outputs, targets)
        if values.ndim == 0 or len(values) != count(targets):
            raise CannotClipError("the loss does not give a number for each example")
        values = values.reshape(len(values), -1)
        if self.known is not None and not targets.is_floating_point():
            return values.sum(1) / self._counted(self.known, targets)
        return values.sum(1) if self.sums else values.mean(1)

    def _counted(self, known: CrossEntropy, targets: Tensor) -> Tensor:
        """What the sum of an example is divided by."""
        counted = (targets != known.ignore_index).reshape(len(targets), -1).sum(1).clamp(min=1)
        return counted if known.weight is None else counted * known.weight.mean()


def _without_mean(loss: Any) -> Any:
    """The loss of torch's with a number for each element."""
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
    """A loss that is asked for one example after another."""

    def __init__(self, loss: Loss) -> None:
        self.loss = CountedLoss(loss, None)

    def __call__(self, outputs: Any, targets: Any) -> Tensor:
        losses = []
        for at in range(count(targets)):
            one = self.loss.mean(cut(outputs, at, at + 1), cut(targets, at, at + 1), 1)
            losses.append(one.loss.reshape(()))
        return torch.stack(losses)


class _AtOnce:
    """A loss that is asked for all examples at once, each of which is a batch of one."""

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
