"""The geometric median of whole updates: the z that minimises (sum over clients of |x_i - z|).

Withstands any minority of broken updates: an outlier pulls with the same unit force from any
distance. If at least (1 - a)·m updates, a < 1/2, are within r of a point, the median is within 2(1
- a)/(1 - 2a)·r of the point. All updates weigh the same, because a malicious client would claim a
large n_k; `rfa` is the rule with weights.

The relative accuracy of the objective is 1e-12, or 1e-8 if an update is nearly the minimum and the
iteration has not moved away from the update in 10,000 steps: see `weiszfeld.py`. Equivariant to
translation and scale.

Cost: the median of each coordinate and 2·m²·d operations; memory: a block of at least 4·m² numbers,
and 2 vectors.

Source: Y. Chen, L. Su, J. Xu, "Distributed Statistical Machine Learning in Adversarial Settings:
Byzantine Gradient Descent", SIGMETRICS 2018.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from dure.federated.aggregate import weiszfeld
from dure.federated.aggregate.aggregator import Collects
from dure.federated.aggregate.rows import UpdateRows
from dure.randomness.seeds import RoundSeed


@dataclass(frozen=True)
class GeometricMedian(Collects):
    """The vector with the least sum of distances to all updates."""

    name: ClassVar[str] = "geometric-median"

    def combine_finite(
        self, rows: UpdateRows, dropped: int, turn: RoundSeed, state: list[Tensor] | None
    ) -> tuple[list[Tensor], None]:
        return weiszfeld.geometric_median(rows, [1.0] * len(rows)), None
