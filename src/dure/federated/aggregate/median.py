"""The median of each coordinate: the middle value, or the mean of the two middle values.

Withstands any minority of broken updates: with less than half of the updates broken, each
coordinate is between honest values. Weights n_k play no part, because a malicious client would
claim a large n_k.

Cost: about m·(log2 m)²/2 minima and maxima per coordinate, in the dtype of the updates; memory: a
block.

Source: D. Yin, Y. Chen, K. Ramchandran, P. Bartlett, "Byzantine-Robust Distributed Learning:
Towards Optimal Statistical Rates", ICML 2018.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from dure.federated.aggregate.aggregator import Collects
from dure.federated.aggregate.rows import UpdateRows
from dure.federated.aggregate.sorting_network import sorted_rows
from dure.randomness.seeds import RoundSeed


@dataclass(frozen=True)
class Median(Collects):
    """The median of each coordinate."""

    name: ClassVar[str] = "median"

    def combine_finite(
        self, rows: UpdateRows, dropped: int, turn: RoundSeed, state: list[Tensor] | None
    ) -> tuple[list[Tensor], None]:
        return coordinate_median(rows), None


def coordinate_median(rows: UpdateRows, dtype: torch.dtype | None = None) -> list[Tensor]:
    """Return the median of each coordinate of finite rows, shaped as an update.

    dtype: of the result; None for the dtype of the updates.
    """
    return rows.map(lambda values: middle(sorted_rows(values)), own_dtype=True, dtype=dtype)


def middle(ordered: list[Tensor]) -> Tensor:
    """Return the median of each column of rows that are sorted within each column.

    For an odd number of rows the median is the middle row itself.
    """
    low = ordered[(len(ordered) - 1) // 2]
    high = ordered[len(ordered) // 2]
    return low if low is high else (low.double() + high) / 2
