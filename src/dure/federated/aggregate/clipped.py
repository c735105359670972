"""Norm clipping: updates shortened to a norm, combined by another aggregator.

Each x_k becomes x_k·min(1, norm / |x_k|).

The norm is the norm of all trained weights together. No client can then move the mean by more than
2·norm·n_k / (sum of n_k): clipping bounds the effect of a broken update, and does not remove the
update. Buffers are not clipped. Updates that are not finite are dropped.

Around an aggregator that folds, the rule folds; around an aggregator that collects, the rule
collects. `clip` returns the matching class.

Cost: one pass for norms; memory: one update, or as the inner aggregator.

Source: Z. Sun, P. Kairouz, A. T. Suresh, H. B. McMahan, "Can You Really Backdoor Federated
Learning?", 2019.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar

import torch
from torch import Tensor

from dure.arguments import above
from dure.federated.aggregate.aggregator import Aggregator, Collects, Folds
from dure.federated.aggregate.mean import Mean
from dure.federated.aggregate.rows import UpdateRows, is_finite
from dure.federated.aggregate.wrapping import MEDIAN, combine_inner
from dure.randomness.seeds import RoundSeed

MEAN = Mean()
"""Default inner rule of `ClippedUpdates`."""


@dataclass(frozen=True)
class ClippedUpdates(Folds):
    """An aggregator that folds, applied to clipped updates.

    norm: largest norm of an update. inner: the aggregator of the clipped updates.
    """

    name: ClassVar[str] = "clipped"
    wraps: ClassVar[bool] = True
    norm: float = field(default=10.0, metadata=above(0, finite=True))
    inner: Folds = MEAN

    def __post_init__(self) -> None:
        super().__post_init__()
        if not isinstance(self.inner, Folds):
            raise ValueError(
                f"{self.inner} collects all updates before combining them: write "
                f"clip({self.norm}, inner), which wraps both kinds"
            )

    @classmethod
    def around(cls, inner: Aggregator) -> type[Aggregator]:
        return ClippedRows if inner.collects else cls

    def check(self, updates: int) -> None:
        self.inner.check(updates)

    def zero(self, like: Sequence[Tensor]) -> Any:
        return self.inner.zero(like)

    def fold(self, folded: Any, update: Sequence[Tensor], weight: float) -> Any:
        if not is_finite(update):
            return folded
        norm = float(
            torch.stack([torch.linalg.vector_norm(t, dtype=torch.float64) for t in update]).norm()
        )
        if norm > self.norm:
            # In float64: the factor may be too small for the dtype.
            update = [(tensor.double() * (self.norm / norm)).to(tensor.dtype) for tensor in update]
        return self.inner.fold(folded, update, weight)

    def finish(self, folded: Any) -> list[Tensor]:
        return self.inner.finish(folded)


@dataclass(frozen=True)
class ClippedRows(Collects):
    """An aggregator that collects, applied to clipped updates.

    norm: largest norm of an update. inner: the aggregator of the clipped updates.
    """

    name: ClassVar[str] = "clipped"
    wraps: ClassVar[bool] = True
    norm: float = field(default=10.0, metadata=above(0, finite=True))
    inner: Collects = MEDIAN

    def check(self, updates: int) -> None:
        self.inner.check(updates)

    def least_contributors(self, updates: int) -> int:
        return self.inner.least_contributors(updates)

    def combine_finite(
        self, rows: UpdateRows, dropped: int, turn: RoundSeed, state: list[Tensor] | None
    ) -> tuple[list[Tensor], list[Tensor] | None]:
        # A row of norm 0 gives infinity, clamped to 1.
        factors = (self.norm / rows.distances()).clamp(max=1)
        shortened = rows.scaled(factors)
        return combine_inner(self.inner, shortened, dropped=dropped, turn=turn, state=state)


def clip(norm: float, inner: Aggregator) -> ClippedUpdates | ClippedRows:
    """Return `inner` for updates clipped to `norm`; folds if `inner` folds, else collects."""
    if isinstance(inner, Folds):
        return ClippedUpdates(norm, inner)
    assert isinstance(inner, Collects)
    return ClippedRows(norm, inner)
