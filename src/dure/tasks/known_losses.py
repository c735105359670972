"""Denominators of torch's own losses, known without calling them.

Most take the mean over all elements, so that every example counts alike. Cross-entropy takes the
mean over the targets that are not ignored, each with the weight of its class:

    loss = sum over targets of weight · loss of the target / sum of their weights

A loss is torch's own if it is a function of `torch.nn.functional`, a torch module without hooks or
overrides (or a subclass that only changes its construction), or a `functools.partial` of those with
keywords alone. Every other loss is the user's, and reports its count itself
(`dure.contracts.task.Loss`).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import _reduction as older
from torch.nn import functional as F

IGNORED = -100
"""Target that torch's cross-entropies ignore by default."""

_CROSS_ENTROPIES: Mapping[Any, bool] = {
    F.cross_entropy: True,
    nn.CrossEntropyLoss: True,
    F.nll_loss: False,
    nn.NLLLoss: False,
}
"""Losses that may count targets unequally, and whether they take scores, not log-probabilities."""


@dataclass(frozen=True)
class CrossEntropy:
    """A torch cross-entropy with the reduction mean.

    of_scores: whether it takes scores, not log-probabilities. weight: weight of each class.
    """

    of_scores: bool
    ignore_index: int = IGNORED
    weight: Tensor | None = None
    label_smoothing: float = 0.0

    @torch.no_grad()
    def count(self, targets: Tensor) -> float:
        """Return the denominator for targets that are class indices."""
        # Classes may be smaller integers, which cannot index weights.
        targets = targets.long()
        counted = targets != self.ignore_index
        if self.weight is None:
            return float(counted.sum())
        return float(self.weight.to(targets.device)[targets[counted]].sum())

    @torch.no_grad()
    def counts_alike(self, targets: Tensor) -> bool:
        """Return whether the denominator is the number of targets in any batch of these targets."""
        return self.weight is None and not bool((targets == self.ignore_index).any())


def torch_loss(loss: Any) -> tuple[Any, Mapping[str, Any]] | None:
    """Return (torch's function or class, its settings); None for a user's own loss."""
    if isinstance(loss, partial):
        # Positional arguments are no settings; and modules have settings, and take no others.
        if loss.args or (isinstance(loss.func, nn.Module) and loss.keywords):
            return None
        found = torch_loss(loss.func)
        return None if found is None else (found[0], {**found[1], **loss.keywords})
    if isinstance(loss, nn.Module):
        return _torch_module(loss)
    name = getattr(loss, "__name__", None)
    known = isinstance(name, str) and getattr(F, name, None) is loss
    return (loss, {}) if known else None


def _torch_module(loss: nn.Module) -> tuple[Any, Mapping[str, Any]] | None:
    kinds: list[Any] = [
        kind for kind in type(loss).__mro__ if kind.__module__ == "torch.nn.modules.loss"
    ]
    overrides = (
        "forward" in vars(loss)
        or type(loss).__call__ is not nn.Module.__call__
        or not kinds
        or type(loss).forward is not kinds[0].forward
    )
    # A hook may return another loss than the computed one.
    if overrides or loss._forward_hooks or loss._forward_pre_hooks:
        return None
    names = ("reduction", "ignore_index", "weight", "label_smoothing")
    return kinds[0], {name: getattr(loss, name) for name in names if hasattr(loss, name)}


def reduction_of(settings: Mapping[str, Any]) -> str:
    """Return the reduction of a torch loss with these settings: mean, sum or none."""
    size_average = settings.get("size_average")
    reduce = settings.get("reduce")
    if size_average is None and reduce is None:
        return str(settings.get("reduction", "mean"))
    # torch's arguments before "reduction", which still take precedence.
    return older.legacy_get_string(size_average, reduce, emit_warning=False)


def cross_entropy_of(loss: Any) -> CrossEntropy | None:
    """Return the settings of a torch cross-entropy with the reduction mean; None otherwise."""
    found = torch_loss(loss)
    if found is None or found[0] not in _CROSS_ENTROPIES or reduction_of(found[1]) != "mean":
        return None
    kind, settings = found
    return CrossEntropy(
        _CROSS_ENTROPIES[kind],
        settings.get("ignore_index", IGNORED),
        settings.get("weight"),
        settings.get("label_smoothing", 0.0),
    )


def name_of(loss: Any) -> str:
    """Return the name of a loss for messages."""
    function = loss.func if isinstance(loss, partial) else loss
    return str(getattr(function, "__name__", type(function).__name__))
