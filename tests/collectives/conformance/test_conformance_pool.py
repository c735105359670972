"""Tensors of the shared pool: they behave as any others, alone and mixed with ordinary ones on
other ranks."""

from __future__ import annotations

import torch
import torch.distributed as dist
from harness import DURE, Ranks, on_ranks, same, values
from torch import Tensor
from torch.distributed import ReduceOp


def empty_shared(*size: int, dtype: torch.dtype | None = None) -> Tensor:
    """dure's, imported where it runs: the tests are collected where there is none too."""
    from dure.collectives import empty_shared as make  # type: ignore[attr-defined]

    return make(*size) if dtype is None else make(*size, dtype=dtype)


SIZES = (0, 1, 1_000, 400_000)


def brought(part: Tensor, shared: bool) -> Tensor:
    """The part, in the pool or not."""
    return empty_shared(*part.shape, dtype=part.dtype).copy_(part) if shared else part.clone()


def mixes(ranks: Ranks) -> list[bool]:
    """Whether this rank's tensor lies in the pool: on all ranks, on one, on the others, on none."""
    return [True, ranks.rank == 0, ranks.rank != 0, ranks.rank % 2 == 0, False]


def total(parts: list[Tensor]) -> Tensor:
    result = parts[0].clone()
    for part in parts[1:]:
        result += part
    return result


@on_ranks(1, 2, backends=DURE)
def test_a_shared_tensor_is_a_tensor(ranks: Ranks) -> None:
    for dtype in (
        torch.float32,
        torch.float64,
        torch.bfloat16,
        torch.int64,
        torch.uint8,
        torch.bool,
        torch.complex64,
    ):
        tensor = empty_shared(3, 5, dtype=dtype)
        assert (tensor.dtype, tuple(tensor.shape), tensor.device.type) == (dtype, (3, 5), "cpu")
        assert tensor.is_contiguous()
        tensor.copy_(values(ranks.rank, 3, 5, dtype=dtype))
        same(tensor, values(ranks.rank, 3, 5, dtype=dtype))
    assert empty_shared(4).dtype is torch.get_default_dtype()
    assert empty_shared().shape == ()
    assert empty_shared(0, 3).shape == (0, 3)


@on_ranks(2, 3, 4, backends=DURE)
def test_all_reduce_of_tensors_some_of_which_are_shared(ranks: Ranks) -> None:
    for n in SIZES:
        for shared in mixes(ranks):
            for dtype in (torch.float32, torch.float16, torch.int32):
                parts = [values(r, n, dtype=dtype) for r in ranks.all]
                tensor = brought(parts[ranks.rank], shared)
                dist.all_reduce(tensor, ReduceOp.MAX, ranks.group)
                same(tensor, torch.stack(parts).amax(0) if n else parts[0], (n, shared, dtype))
            parts = [values(r, n) for r in ranks.all]
            tensor = brought(parts[ranks.rank], shared)
            dist.all_reduce(tensor, group=ranks.group)
            same(tensor, total(parts), (n, shared))


@on_ranks(2, 3, backends=DURE)
def test_every_collective_takes_and_fills_shared_tensors(ranks: Ranks) -> None:
    k = ranks.size
    for n in SIZES:
        for shared in mixes(ranks):
            parts = [values(r, n) for r in ranks.all]
            mine = brought(parts[ranks.rank], shared)
            wide = brought(torch.zeros(k * n), not shared)
            dist.all_gather_into_tensor(wide, mine, group=ranks.group)
            same(wide, torch.cat(parts), ("all_gather_into_tensor", n, shared))
            output = brought(torch.zeros(n), shared)
            dist.reduce_scatter_tensor(output, wide, group=ranks.group)
            same(output, total([parts[ranks.rank]] * k), ("reduce_scatter_tensor", n, shared))
            exchanged = brought(torch.zeros(k * n), shared)
            dist.all_to_all_single(exchanged, wide, group=ranks.group)
            same(exchanged, torch.cat([parts[ranks.rank]] * k), ("all_to_all_single", n, shared))
            dist.broadcast(mine, group=ranks.group, group_src=k - 1)
            same(mine, parts[k - 1], ("broadcast", n, shared))
            reduced = brought(parts[ranks.rank], shared)
            dist.reduce(reduced, group=ranks.group, group_dst=0)
            if ranks.rank == 0:
                same(reduced, total(parts), ("reduce", n, shared))


@on_ranks(2, backends=DURE)
def test_shared_tensors_travel_as_messages(ranks: Ranks) -> None:
    for n in SIZES:
        tensor = brought(values(0, n) if ranks.rank == 0 else torch.zeros(n), True)
        if ranks.rank == 0:
            dist.send(tensor, group=ranks.group, group_dst=1)
            tensor.fill_(-1)
        else:
            dist.recv(tensor, group=ranks.group, group_src=0)
            same(tensor, values(0, n), n)


@on_ranks(2, 3, backends=DURE)
def test_parts_of_a_shared_tensor_are_reduced_and_their_surroundings_stay(ranks: Ranks) -> None:
    whole = empty_shared(10, 30_000).fill_(1)
    dist.all_reduce(whole[2:5], group=ranks.group)
    dist.all_reduce(whole[7:9, ::2], group=ranks.group)
    expected = torch.ones(10, 30_000)
    expected[2:5] = ranks.size
    expected[7:9, ::2] = ranks.size
    same(whole, expected)


@on_ranks(2, 3, backends=DURE)
def test_parts_that_lie_elsewhere_on_every_rank(ranks: Ranks) -> None:
    whole = empty_shared(500_000).fill_(0)
    part = whole[1_000 * ranks.rank + 3 :][:200_000]
    part.copy_(values(ranks.rank, 200_000))
    dist.all_reduce(part, group=ranks.group)
    same(part, total([values(r, 200_000) for r in ranks.all]))


@on_ranks(2, 3, backends=DURE)
def test_shared_tensors_come_and_go(ranks: Ranks) -> None:
    kept = []
    for number in range(40):
        tensor = empty_shared(5_000 * (number % 7 + 1)).fill_(float(ranks.rank))
        dist.all_reduce(tensor, group=ranks.group)
        same(tensor, torch.full_like(tensor, sum(ranks.all)), number)
        if number % 3 == ranks.rank:  # ranks keep different ones
            kept.append(tensor)
        del tensor
    for tensor in kept:
        same(tensor, torch.full_like(tensor, sum(ranks.all)))


@on_ranks(2, 3, backends=DURE)
def test_works_on_shared_tensors_are_under_way_at_once(ranks: Ranks) -> None:
    tensors = [
        brought(torch.full((20_000 + n,), float(ranks.rank + n)), n % 2 == 0) for n in range(12)
    ]
    works = [dist.all_reduce(tensor, group=ranks.group, async_op=True) for tensor in tensors]
    for number, (tensor, work) in enumerate(zip(tensors, works, strict=True)):
        assert work is not None
        work.wait()
        same(tensor, torch.full_like(tensor, sum(r + number for r in ranks.all)), number)


@on_ranks(2, backends=DURE)
def test_a_shared_parameter_learns(ranks: Ranks) -> None:
    module = torch.nn.Linear(300, 300)
    module.weight = torch.nn.Parameter(empty_shared(300, 300).fill_(1))
    module(torch.ones(2, 300)).sum().backward()
    assert module.weight.grad is not None
    dist.all_reduce(module.weight.grad, group=ranks.group)
    same(module.weight.grad, torch.full((300, 300), 2.0 * ranks.size))
