"""Tensors of a GPU in every collective: the numbers of the CPU, or one line that says no."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy
import pytest
import torch
from on_gpu import BACKENDS, GPU, on_ranks
from torch import Tensor

from dure.collectives import (
    ALGORITHMS,
    all_gather,
    all_reduce,
    all_to_all,
    broadcast,
    gather,
    reduce,
    reduce_scatter,
    scatter,
)
from dure.contracts.world import RankContext

pytestmark = pytest.mark.needs_cuda

DTYPES = [torch.float64, torch.float32, torch.bfloat16, torch.int64, torch.bool, torch.complex64]


def numbers(rank: int, dtype: torch.dtype, n: int = 13) -> Tensor:
    """Small integers, whose sums are exact in every dtype, and below 2."""
    generator = torch.Generator().manual_seed(rank)
    whole = torch.randint(0, 2 if dtype == torch.bool else 9, (n,), generator=generator)
    return whole.to(dtype)


def told(tensor: Tensor | None) -> Any:
    """A tensor as numbers, and whether it is on the GPU."""
    if tensor is None:
        return None
    return tensor.device.type, tensor.cpu().tolist()


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("ranks", [2, 3])
def test_every_all_reduce_sums_on_the_gpu_as_on_the_cpu(ranks: int, backend: Any) -> None:
    def program(context: RankContext) -> list[Any]:
        found = []
        for algorithm in ALGORITHMS:
            for dtype in DTYPES:
                mine = numbers(context.group.rank, dtype)
                found.append(told(all_reduce(mine.clone().to(GPU), context.group, algorithm)))
                found.append(told(all_reduce(mine.clone(), context.group, algorithm)))
        return found

    for found in on_ranks(ranks, program, backend):
        for there, here in zip(found[::2], found[1::2], strict=True):
            assert there == ("cuda", here[1])


@pytest.mark.parametrize("backend", BACKENDS)
def test_every_collective_carries_tensors_of_the_gpu(backend: Any) -> None:
    calls: list[Callable[[Tensor, Any], Tensor | None]] = [
        lambda one, group: all_gather(one, group),
        lambda one, group: reduce_scatter(one, group),
        lambda one, group: broadcast(one, group, root=1),
        lambda one, group: broadcast(one, group, algorithm="linear"),
        lambda one, group: reduce(one, group, root=1) if group.rank == 1 else reduce(one, group, 1),
        lambda one, group: gather(one, group),
        lambda one, group: scatter(
            one, torch.stack([one + 1, one + 2, one + 3]) if group.rank == 0 else None, group
        ),
        lambda one, group: all_to_all(one[:12], group),
        lambda one, group: all_reduce(one, group, async_op=True).wait(),
        lambda one, group: all_reduce(one, group, op="avg"),
    ]

    def program(context: RankContext) -> list[Any]:
        found = []
        for number, call in enumerate(calls):
            mine = numbers(context.group.rank, torch.float64)
            there = told(call(mine.clone().to(GPU), context.group))
            here = told(call(mine.clone(), context.group))
            # Whatever a reduction leaves on others than its root is nobody's affair.
            if number == 4 and context.group.rank != 1:
                there = here = ("cuda", [])
            found.append((there, here))
        return found

    for found in on_ranks(3, program, backend):
        for there, here in found:
            if here is None:
                assert there is None
            else:
                # Not the same bits: a GPU divides by a number in another way.
                assert there[0] == "cuda"
                numpy.testing.assert_allclose(there[1], here[1], rtol=1e-15)
