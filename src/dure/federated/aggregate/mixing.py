"""Nearest-neighbour mixing: each update becomes the mean of its n - f nearest updates.

    y_i = mean of the n - f updates nearest to x_i, with itself;   the result is `inner`(y_1 .. y_n)

Honest updates that differ because their data differ come closer together, while a broken update
gains nothing: with mixing, `median`, `krum`, `trimmed-mean` and `geometric-median` reach the best
possible error under heterogeneity. `inner` has to withstand f. Ties are broken by value. Within the
means all updates weigh the same.

Cost: m²·d/2 differences, and m²·d operations for each pass of `inner`; memory: as `inner`, and m²
distances.

Source: Y. Allouah, S. Farhadkhani, R. Guerraoui, N. Gupta, R. Pinot, J. Stephan, "Fixing by Mixing:
A Recipe for Optimal Byzantine ML under Heterogeneity", AISTATS 2023.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import ClassVar

import torch
from torch import Tensor

from dure.arguments import at_least
from dure.federated.aggregate.aggregator import Aggregator, Collects, still_broken
from dure.federated.aggregate.rows import UpdateRows
from dure.federated.aggregate.wrapping import MEDIAN, combine_inner
from dure.randomness.seeds import RoundSeed


@dataclass(frozen=True)
class Mixing(Collects):
    """Another aggregator, applied to the means of nearest neighbours.

    f: broken updates withstood, less than half. inner: the aggregator of the means.
    """

    name: ClassVar[str] = "mixing"
    wraps: ClassVar[bool] = True
    f: int = field(default=1, metadata=at_least(0))
    inner: Aggregator = MEDIAN

    def check(self, updates: int) -> None:
        if updates < 2 * self.f + 1:
            raise ValueError(
                f"{self} needs at least {2 * self.f + 1} updates a round (2f + 1), not {updates}"
            )
        self.inner.check(updates)

    def least_contributors(self, updates: int) -> int:
        # Each input of the inner rule is a mean of this many updates.
        return updates - self.f

    def combine_finite(
        self, rows: UpdateRows, dropped: int, turn: RoundSeed, state: list[Tensor] | None
    ) -> tuple[list[Tensor], list[Tensor] | None]:
        # Equal keys: the order follows values alone. The roundings of sums, which break ties, then
        # do not depend on which client sent which update.
        rows = rows.only(rows.order(torch.zeros(len(rows))))
        nearest = len(rows) - still_broken(self.f, dropped)
        mix = torch.zeros(len(rows), len(rows), dtype=torch.float64)
        for row, squared in zip(mix, rows.squared_distances(), strict=True):
            row[rows.order(squared)[:nearest]] = 1 / nearest
        means = rows.mixed(mix, rows.weights)
        return combine_inner(self.inner, means, dropped=dropped, turn=turn, state=state)
