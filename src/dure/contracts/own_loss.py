"""Models that compute their own loss, as those of Hugging Face do.

    model(**inputs).loss       inputs is a dict with the column labels; a mean

The mean has to be put together where ranks, micro-batches or clients compute parts of a batch, so
it is said what it is a mean over:

    examples       one label an example: classification, regression
    tokens         labels that are not -100: masked language models, sequence to sequence
    next-tokens    the same without the first of each row, which nothing predicts: causal models

The model's names and its forward stay as they are; a hook hands a dict on as arguments by name.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal, get_args

from torch import Tensor, nn

Counts = Literal["examples", "tokens", "next-tokens"]

IGNORED = -100
"""The label that Hugging Face's losses leave out."""


@dataclass(frozen=True)
class OwnLoss:
    """The loss that the model itself gives. counts: what that is a mean over.

    Raises ValueError for another `counts`, and, when it is called, for outputs without a loss.
    """

    counts: Counts = "examples"

    def __post_init__(self) -> None:
        if self.counts not in get_args(Counts):
            raise ValueError(
                f"OwnLoss(counts={self.counts!r}): give one of {', '.join(get_args(Counts))}"
            )

    def __call__(self, outputs: Any, targets: Any) -> tuple[Tensor, Tensor | float]:
        loss = outputs.get("loss") if isinstance(outputs, Mapping) else outputs
        if not isinstance(loss, Tensor) or loss.numel() != 1:
            raise ValueError(
                "Task(loss=None) takes the loss that the model gives, and it gave none: its output "
                "needs `loss`, a number, and its inputs the column labels"
            )
        count = self.count(targets)
        # 0/0 where nothing counts: the graph of a sum of nothing.
        return (loss if count else loss.nan_to_num()) * count, count

    def count(self, labels: Any) -> float:
        """What a batch counts. Raises ValueError for labels that this says too little of."""
        if not isinstance(labels, Tensor):
            raise ValueError("Task(loss=None) needs labels that are one tensor")
        if self.counts == "examples":
            if labels.ndim > 1 and not labels.is_floating_point():
                raise ValueError(
                    f"labels have the shape {list(labels.shape)}: say what the model's loss is a "
                    f"mean over, loss=dure.OwnLoss('next-tokens') for causal language models, or "
                    f"'tokens'"
                )
            return float(len(labels))
        counted = labels[..., 1:] if self.counts == "next-tokens" else labels
        return float((counted != IGNORED).sum())


@dataclass(frozen=True)
class CalledByName:
    """A factory of models that are called with the columns of a dict as arguments."""

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
