"""Bulyan: repeated Krum, then for each coordinate the mean of the values around the median.

    selection:   theta = n - 2f times, select the update with the best Krum score among the
                 remaining updates, with scores recomputed on them
    result:      for each coordinate, the mean of the theta - 2f selected values that are closest to
                 the median of the selected values

Withstands f of n >= 4f + 3 broken updates. A single very large coordinate can mislead Krum alone;
Bulyan's median rejects such a value. With f = 0 the rule is the mean with equal weights. If the
last selections leave fewer than f + 3 updates, Krum's score is the squared distance to the nearest
update. Ties are broken by value.

Cost: m²·d/2 differences for m updates of d parameters, m³ operations for the selection; memory: a
block and m² distances.

Source: E. M. El Mhamdi, R. Guerraoui, S. Rouault, "The Hidden Vulnerability of Distributed Learning
in Byzantium", ICML 2018.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import ClassVar

import torch
from torch import Tensor

from dure.arguments import at_least
from dure.federated.aggregate.aggregator import Collects, still_broken
from dure.federated.aggregate.krum import scores
from dure.federated.aggregate.median import middle
from dure.federated.aggregate.rows import UpdateRows
from dure.federated.aggregate.sorting_network import sorted_rows
from dure.randomness.seeds import RoundSeed


@dataclass(frozen=True)
class Bulyan(Collects):
    """Repeated Krum, then the mean around the median.

    f: broken updates withstood.
    """

    name: ClassVar[str] = "bulyan"
    f: int = field(default=1, metadata=at_least(0))

    def check(self, updates: int) -> None:
        if updates < 4 * self.f + 3:
            raise ValueError(
                f"{self} needs at least {4 * self.f + 3} updates a round (4f + 3), not {updates}"
            )

    def combine_finite(
        self, rows: UpdateRows, dropped: int, turn: RoundSeed, state: list[Tensor] | None
    ) -> tuple[list[Tensor], None]:
        f = still_broken(self.f, dropped)
        chosen = rows.only(selection(rows, f))
        keep = len(chosen) - 2 * f
        return chosen.map(lambda values: around_the_median(values, keep)), None


def selection(rows: UpdateRows, f: int) -> list[int]:
    """Return the n - 2f of n rows that repeated Krum selects, in order of selection."""
    squared = rows.squared_distances()
    left = list(range(len(rows)))
    chosen = list[int]()
    while len(chosen) < len(rows) - 2 * f:
        # Distances are computed once, for all rows; only the scores are recomputed in each pass.
        best = left[rows.only(left).order(scores(squared[left][:, left], f))[0]]
        left.remove(best)
        chosen.append(best)
    return chosen


def around_the_median(values: Tensor, keep: int) -> Tensor:
    """Return for each column the mean of the `keep` values that are closest to its median.

    values: float64 of shape (n, b); the result has shape (b,).

    The closest values form a window of the sorted column. The window moves up as long as the value
    that leaves is farther from the median than the value that enters; of two equally distant values
    the smaller stays.
    """
    ordered = sorted_rows(values)
    median = middle(ordered)
    window = torch.stack(ordered)
    # From one window position to the next the left side falls and the right side rises. So the true
    # values come first, and their number is the distance that the window moves.
    leaves_farther = (median - window[: len(window) - keep]) > (window[keep:] - median)
    place = torch.arange(len(window), device=values.device).unsqueeze(1) - leaves_farther.sum(0)
    return window.masked_fill_((place < 0) | (place >= keep), 0).sum(0) / keep
