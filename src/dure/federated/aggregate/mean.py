"""The weighted mean of updates: (sum over clients of n_k·Δ_k) / (sum over clients of n_k).

The rule folds: one accumulator for any number of clients, and the same bits on every x86 processor
(`dure.tensors.unfused_multiply_add`). The weights n_k are the weights of the clients that took part
in the round (McMahan et al. 2017, algorithm 1 with the erratum of footnote 4).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from dure.errors import TooFewUpdatesError
from dure.federated.aggregate.aggregator import Aggregator, Folds, Groups
from dure.tensors.unfused_multiply_add import add_multiple


@dataclass(frozen=True)
class MeanAccumulator:
    """Accumulator of the mean: the weighted sums of tensors, and the sum of weights."""

    sums: tuple[Tensor, ...]
    weight: float
    dtypes: tuple[torch.dtype, ...]


def zero(like: Sequence[Tensor]) -> MeanAccumulator:
    """Return an empty accumulator for updates shaped like `like`."""
    sums = tuple(torch.zeros_like(tensor, dtype=wide(tensor.dtype)) for tensor in like)
    return MeanAccumulator(sums, 0.0, tuple(tensor.dtype for tensor in like))


def fold(folded: MeanAccumulator, tensors: Sequence[Tensor], weight: float) -> MeanAccumulator:
    """Add an update with weight n_k, in the accumulator's memory."""
    # In place: `MeanAccumulator` is a new value, its sums are the same memory.
    for total, tensor in zip(folded.sums, tensors, strict=True):
        add_multiple(total, tensor, weight)
    return MeanAccumulator(folded.sums, folded.weight + weight, folded.dtypes)


def add(
    folded: MeanAccumulator | None, sum_of: Callable[[Tensor | None], Tensor], weight: float
) -> MeanAccumulator:
    """Add the weighted sum of updates of a single tensor; None starts an accumulator with the sum.

    sum_of: returns the weighted sum; given a tensor, adds the sum to the tensor in place. weight:
    the sum of the weights of these updates.
    """
    if folded is None:
        total = sum_of(None)
        return MeanAccumulator((total,), weight, (total.dtype,))
    sum_of(folded.sums[0])
    return MeanAccumulator(folded.sums, folded.weight + weight, folded.dtypes)


def finish(folded: MeanAccumulator) -> list[Tensor]:
    """Return the mean, in the accumulator's memory.

    Raises TooFewUpdatesError if nothing was folded.
    """
    if folded.weight <= 0:
        raise TooFewUpdatesError("the mean of no updates is not defined")
    return [
        # The sum is not needed any more, so the mean takes its memory.
        total.div_(folded.weight).to(dtype)
        for total, dtype in zip(folded.sums, folded.dtypes, strict=True)
    ]


@dataclass(frozen=True)
class Mean(Folds):
    """The weighted mean.

    The mean withstands nothing: an update that is not finite makes the result not finite.
    """

    name: ClassVar[str] = "mean"
    sums: ClassVar[bool] = True

    def of_groups(self) -> tuple[Groups, Aggregator]:
        return lambda updates, turn: [list(range(updates))], self

    def zero(self, like: Sequence[Tensor]) -> MeanAccumulator:
        return zero(like)

    def fold(
        self, folded: MeanAccumulator, update: Sequence[Tensor], weight: float
    ) -> MeanAccumulator:
        return fold(folded, update, weight)

    def add(
        self,
        folded: MeanAccumulator | None,
        sum_of: Callable[[Tensor | None], Tensor],
        weight: float,
    ) -> MeanAccumulator:
        return add(folded, sum_of, weight)

    def finish(self, folded: MeanAccumulator) -> list[Tensor]:
        return finish(folded)


def wide(dtype: torch.dtype) -> torch.dtype:
    """Return the dtype in which updates are summed.

    n_k·Δ_k overflows in half precision: such updates are summed in float32.
    """
    return torch.float32 if dtype in (torch.float16, torch.bfloat16) else dtype
