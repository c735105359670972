"""RFA, robust federated aggregation: the geometric median with weights n_k, smoothed.

    z <- (sum of b_k·x_k) / (sum of b_k),   b_k = n_k / max(nu, |x_k - z|),  until convergence

The rule minimises (sum of n_k·h(|x_k - z|)). h is the distance, but quadratic within nu of zero, so
that a z close to an update does no harm. Withstands broken updates with less than half of the total
weight: n_k has to be known, not claimed. nu is a length in the units of updates: if all updates are
10 times as long, nu has to be 10 times as long for a result 10 times as long.

The paper takes few steps from the mean; dure iterates to a relative accuracy of 1e-12
(`weiszfeld.py`), from the median of each coordinate. Cost and memory: as the geometric median.

Source: K. Pillutla, S. Kakade, Z. Harchaoui, "Robust Aggregation for Federated Learning", IEEE TSP
2022.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import ClassVar

from torch import Tensor

from dure.arguments import above
from dure.federated.aggregate import weiszfeld
from dure.federated.aggregate.aggregator import Collects
from dure.federated.aggregate.rows import UpdateRows
from dure.randomness.seeds import RoundSeed


@dataclass(frozen=True)
class RFA(Collects):
    """The geometric median with weights n_k, smoothed.

    nu: distance from an update within which its pull stops growing, in the units of updates.
    """

    name: ClassVar[str] = "rfa"
    nu: float = field(default=1e-6, metadata=above(0, finite=True))

    def combine_finite(
        self, rows: UpdateRows, dropped: int, turn: RoundSeed, state: list[Tensor] | None
    ) -> tuple[list[Tensor], None]:
        return weiszfeld.geometric_median(rows, rows.weights, self.nu), None
