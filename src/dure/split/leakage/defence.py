"""Interface of a defence: a frozen dataclass with a single parameter, applied to outgoing values.

    gradients      of the party that has the labels, example by example, before they are sent
    activations    an additional term of the head's loss, so that its output reveals less
    labels         replaced at random once, before training

Gradients and values are matrices here, a row per example (`dure.split.leakage.rows`). A defence is
a pure function; the function returns its state from batch to batch.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor

from dure.arguments import NamedSettings
from dure.data.examples import Examples
from dure.settings import write

Memory = Mapping[str, Any] | None
"""State of a defence for a party: tensors and numbers by name, or None."""


@dataclass(frozen=True)
class Defence(NamedSettings):
    """Base class of defences: a name, a text form, and three methods, one of which has an effect.

    guards: the values that the defence changes.
    """

    guards: ClassVar[Literal["nothing", "gradients", "activations", "labels"]] = "nothing"

    def check(self, examples: Examples, labels_stay: bool) -> None:
        """Raise ValueError if the defence has no effect, or cannot be used.

        labels_stay: whether the end of the model is at the clients (two cuts).
        """
        if self.guards == "gradients" and not labels_stay:
            raise ValueError(
                f"{self} protects labels that stay with the clients, but with one cut the labels "
                "are sent to the server: cut twice, or randomise the labels "
                "(randomised-response:1)"
            )

    def gradients(
        self, rows: Tensor, positive: Tensor | None, draws: torch.Generator, memory: Memory
    ) -> tuple[Tensor, Memory]:
        """Return the protected gradients and the new state.

        rows: of shape (n, d). positive: whether each example has the label 1, of shape (n,); None
        if labels are not 0 and 1. draws: generator of the noise, on the CPU. memory: the state
        after the batch before.
        """
        return rows, memory

    def activations(self, inputs: Tensor, values: Tensor) -> Tensor:
        """Return the gradient of the additional loss term with respect to the values.

        inputs: of shape (n, d_in). values: output of the head, of shape (n, d).
        """
        return torch.zeros_like(values)

    def labels(self, labels: Tensor, classes: int, draws: torch.Generator) -> Tensor:
        """Return the labels for the training, int64 of shape (n,)."""
        return labels

    def __str__(self) -> str:
        """Return the text that `parse_defence` parses."""
        return write(self)


@dataclass(frozen=True)
class NoDefence(Defence):
    """No defence: values are sent unchanged."""

    name: ClassVar[str] = "none"


def binary(targets: Any) -> Tensor | None:
    """Return whether each target is 1, of shape (n,); None unless all are 0 or 1.

    targets: class indices of shape (n,), or numbers of shape (n,) or (n, 1), as losses of a single
    output take them.
    """
    if not isinstance(targets, Tensor) or targets.ndim == 0 or targets.numel() != len(targets):
        return None
    flat = targets.reshape(-1)
    return flat == 1 if bool(((flat == 0) | (flat == 1)).all()) else None


def class_labels(examples: Examples) -> Tensor | None:
    """Return a class label per example, int64 of shape (n,), also for float 0 and 1; or None."""
    labels = examples.labels()
    if labels is None:
        positive = binary(getattr(examples, "targets", None))
        return None if positive is None else positive.long()
    return labels


def count_classes(examples: Examples, labels: Tensor) -> int:
    """Return the number of classes, from the classes' names and the largest label."""
    named = len(examples.classes or ())
    return max(named, int(labels.max()) + 1)
