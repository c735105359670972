"""What a defence is: a frozen dataclass with one knob, and what it does to what leaves a party.

    gradients      those of the party that has the labels, example by example, before they leave it
    activations    what the head's loss has besides, so that what leaves the head tells less
    labels         labels that are spoilt once, before anybody trains with them

Gradients and values are matrices here, a row an example (`dure.split.leakage.rows`). A defence is a
pure function of what it is given; what it remembers from batch to batch it returns.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor

from dure.arguments import Told
from dure.data.examples import Examples
from dure.settings import write

Memory = Mapping[str, Any] | None
"""What a defence remembers of a party's batches: tensors and numbers by name, or nothing."""


@dataclass(frozen=True)
class Defence(Told):
    """What all have in common: a name, a text form, and one method of three that does something.

    guards: what leaves a party changed.
    """

    name: ClassVar[str]
    guards: ClassVar[Literal["nothing", "gradients", "activations", "labels"]] = "nothing"

    def check(self, examples: Examples, labels_stay: bool) -> None:
        """Raises ValueError where the defence guards nothing, or cannot.

        labels_stay: whether the end of the model is with the clients, as is so after two cuts.
        """
        if self.guards == "gradients" and not labels_stay:
            raise ValueError(
                f"{self} guards gradients of those who keep their labels, but with one cut the "
                f"labels themselves go to the server: cut twice, or randomise the labels "
                f"(randomised-response:1)"
            )

    def gradients(
        self, rows: Tensor, positive: Tensor | None, draws: torch.Generator, memory: Memory
    ) -> tuple[Tensor, Memory]:
        """(the gradients as they leave, what is to be remembered).

        rows: of shape (n, d). positive: which examples have the label 1, of shape (n,); None where
        labels are not 0 and 1. draws: from where noise is drawn.
        """
        return rows, memory

    def activations(self, inputs: Tensor, values: Tensor) -> Tensor:
        """The gradient, by the values, of what the head's loss has besides.

        inputs: of shape (n, d_in). values: of shape (n, d), what leaves the head.
        """
        return torch.zeros_like(values)

    def labels(self, labels: Tensor, classes: int, draws: torch.Generator) -> Tensor:
        """The labels with which everybody trains, int64 of shape (n,)."""
        return labels

    def __str__(self) -> str:
        """The text that `parse_defence` reads."""
        return write(self)


@dataclass(frozen=True)
class NoDefence(Defence):
    """Everything leaves as it is."""

    name: ClassVar[str] = "none"


def check_knob(value: float, what: str, zero: bool = False) -> None:
    """Raises ValueError unless `value` is a positive number, or, where that is allowed, 0."""
    if not math.isfinite(value) or value < 0 or (value == 0 and not zero):
        least = "0 or more" if zero else "a positive number"
        raise ValueError(f"{what} is {least}, not {value}")


def binary(targets: Any) -> Tensor | None:
    """Which targets are 1, of shape (n,), where all are 0 or 1; else None.

    targets: class indices of shape (n,), or numbers of shape (n,) or (n, 1), as losses of one
    output take them.
    """
    if not isinstance(targets, Tensor) or targets.ndim == 0 or targets.numel() != len(targets):
        return None
    flat = targets.reshape(-1)
    return flat == 1 if bool(((flat == 0) | (flat == 1)).all()) else None


def class_labels(examples: Examples) -> Tensor | None:
    """One class label an example, int64 of shape (n,), also where 0 and 1 are written as floats."""
    labels = examples.labels()
    if labels is None:
        positive = binary(getattr(examples, "targets", None))
        return None if positive is None else positive.long()
    return labels


def count_classes(examples: Examples, labels: Tensor) -> int:
    """How many classes there are: the names that examples have, or the largest label."""
    named = len(examples.classes or ())
    return max(named, int(labels.max()) + 1)
