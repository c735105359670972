"""Counts of the loss in a batch and in its parts: the rule of all systems.

    loss of a batch   = sum over all counted targets / count
    loss of the batch = sum over its parts of (count of the part / count of the batch) · their loss

So the results of ranks, micro-batches or clients add up to the result of one worker on the joint
batch. A part that counts nothing, whose loss would be 0/0, adds nothing.

Sources of the count:

    (sum, count)   the loss itself, if it returns such a pair; known after its computation
    torch's own    cross-entropies, from the targets (`dure.tasks.known_losses`); known before,
                   if the targets are tensors in memory
    any other      the number of examples

If the count is known only after the computation, on other ranks too, parts have to run backward
before the count of the batch is known. Until then E stands in for it, the number of examples, which
all ranks know:

    parts: gradients of sum / E, and their count;      in the end: · E / (the count of all parts)
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

from dure.contracts.task import Loss
from dure.data.examples import Examples
from dure.tasks.known_losses import cross_entropy_of, torch_loss


def loss_and_count(loss: Loss, outputs: Any, targets: Any, examples: int) -> tuple[float, float]:
    """Return (sum, count) of a batch's loss, whose quotient is its mean.

    Raises ValueError for a pair that is no sum with its count.
    """
    known = cross_entropy_of(loss)
    count = float(examples)
    if known is not None and _are_classes(targets):
        count = known.count(targets)
    if not count:
        return 0.0, 0.0
    value = loss(outputs, targets)
    if isinstance(value, tuple):
        total, count = _pair(value)
        return float(total.item()), count
    return float(value) * count, count


def tensor_of(loss: Any) -> Tensor:
    """Return the tensor for backward: the loss, or the sum of (sum, count)."""
    found: Tensor = loss[0] if isinstance(loss, tuple) else loss
    return found


def most_counted(loss: Loss, examples: Examples) -> float:
    """Return the largest count of an example; inf if only the loss itself knows."""
    if torch_loss(loss) is None:
        return math.inf
    known = cross_entropy_of(loss)
    targets = getattr(examples, "targets", None)
    if not isinstance(targets, Tensor):
        return math.inf
    if known is None or not _are_classes(targets):
        return 1.0
    largest = 1.0 if known.weight is None else float(known.weight.max())
    return float(targets[:1].numel()) * largest


class ComputedLoss(NamedTuple):
    """The loss of a batch, or the contribution of a part, with its count.

    loss: a scalar tensor with its graph; 0, with gradients of 0, if the count is 0.
    """

    loss: Tensor
    counted: float


class LossShare(NamedTuple):
    """The count of a part of a batch.

    counted: of the part; None if known only after the computation. of: of the batch, or its
    stand-in.
    """

    counted: float | None
    of: float


NOTHING = LossShare(0.0, 1.0)
"""Share of a part that counts nothing: computed only because other ranks wait for it."""


class CountedLoss:
    """The loss of a task, with counts over its training examples.

    examples: None if they are on other machines; each batch then reports its count.
    """

    def __init__(self, loss: Loss, examples: Examples | None) -> None:
        self.loss = loss
        self._known = cross_entropy_of(loss)
        targets = getattr(examples, "targets", None)
        # All targets are checked once. Usually all count alike: then a count is a number of
        # examples, and the targets of a batch need not be read.
        self._each = 1.0
        self._targets: Tensor | None = None
        if self._known is not None and isinstance(targets, Tensor) and _are_classes(targets):
            self._each = float(targets[:1].numel())
            self._targets = None if self._known.counts_alike(targets) else targets
        unread = self._known is not None and not isinstance(targets, Tensor)
        self.is_late = unread or torch_loss(loss) is None
        """Whether the count of a batch is known only after the computation."""
        self.is_alike = not self.is_late and self._targets is None
        """Whether all examples count alike."""
        self.gives_pairs = False
        """Whether the loss has returned a pair (sum, count)."""

    def expected(self, batch: Tensor) -> float:
        """Return the count of a batch, or its stand-in if the loss `is_late`.

        batch: indices of its examples.
        """
        if self._targets is None or self._known is None:
            return len(batch) * self._each
        return self._known.count(self._targets.index_select(0, batch))

    def share(self, part: Tensor, batch: Tensor) -> LossShare:
        """Return the share of a part in its batch. part, batch: indices of examples."""
        return LossShare(None if self.is_late else self.expected(part), self.expected(batch))

    def mean(
        self, outputs: Any, targets: Any, examples: int, count: float | None = None
    ) -> ComputedLoss:
        """Return the loss of a batch of `examples` examples, with its count.

        count: the count, if it is known already. Raises ValueError for a pair that is no sum with
        its count.
        """
        if count is None:
            count = self._count(targets, examples)
        if count:
            value = self.loss(outputs, targets)
            if not isinstance(value, tuple):
                return ComputedLoss(value, count)
            self.gives_pairs = True
            total, count = _pair(value)
            if count:
                return ComputedLoss(total / count, count)
        return ComputedLoss(zero_loss(outputs), 0.0)

    def counts_unlike(self, targets: Any) -> bool:
        """Return whether these targets, of a loss that `is_late`, may count unlike others."""
        known = self._known
        alike = known is None or not _are_classes(targets) or known.counts_alike(targets)
        return self.gives_pairs or not alike

    @torch.no_grad()
    def count(self, outputs: Any, targets: Any, examples: int) -> float:
        """Return the loss's count of targets. outputs: of any model, for losses that need them."""
        return self.mean(outputs, targets, examples).counted

    def part(self, outputs: Any, targets: Any, examples: int, share: LossShare) -> ComputedLoss:
        """Return the contribution of a part of so many examples to its batch's loss and count."""
        found = self.mean(outputs, targets, examples, share.counted)
        if not found.counted:
            return found
        weight = found.counted / share.of
        # Without the product if it changes nothing: the graph, and so the bits, of one worker.
        return found if weight == 1.0 else ComputedLoss(found.loss * weight, found.counted)

    def settle(
        self, loss: float, batch: Tensor, counted: float, gradients: Iterable[Tensor]
    ) -> float | None:
        """Return the loss of a batch whose parts have added up to `loss`; None if the count is 0.

        counted: count of all parts; used only if the loss `is_late`. gradients: sums over the
        parts; rescaled in place to the gradients of the batch's loss.
        """
        expected = self.expected(batch)
        count = counted if self.is_late else expected
        scale = scale_of(expected, count)
        rescale(gradients, scale)
        return loss * scale if count else None

    def _count(self, targets: Any, examples: int) -> float:
        if self._known is None or self.is_alike or not _are_classes(targets):
            return examples * self._each
        return self._known.count(targets)


def mean_over(total: float, count: float) -> float | None:
    """Return the mean; None for a count of 0."""
    return total / count if count else None


def scale_of(expected: float, count: float) -> float:
    """Return the factor for gradients and losses of parts, once the count of all is known.

    expected: stand-in for the count. The factor is 1 if the count is 0: then all of them are 0.
    """
    return expected / count if count else 1.0


@torch.no_grad()
def rescale(gradients: Iterable[Tensor], scale: float) -> None:
    """Multiply gradients in place, unless the scale is 1."""
    if scale != 1.0:
        for gradient in gradients:
            gradient.mul_(scale)


def zero_loss(outputs: Any) -> Tensor:
    """Return 0 with gradients of 0: backward runs as usual, for hooks and waiting ranks."""
    leaves = [leaf for leaf in tree_leaves(outputs) if isinstance(leaf, Tensor)]
    # Sums of no elements, and not of elements times 0: 0 · inf is NaN.
    none = [leaf.reshape(-1)[:0].sum() for leaf in leaves if leaf.requires_grad]
    if not none:
        return torch.zeros(())
    total: Tensor = sum(one.real if one.is_complex() else one for one in none)  # type: ignore[assignment]
    return total


def _are_classes(targets: Any) -> bool:
    """Return whether targets are class indices, and not probabilities of classes."""
    return isinstance(targets, Tensor) and not targets.is_floating_point()


def _pair(value: tuple[Any, ...]) -> tuple[Tensor, float]:
    """Return a loss's (sum, count). Raises ValueError for anything else."""
    wanted = "a loss has to be the mean over its batch, or a pair (sum, count) of two numbers"
    if len(value) != 2:
        raise ValueError(f"the loss returned {len(value)} values, but {wanted}")
    total, count = value
    if not isinstance(total, Tensor) or total.numel() != 1:
        raise ValueError(f"the loss returned a sum that is not a scalar tensor, but {wanted}")
    if isinstance(count, Tensor) and count.numel() != 1:
        raise ValueError(f"the loss returned a count of shape {list(count.shape)}, but {wanted}")
    number = float(count)
    if not (math.isfinite(number) and number >= 0):
        raise ValueError(f"the loss returned the count {number}, but it has to be 0 or more")
    return total, number
