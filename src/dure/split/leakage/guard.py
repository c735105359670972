"""Application of a defence at a party: tensors in, tensors out, as they cross the cut.

sent        the output of the head, before it is sent
returned    the gradients that come back for it, plus those of the head's additional loss term
gradients   the outgoing gradients of the party that has the labels, protected
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from dure.split.leakage.defence import Defence, Memory, binary
from dure.split.leakage.rows import as_rows, from_rows, numbers_of


class CutValue(NamedTuple):
    """Properties of a value that crosses a cut.

    dim: the dimension that counts examples; None if there is none. differentiable: whether a
    gradient comes back for the value.
    """

    dim: int | None
    differentiable: bool


class Guard:
    """Application of a defence at a party.

    leaving, arriving: the values that cross the first cut, and the last cut, in order. draws:
    returns the generator of the noise for a step.
    """

    def __init__(
        self,
        defence: Defence,
        leaving: Sequence[CutValue],
        arriving: Sequence[CutValue],
        draws: Callable[[int], torch.Generator],
    ) -> None:
        self.defence = defence
        self.draws = draws
        self.memory: Memory = None
        """State of the defence, part of the party's state."""
        self._leaving = [one.differentiable for one in leaving]
        self._leaving_dims = _dims(leaving)
        self._arriving_dims = _dims(arriving)
        self._sent: tuple[Tensor | None, list[Tensor]] | None = None

    @property
    def adds(self) -> bool:
        """Whether the head's loss has an additional term, so that all weights of the head learn."""
        return self.defence.guards == "activations"

    def gradients(self, gradients: Sequence[Tensor], targets: Any, step: int) -> list[Tensor]:
        """Return the protected gradients of a batch, to be sent by the party with the targets."""
        if self.defence.guards != "gradients" or not gradients:
            return list(gradients)
        rows = as_rows(gradients, self._arriving_dims)
        protected, self.memory = self.defence.gradients(
            rows, binary(targets), self.draws(step), self.memory
        )
        return from_rows(protected, gradients, self._arriving_dims)

    def sent(self, inputs: Sequence[Any], values: Sequence[Tensor]) -> None:
        """Record the output of the head. inputs: the leaves of the model's inputs."""
        if self.adds:
            pairs = zip(values, self._leaving, strict=True)
            self._sent = numbers_of(inputs), [value for value, learns in pairs if learns]

    def returned(self, gradients: Sequence[Tensor], share: float) -> list[Tensor]:
        """Return the gradients for the head's backward pass.

        share: the party's share of the joint batch, by which incoming gradients are scaled.

        Raises ValueError for inputs that are not numeric if the defence measures them.
        """
        sent = self._sent
        self._sent = None
        if sent is None or not gradients:
            return list(gradients)
        inputs, values = sent
        if inputs is None:
            raise ValueError(f"{self.defence} needs floating-point inputs")
        term = self.defence.activations(inputs, as_rows(values, self._leaving_dims))
        parts = from_rows(term, gradients, self._leaving_dims)
        return [given + share * part for given, part in zip(gradients, parts, strict=True)]


def _dims(values: Sequence[CutValue]) -> list[int]:
    """Return the example dimensions of the values for which gradients come back.

    Raises ValueError for a value that belongs to a whole batch.
    """
    found: list[int] = []
    for value in values:
        if not value.differentiable:
            continue
        if value.dim is None:
            raise ValueError(
                "a value at the cut belongs to a whole batch, but the defence needs one per "
                "example: cut the model elsewhere, or leave the defence out"
            )
        found.append(value.dim)
    return found
