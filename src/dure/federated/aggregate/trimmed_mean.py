"""The trimmed mean of each coordinate, without floor(beta·m) values at each end.

Withstands f = floor(beta·m) broken updates of m: each remaining value is between honest values.
beta has to be at least the share of broken updates, and below 1/2; with beta = 0 the rule is the
mean with equal weights.

Cost: about m·(log2 m)²/2 minima and maxima per coordinate, in the dtype of the updates; memory: a
block.

Source: D. Yin, Y. Chen, K. Ramchandran, P. Bartlett, "Byzantine-Robust Distributed Learning:
Towards Optimal Statistical Rates", ICML 2018.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import ClassVar

import torch
from torch import Tensor

from dure.arguments import between
from dure.federated.aggregate.aggregator import Collects, still_broken
from dure.federated.aggregate.rows import UpdateRows
from dure.federated.aggregate.sorting_network import sorted_rows
from dure.randomness.seeds import RoundSeed


@dataclass(frozen=True)
class TrimmedMean(Collects):
    """The mean of each coordinate, without floor(beta·m) values at each end. beta in [0, 1/2)."""

    name: ClassVar[str] = "trimmed-mean"
    beta: float = field(default=0.1, metadata=between(0, 0.5, "[)"))

    def trimmed(self, updates: int) -> int:
        """Return the number of values that are left out at each end."""
        return math.floor(self.beta * updates + 1e-9)  # 0.29·100 is 28.999999999999996

    def combine_finite(
        self, rows: UpdateRows, dropped: int, turn: RoundSeed, state: list[Tensor] | None
    ) -> tuple[list[Tensor], None]:
        # beta is a share of all updates that were sent; dropped updates count as trimmed already.
        cut = still_broken(self.trimmed(len(rows) + dropped), dropped)

        def function(values: Tensor) -> Tensor:
            kept = sorted_rows(values)[cut : len(rows) - cut]
            total = torch.zeros_like(kept[0], dtype=torch.float64)
            # Row by row in float64: the sum needs no copy of all rows in that precision.
            for row in kept:
                total += row
            return total / len(kept)

        return rows.map(function, own_dtype=True), None
