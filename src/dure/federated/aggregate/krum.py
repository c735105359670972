"""Krum and Multi-Krum: the updates that are nearest to their neighbours.

    score(i) = sum over the n - f - 2 nearest j != i of |x_i - x_j|²
    Krum: the update with the lowest score. Multi-Krum: the mean of the m lowest

Withstands f of n >= 2f + 3 broken updates. Krum returns one of its inputs, so the result is as
noisy as a single client; Multi-Krum with m <= n - f - 2 keeps the guarantee, and m = n - f is
common. Ties are broken by value, never by index. Weights n_k play no part.

Cost: m²·d/2 differences for m updates of d parameters; memory: a block and m² distances.

Source: P. Blanchard, E. M. El Mhamdi, R. Guerraoui, J. Stainer, "Machine Learning with Adversaries:
Byzantine Tolerant Gradient Descent", NIPS 2017.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import ClassVar

import torch
from torch import Tensor

from dure.arguments import at_least
from dure.federated.aggregate.aggregator import Collects, still_broken
from dure.federated.aggregate.rows import UpdateRows
from dure.randomness.seeds import RoundSeed


@dataclass(frozen=True)
class Krum(Collects):
    """Krum, and Multi-Krum.

    f: broken updates withstood. m: number of best updates that are averaged; 1 is Krum, more is
    Multi-Krum.
    """

    name: ClassVar[str] = "krum"
    f: int = field(default=1, metadata=at_least(0))
    m: int = field(default=1, metadata=at_least(1))

    def check(self, updates: int) -> None:
        least = max(2 * self.f + 3, self.f + self.m)
        if updates < least:
            raise ValueError(
                f"{self} needs at least {least} updates a round (2f + 3 and f + m), not {updates}"
            )

    def least_contributors(self, updates: int) -> int:
        return min(self.m, updates)

    def combine_finite(
        self, rows: UpdateRows, dropped: int, turn: RoundSeed, state: list[Tensor] | None
    ) -> tuple[list[Tensor], None]:
        order = rows.order(scores(rows.squared_distances(), still_broken(self.f, dropped)))
        # There are fewer than m rows if others were dropped, so the share follows the actual
        # number.
        best = order[: self.m]
        coefficients = torch.zeros(len(rows), dtype=torch.float64)
        coefficients[best] = 1 / len(best)
        return rows.combination(coefficients), None


def scores(squared: Tensor, f: int) -> Tensor:
    """Return the score of each row: the sum of its n - f - 2 smallest squared distances to others.

    squared: shape (n, n). The scores have shape (n,). If n is too small for f, the nearest row
    counts.
    """
    n = len(squared)
    # Infinity on the diagonal: no row is a neighbour of itself.
    others = squared.masked_fill(torch.eye(n, dtype=torch.bool), float("inf")).sort(1).values
    return others[:, : min(max(n - f - 2, 1), n - 1)].sum(1)
