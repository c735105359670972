"""Centred clipping: the last round's result plus the mean of differences clipped to tau.

    v <- v + (mean over clients of (x_i - v)·min(1, tau / |x_i - v|)),   `iterations` times

v starts at the result of the round before, which is the state of the rule. In the first round,
without a state, v starts at the median of each coordinate. A broken update moves the result by at
most tau/n per iteration, whatever its value; with tau far above all distances the rule is the mean
with equal weights. Withstands f < n/2 if tau has the size of the spread of honest updates. In the
paper clients send momentum; without momentum, attacks that accumulate over rounds succeed.

Buffers take a weighted mean over clients; a client's weight is the clipping factor of its weights.

Cost: 2 passes over the updates per iteration; memory: a block and 2 vectors; state: one update.

Source: S. P. Karimireddy, L. He, M. Jaggi, "Learning from History for Byzantine Robust
Optimization", ICML 2021.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import ClassVar

import torch
from torch import Tensor

from dure.arguments import above, at_least
from dure.federated.aggregate.aggregator import Collects
from dure.federated.aggregate.median import coordinate_median
from dure.federated.aggregate.rows import UpdateRows
from dure.randomness.seeds import RoundSeed


@dataclass(frozen=True)
class CentredClipping(Collects):
    """Steps of bounded length from the result of the round before.

    tau: length of the longest step, in the units of updates. iterations: at least 1.
    """

    name: ClassVar[str] = "centred-clipping"
    tau: float = field(default=10.0, metadata=above(0, finite=True))
    iterations: int = field(default=1, metadata=at_least(1))

    def combine_finite(
        self, rows: UpdateRows, dropped: int, turn: RoundSeed, state: list[Tensor] | None
    ) -> tuple[list[Tensor], list[Tensor]]:
        centre = (
            coordinate_median(rows, torch.float64)
            if state is None
            else [tensor.double() for tensor in state]
        )
        for _ in range(self.iterations):
            # v + sum of s_i (x_i - v) = (1 - sum of s) v + sum of s_i x_i: the rows in one pass,
            # without differences. A distance of 0 gives infinity, clamped to 1.
            shares = (self.tau / rows.distances(centre)).clamp(max=1) / len(rows)
            pulled = rows.combination(shares, torch.float64, rest=shares / shares.sum())
            stay = 1 - float(shares.sum())
            # Buffers are not measured, so no clipping factor pulls them towards the old v.
            centre = [
                v * stay + p if slot < rows.measured else p
                for slot, (v, p) in enumerate(zip(centre, pulled, strict=True))
            ]
        # The state has the dtype of the updates too: a resumed run continues with the same numbers.
        result = [v.to(like.dtype) for v, like in zip(centre, rows.updates[0], strict=True)]
        return result, [tensor.clone() for tensor in result]
