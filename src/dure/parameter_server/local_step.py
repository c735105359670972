"""Steps that a replica of Downpour SGD makes on its own weights, between two fetches.

    w <- w - alpha·factor(t)·g       on the keys that the task's optimizer trains

alpha is by default the learning rate of the task's optimizer for these keys, and factor the value
of the task's schedule at the replica's own step t.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from torch import Tensor

from dure.parameter_server.keys import KeyRange
from dure.parameter_server.optimizer import OptimizerRecipe


@dataclass(frozen=True)
class LocalStep:
    """Local SGD step of a replica.

    Args:
        recipe: recipe of the task's optimizer.
        keys: keys of each portion.
        alpha: learning rate; None takes the optimizer's.
        schedule: factor of the learning rate by step; None is 1.
    """

    recipe: OptimizerRecipe
    keys: Sequence[KeyRange]
    alpha: float | None
    schedule: Callable[[int], float] | None

    def __call__(self, weights: Sequence[Tensor], gradients: Sequence[Tensor], step: int) -> None:
        """Move the weights against the gradients in place, by portion."""
        factor = 1.0 if self.schedule is None else self.schedule(step)
        for keys, own, gradient in zip(self.keys, weights, gradients, strict=True):
            for span in self.recipe.pieces(keys.vector, keys.start, keys.stop):
                group = self.recipe.groups[span.group]
                rate = group["lr"] if self.alpha is None else self.alpha
                sign = -1 if group.get("maximize") else 1
                piece = slice(span.start - keys.start, span.stop - keys.start)
                own[piece].sub_(gradient[piece], alpha=sign * rate * factor)
