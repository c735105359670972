"""By how much a batch's loss counts among those of others, when a mean over all of them is reported.

A loss is the mean over its batch. For most, that is over the examples. Cross-entropy takes it over the targets that it
does not ignore, each with the weight of its class, so a batch of which half is ignored counts half as much, and one of
which all is ignored, whose loss is 0/0, not at all.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

Loss = Callable[[Any, Any], Tensor]


def loss_and_count(loss: Loss, outputs: Any, targets: Any, examples: int) -> tuple[float, float]:
    """(sum, count) of a batch's loss: its mean is the one over the other."""
    count = _counted(loss, targets)
    if count is None:
        return float(loss(outputs, targets)) * examples, float(examples)
    return (float(loss(outputs, targets)) * count if count else 0.0), count


@torch.no_grad()
def _counted(loss: Loss, targets: Any) -> float | None:
    """What a cross-entropy divides by; None for any other loss."""
    settings = _settings(loss)
    if settings is None or not isinstance(targets, Tensor) or targets.is_floating_point():
        return None
    targets = targets.long()
    counted = targets[targets != settings.get("ignore_index", -100)]
    weight = settings.get("weight")
    return float(len(counted)) if weight is None else float(weight.to(counted.device)[counted].sum())


def _settings(loss: Loss) -> dict[str, Any] | None:
    """The settings of a cross-entropy that takes the mean, as torch has them; None for any other loss."""
    if type(loss) in (nn.CrossEntropyLoss, nn.NLLLoss):
        found = {name: getattr(loss, name) for name in ("ignore_index", "weight", "reduction")}
    elif loss in (F.cross_entropy, F.nll_loss):
        found = {}
    elif isinstance(loss, partial) and loss.func in (F.cross_entropy, F.nll_loss) and not loss.args:
        found = dict(loss.keywords)
    else:
        return None
    older = found.get("size_average") is not None or found.get("reduce") is not None
    return found if found.get("reduction", "mean") == "mean" and not older else None
