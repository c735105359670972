"""Bucketing: the means of random buckets of s updates, combined by another aggregator.

If the clients' data differ, honest updates are far apart and robust rules mistake some for broken.
Means of s updates are closer, by a factor of s in variance, and f broken updates spoil at most f
buckets: `inner` has to withstand f of ceil(n/s). The paper takes s = 2. Within a bucket an update
weighs n_k; a bucket weighs the sum of its updates' weights.

Updates that are not finite are dropped first. Cost: (n/s)·n·d operations for each pass of `inner`;
memory: as `inner`.

Source: S. P. Karimireddy, L. He, M. Jaggi, "Byzantine-Robust Learning on Heterogeneous Datasets via
Bucketing", ICLR 2022.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import ClassVar

import torch
from torch import Tensor

from dure.arguments import at_least
from dure.federated.aggregate.aggregator import Aggregator, Collects, Groups
from dure.federated.aggregate.rows import UpdateRows
from dure.federated.aggregate.wrapping import MEDIAN, combine_inner
from dure.randomness.seeds import RoundSeed


@dataclass(frozen=True)
class Bucketing(Collects):
    """Another aggregator, applied to the means of random buckets.

    s: updates per bucket; the last bucket may have fewer. inner: the aggregator of the buckets'
    means.
    """

    name: ClassVar[str] = "bucketing"
    wraps: ClassVar[bool] = True
    s: int = field(default=2, metadata=at_least(1))
    inner: Aggregator = MEDIAN

    def check(self, updates: int) -> None:
        try:
            self.inner.check(-(-updates // self.s))
        except ValueError as error:
            raise ValueError(
                f"{self}: {updates} updates are {-(-updates // self.s)} buckets; {error}"
            ) from error

    def buckets(self, updates: int, turn: RoundSeed) -> list[list[int]]:
        """Return the row indices of each bucket of this turn."""
        order = torch.randperm(updates, generator=turn.generator("buckets"))
        return [bucket.tolist() for bucket in torch.split(order, self.s)]

    def least_contributors(self, updates: int) -> int:
        # The updates of the smallest bucket, and of as many other buckets as the inner rule
        # selects.
        buckets = -(-updates // self.s)
        chosen = self.inner.least_contributors(buckets)
        return min(updates, updates - (buckets - 1) * self.s + (chosen - 1) * self.s)

    def of_groups(self) -> tuple[Groups, Aggregator]:
        return self.buckets, self.inner

    def combine_finite(
        self, rows: UpdateRows, dropped: int, turn: RoundSeed, state: list[Tensor] | None
    ) -> tuple[list[Tensor], list[Tensor] | None]:
        means = rows.grouped(self.buckets(len(rows), turn))
        return combine_inner(self.inner, means, dropped=dropped, turn=turn, state=state)
