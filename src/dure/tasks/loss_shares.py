"""By how much the loss of a batch, or of a part of one, counts among those of others.

This is asked when a mean over several batches is reported; and when parts of a batch are computed
apart, by ranks or as micro-batches, and their gradients are to add up to that of the whole.

    loss of the batch = sum over its parts of share · loss of the part
    share = what the part's loss divides by / what the batch's loss divides by

A loss is the mean over its batch. For most, that is over the examples. Cross-entropy takes it over
the targets that it does not ignore, each with the weight of its class, so a batch of which half is
ignored counts half as much, and one of which all is ignored, whose loss is 0/0, not at all.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils._pytree import tree_leaves

if TYPE_CHECKING:
    from dure.data.examples import Examples

Loss = Callable[[Any, Any], Tensor]


def loss_and_count(loss: Loss, outputs: Any, targets: Any, examples: int) -> tuple[float, float]:
    """(sum, count) of a batch's loss: its mean is the one over the other."""
    count = _counted(loss, targets)
    if count is None:
        return float(loss(outputs, targets)) * examples, float(examples)
    return (float(loss(outputs, targets)) * count if count else 0.0), count


class Shares:
    """What the losses of parts of a batch count in that of the batch: they add up to 1.

    For cross-entropies over targets that are held in tensors it is what they divide by; for any
    other loss, and for datasets that are read example by example, the number of examples.
    """

    def __init__(self, loss: Loss, examples: Examples) -> None:
        self._loss = loss
        # All targets are looked at once. Mostly all of them count alike: then a share is a number
        # of examples, for which no batch's targets have to be read.
        targets = getattr(examples, "targets", None)
        unequal = isinstance(targets, Tensor) and _counts_unequally(loss, targets)
        self._targets: Tensor | None = targets if unequal else None

    def of(self, part: Tensor, batch: Tensor) -> float:
        """part, batch: indices of examples. 0 where nothing in the part counts: see `loss_of`."""
        whole = _counted(self._loss, self._targets[batch]) if self._targets is not None else None
        # A batch of which nothing counts has no mean, whichever rank computes it.
        if self._targets is None or not whole:
            return len(part) / len(batch)
        return (_counted(self._loss, self._targets[part]) or 0.0) / whole


def loss_of(loss: Loss, outputs: Any, targets: Any, share: float) -> Tensor:
    """The loss of a part of a batch; 0, with gradients of 0, where nothing in the part counts.

    There the loss itself would be 0/0.
    """
    if share:
        return loss(outputs, targets)
    # The outputs times 0: backward runs as ever, for the hooks and ranks that wait for it.
    sums = [
        leaf.sum()
        for leaf in tree_leaves(outputs)
        if isinstance(leaf, Tensor) and leaf.requires_grad
    ]
    return 0.0 * torch.stack([each.real if each.is_complex() else each for each in sums]).sum()


def _counts_unequally(loss: Loss, targets: Tensor) -> bool:
    settings = _settings(loss)
    if settings is None or targets.is_floating_point():
        return False
    return settings.get("weight") is not None or bool(
        (targets == settings.get("ignore_index", -100)).any()
    )


@torch.no_grad()
def _counted(loss: Loss, targets: Any) -> float | None:
    """What a cross-entropy divides by; None for any other loss."""
    settings = _settings(loss)
    if settings is None or not isinstance(targets, Tensor) or targets.is_floating_point():
        return None
    # Classes may be smaller integers, which do not index weights.
    targets = targets.long()
    counted = targets[targets != settings.get("ignore_index", -100)]
    weight = settings.get("weight")
    return (
        float(len(counted)) if weight is None else float(weight.to(counted.device)[counted].sum())
    )


def _settings(loss: Loss) -> dict[str, Any] | None:
    """The settings of a cross-entropy that takes the mean; None for any other loss.

    By torch's own names: ignore_index, weight.
    """
    # The type itself: a subclass may compute something else.
    if type(loss) in (nn.CrossEntropyLoss, nn.NLLLoss):
        found = {name: getattr(loss, name) for name in ("ignore_index", "weight", "reduction")}
    elif loss in (F.cross_entropy, F.nll_loss):
        found = {}
    elif isinstance(loss, partial) and loss.func in (F.cross_entropy, F.nll_loss) and not loss.args:
        found = dict(loss.keywords)
    else:
        return None
    # torch's names before "reduction", which still win over it.
    older = found.get("size_average") is not None or found.get("reduce") is not None
    return found if found.get("reduction", "mean") == "mean" and not older else None
