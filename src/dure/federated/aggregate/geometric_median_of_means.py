"""Byzantine gradient descent: the geometric median of the means of k groups of updates.

    in every turn clients are divided at random into k groups, whose sizes differ by at most 1
    Z_l = mean of group l;   the result is the geometric median of Z_1 .. Z_k, of whole updates

Withstands q broken updates per turn, even of changing clients, if 2(1 + e)·q <= k <= m for some e >
0: so q < k/2, even if each broken update spoils a different group. A large k withstands more; a
small k has less variance. k = 1 is the mean, and withstands nothing; k = m is the geometric median.
Within a group an update weighs n_k, where a false n_k spoils only the group that the update itself
spoils; groups weigh the same.

Updates that are not finite are dropped before groups are formed. Cost: as the geometric median of k
updates, and k·m·d operations; memory: a block and 2 vectors.

Source: Y. Chen, L. Su, J. Xu, "Distributed Statistical Machine Learning in Adversarial Settings:
Byzantine Gradient Descent", SIGMETRICS 2018, algorithm 2.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import ClassVar

import torch
from torch import Tensor

from dure.arguments import at_least
from dure.federated.aggregate import weiszfeld
from dure.federated.aggregate.aggregator import Aggregator, Collects, Groups
from dure.federated.aggregate.geometric_median import GeometricMedian
from dure.federated.aggregate.rows import UpdateRows
from dure.randomness.seeds import RoundSeed


@dataclass(frozen=True)
class GeometricMedianOfMeans(Collects):
    """The geometric median of the means of k random groups.

    k: number of groups, more than twice the number of broken updates.
    """

    name: ClassVar[str] = "geometric-median-of-means"
    k: int = field(default=10, metadata=at_least(1))

    def check(self, updates: int) -> None:
        if updates < self.k:
            raise ValueError(
                f"{self} needs at least {self.k} updates a round, one a group, not {updates}"
            )

    def groups(self, updates: int, turn: RoundSeed) -> list[list[int]]:
        """Return the row indices of each group of this turn.

        With fewer updates than k, each update is a group.
        """
        order = torch.randperm(updates, generator=turn.generator("groups"))
        return [group.tolist() for group in order.tensor_split(min(self.k, updates))]

    def of_groups(self) -> tuple[Groups, Aggregator]:
        return self.groups, GeometricMedian()

    def combine_finite(
        self, rows: UpdateRows, dropped: int, turn: RoundSeed, state: list[Tensor] | None
    ) -> tuple[list[Tensor], None]:
        means = rows.grouped(self.groups(len(rows), turn))
        return weiszfeld.geometric_median(means, [1.0] * len(means)), None
