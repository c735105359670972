"""Sums of halves: how far they are off, and what overflows."""

from __future__ import annotations

import pytest
import torch
from on_ranks import on_ranks
from small_buckets import numbers, sent
from torch import Tensor

from dure.collectives.compression import Cast
from dure.contracts.world import RankContext

UNITS = {"bfloat16": 2**-8, "float16": 2**-11}


@pytest.mark.parametrize("dtype", list(UNITS))
def test_the_sum_is_off_by_two_roundings(dtype: str) -> None:
    def program(context: RankContext) -> Tensor:
        mine = numbers((1000,), context.group.rank)
        return sent(Cast(dtype).compressor([mine], 0), [mine], context.group)

    parts = torch.stack([numbers((1000,), rank) for rank in range(3)])
    bound = UNITS[dtype] * (parts.abs().sum(0) + parts.sum(0).abs()) * 1.01 + 1e-6
    assert bool(((on_ranks(3, program)[0] - parts.sum(0)).abs() <= bound).all())


def test_a_sum_of_float16_overflows_only_where_its_mean_would() -> None:
    def program(context: RankContext) -> list[float]:
        mine = torch.tensor([40_000.0, 65_504.0, 300_000.0])
        return sent(Cast("float16").compressor([mine], 0), [mine], context.group).tolist()

    assert on_ranks(2, program) == [[80_000.0, 131_008.0, torch.inf]] * 2
