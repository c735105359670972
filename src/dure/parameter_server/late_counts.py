"""Loss count of a whole batch, for a worker that has computed only a part of it.

A push that makes a step by itself is weighed by the part's share of the loss count in its batch,
before other parts are computed (`gradients`). torch's losses give the count from targets. For other
losses the worker computes the loss of the other parts' targets as well, without the model: the
count depends on targets, so the worker's own outputs replace the missing outputs.

If the loss returns no pair (sum, count), and ignores no target of the worker's own part, all
examples count equally, and no other targets are read.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_map

from dure.tasks.loss_shares import CountedLoss


class LateCounts:
    """Loss counts of batches, from the targets and outputs of the last computed part."""

    def __init__(self, losses: CountedLoss, read: Callable[[Tensor], tuple[Any, Any]]) -> None:
        self._losses = losses
        self._read = read
        self._targets: Any = None
        self._outputs: Any = None
        self._count = 0

    def read(self, indices: Tensor) -> tuple[Any, Any]:
        """Return inputs and targets of examples, and store the targets."""
        inputs, targets = self._read(indices)
        self._targets = targets
        self._count = len(indices)
        return inputs, targets

    def forward(self, model: Callable[[Any], Any], inputs: Any) -> Any:
        """Return the outputs of a model, and store them."""
        outputs = model(inputs)
        self._outputs = tree_map(_detached, outputs)
        return outputs

    def in_batch(self, part: Tensor, counted: float, batch: Tensor) -> float:
        """Return the count of a batch, given the count of `part`, which was computed last."""
        outputs, self._outputs = self._outputs, None
        if not self._losses.counts_unlike(self._targets):
            return counted * len(batch) / len(part)
        rest = batch[~torch.isin(batch, part)]
        size = self._count
        for indices in torch.split(rest, size):
            _, targets = self._read(indices)
            stand_in = tree_map(partial(_first, count=len(indices), of=size), outputs)
            counted += self._losses.count(stand_in, targets, len(indices))
        return counted


def _detached(leaf: Any) -> Any:
    return leaf.detach() if isinstance(leaf, Tensor) else leaf


def _first(leaf: Any, count: int, of: int) -> Any:
    """Return the outputs of the first `count` of `of` examples."""
    if not isinstance(leaf, Tensor) or not leaf.dim() or len(leaf) % of:
        return leaf
    return leaf[: len(leaf) // of * count]
