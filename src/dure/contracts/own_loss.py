"""Models that compute their own loss, such as Hugging Face's.

    model(**inputs).loss       inputs is a dict with the column labels; a mean

The mean over a batch whose parts are computed by ranks, micro-batches or clients has to be combined
from the parts, so the terms of the mean are declared:

    examples       one label an example: classification, regression
    tokens         labels that are not -100: masked language models, sequence to sequence
    next-tokens    the same without the first of each row, which is not predicted: causal models

The model's names and its forward stay unchanged; a hook passes a dict as keyword arguments.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal, get_args

from torch import Tensor, nn

Counts = Literal["examples", "tokens", "next-tokens"]

IGNORED = -100
"""Label that Hugging Face's losses ignore."""


@dataclass(frozen=True)
class OwnLoss:
    """Loss that the model itself computes. counts: the terms over which the loss is a mean.

    Raises ValueError for another `counts`, and, when called, for outputs without a loss.
    """

    counts: Counts = "examples"

    def __post_init__(self) -> None:
        if self.counts not in get_args(Counts):
            raise ValueError(
                f"OwnLoss(counts={self.counts!r}): choose one of {', '.join(get_args(Counts))}"
            )

    def __call__(self, outputs: Any, targets: Any) -> tuple[Tensor, Tensor | float]:
        loss = outputs.get("loss") if isinstance(outputs, Mapping) else outputs
        if not isinstance(loss, Tensor) or loss.numel() != 1:
            raise ValueError(
                "Task(loss=None) uses the loss that the model returns, but it returned none: its "
                "output needs `loss`, a number, and its inputs need the column labels"
            )
        count = self.count(targets)
        # The mean over no terms is 0/0 = NaN: nan_to_num gives a sum of 0 and keeps the graph.
        return (loss if count else loss.nan_to_num()) * count, count

    def count(self, labels: Any) -> float:
        """Return the number of terms in a batch.

        Raises ValueError for labels that need another `counts`.
        """
        if not isinstance(labels, Tensor):
            raise ValueError("Task(loss=None) needs labels in a single tensor")
        if self.counts == "examples":
            if labels.ndim > 1 and not labels.is_floating_point():
                raise ValueError(
                    f"labels have the shape {list(labels.shape)}: set what the model's loss is "
                    "averaged over: loss=dure.OwnLoss('next-tokens') for causal language models, "
                    "or 'tokens'"
                )
            return float(len(labels))
        counted = labels[..., 1:] if self.counts == "next-tokens" else labels
        return float((counted != IGNORED).sum())


@dataclass(frozen=True)
class KeywordModelFactory:
    """Factory of models that are called with the columns of a dict as keyword arguments."""

    factory: Callable[[], nn.Module]

    def __call__(self) -> nn.Module:
        model = self.factory()
        if isinstance(model, nn.Module):
            model.register_forward_pre_hook(_by_name, with_kwargs=True)
        return model


def _by_name(
    model: nn.Module, given: tuple[Any, ...], named: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    if len(given) == 1 and isinstance(given[0], Mapping) and not named:
        return (), dict(given[0])
    return given, named
