"""What torch builds on collectives: Python objects, and the functional collectives that compilers
see."""

from __future__ import annotations

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional
from harness import DURE, Ranks, on_ranks, same, values
from torch import Tensor


def thing(rank: int) -> dict[str, object]:
    return {"rank": rank, "text": "두레 " * (rank + 1), "list": list(range(100 * rank))}


@on_ranks(1, 2, 3)
def test_objects_are_gathered_by_all(ranks: Ranks) -> None:
    told: list[object] = [None] * ranks.size
    dist.all_gather_object(told, thing(ranks.rank), group=ranks.group)
    assert told == [thing(r) for r in ranks.all]


@on_ranks(1, 2, 3)
def test_objects_are_gathered_by_one(ranks: Ranks) -> None:
    for root in ranks.all:
        told: list[object] | None = [None] * ranks.size if ranks.rank == root else None
        dist.gather_object(thing(ranks.rank), told, group=ranks.group, group_dst=root)
        assert told is None or told == [thing(r) for r in ranks.all]


@on_ranks(1, 2, 3)
def test_objects_are_broadcast(ranks: Ranks) -> None:
    for root in ranks.all:
        objects: list[object] = [thing(7), "x", None] if ranks.rank == root else [None, None, None]
        dist.broadcast_object_list(objects, group=ranks.group, group_src=root)
        assert objects == [thing(7), "x", None]


@on_ranks(1, 2, 3)
def test_objects_are_scattered(ranks: Ranks) -> None:
    for root in ranks.all:
        received: list[object] = [None]
        objects = [thing(r) for r in ranks.all] if ranks.rank == root else None
        dist.scatter_object_list(received, objects, group=ranks.group, group_src=root)
        assert received == [thing(ranks.rank)]


@on_ranks(2, 3)
def test_objects_are_sent(ranks: Ranks) -> None:
    if ranks.rank == 0:
        dist.send_object_list([thing(3), 42], group=ranks.group, group_dst=1)
    elif ranks.rank == 1:
        received: list[object] = [None, None]
        dist.recv_object_list(received, group=ranks.group, group_src=0)
        assert received == [thing(3), 42]


@on_ranks(2, 3)
def test_an_object_of_megabytes_is_broadcast(ranks: Ranks) -> None:
    content = bytes(range(256)) * 20_000
    objects: list[object] = [content if ranks.rank == 0 else None]
    dist.broadcast_object_list(objects, group=ranks.group, group_src=0)
    assert objects == [content]


def waited(tensor: Tensor) -> Tensor:
    return functional.wait_tensor(tensor)


@on_ranks(1, 2, 3)
def test_functional_all_reduce_leaves_its_input(ranks: Ranks) -> None:
    tensor = torch.full((3, 5), float(ranks.rank))
    total = waited(functional.all_reduce(tensor, "sum", ranks.group))
    same(total, torch.full((3, 5), float(sum(ranks.all))))
    same(tensor, torch.full((3, 5), float(ranks.rank)))
    same(
        waited(functional.all_reduce(tensor, "max", ranks.group)),
        torch.full((3, 5), float(ranks.size - 1)),
    )


@on_ranks(1, 2, 3, backends=DURE)
def test_functional_all_reduce_averages(ranks: Ranks) -> None:
    mean = waited(functional.all_reduce(torch.full((4,), float(ranks.rank)), "avg", ranks.group))
    same(mean, torch.full((4,), (ranks.size - 1) / 2))


@on_ranks(1, 2, 3)
def test_functional_all_gather_along_any_dimension(ranks: Ranks) -> None:
    for dimension in (0, 1):
        gathered = waited(
            functional.all_gather_tensor(values(ranks.rank, 3, 4), dimension, ranks.group)
        )
        same(gathered, torch.cat([values(r, 3, 4) for r in ranks.all], dimension), dimension)


@on_ranks(1, 2, 3)
def test_functional_reduce_scatter_along_any_dimension(ranks: Ranks) -> None:
    for dimension in (0, 1):
        tensor = torch.arange(float(ranks.size * ranks.size * 6)).view(
            ranks.size * 2, ranks.size * 3
        )
        part = waited(functional.reduce_scatter_tensor(tensor, "sum", dimension, ranks.group))
        same(
            part,
            (tensor * ranks.size).chunk(ranks.size, dimension)[ranks.rank].contiguous(),
            dimension,
        )


@on_ranks(1, 2, 3)
def test_functional_all_to_all_with_and_without_splits(ranks: Ranks) -> None:
    n = ranks.size
    tensor = torch.arange(float(n)) + 10 * ranks.rank
    equal = waited(functional.all_to_all_single(tensor, None, None, ranks.group))
    same(equal, torch.arange(float(n)) * 10 + ranks.rank)
    sent = [r + 1 for r in ranks.all]  # rank r gets r + 1 rows of everybody
    uneven = waited(
        functional.all_to_all_single(
            torch.full((sum(sent),), float(ranks.rank)), [ranks.rank + 1] * n, sent, ranks.group
        )
    )
    same(uneven, torch.arange(float(n)).repeat_interleave(ranks.rank + 1))


@on_ranks(2, 3)
def test_functional_broadcast(ranks: Ranks) -> None:
    got = waited(
        functional.broadcast(values(ranks.rank, 9), 1, ranks.group)
    )  # the number in the group, it is
    same(got, values(1, 9))


@on_ranks(2, 3)
def test_functional_collectives_of_many_tensors(ranks: Ranks) -> None:
    tensors = [torch.full((n,), float(ranks.rank)) for n in (2, 30, 4)]
    for total in functional.all_reduce_coalesced(tensors, "sum", ranks.group):
        same(waited(total), torch.full_like(total, sum(ranks.all)))
    gathered = functional.all_gather_into_tensor_coalesced(tensors, ranks.group)
    for tensor, whole in zip(tensors, gathered, strict=True):
        same(waited(whole), torch.arange(float(ranks.size)).repeat_interleave(len(tensor)))
    whole = [torch.full((n * ranks.size,), 1.0) for n in (2, 30)]
    for part in functional.reduce_scatter_tensor_coalesced(whole, "sum", [0, 0], ranks.group):
        same(waited(part), torch.full_like(part, ranks.size))


@on_ranks(2, 3)
def test_functional_all_gather_passes_gradients(ranks: Ranks) -> None:
    tensor = torch.full((3,), float(ranks.rank), requires_grad=True)
    gathered = functional.all_gather_tensor_autograd(tensor, 0, ranks.group)
    (waited(gathered) * (ranks.rank + 1)).sum().backward()
    assert tensor.grad is not None
    same(tensor.grad, torch.full((3,), float(sum(r + 1 for r in ranks.all))))


@on_ranks(2)
def test_a_compiled_function_reduces(ranks: Ranks) -> None:
    @torch.compile(backend="eager", fullgraph=True)
    def step(tensor: Tensor) -> Tensor:
        return functional.wait_tensor(functional.all_reduce(tensor * 2, "sum", ranks.group)) + 1

    same(step(torch.full((3,), float(ranks.rank + 1))), torch.full((3,), 7.0))
