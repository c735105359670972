"""Arguments that share memory, ranks that there are not, and wrong numbers of tensors: a call does
what it would do with tensors apart, or is refused on every rank before anything travels."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from harness import DURE, Ranks, on_ranks, raises, same, values
from torch import Tensor

import dure.collectives as collectives
from dure.collectives.group import Group


def goes_on(ranks: Ranks) -> None:
    """The group still works."""
    tensor = torch.ones(3)
    dist.all_reduce(tensor, group=ranks.group)
    same(tensor, torch.full((3,), float(ranks.size)))


@on_ranks(2, 3)
def test_tensors_of_a_coalesced_all_reduce_may_share_memory(ranks: Ranks) -> None:
    joint = torch.stack([values(rank, 6, dtype=torch.float64) for rank in ranks.all]).sum(0)
    for views in (
        lambda x: [x, x],
        lambda x: [x[:4], x[2:]],
        lambda x: [x[:3], x[3:], x],
        lambda x: [x.view(2, 3), x.view(2, 3)[:, 1]],
    ):
        if ranks.backend == "gloo" and not all(v.is_contiguous() for v in views(joint)):
            continue
        tensor = values(ranks.rank, 6, dtype=torch.float64)
        dist.all_reduce_coalesced(views(tensor), group=ranks.group)
        torch.testing.assert_close(tensor, joint)


@on_ranks(2, 3, backends=DURE)
def test_what_is_read_while_it_is_written_is_read_as_it_was(ranks: Ranks) -> None:
    size, rank, group = ranks.size, ranks.rank, ranks.group
    n = 50_000  # more than fits into a slot at once
    for own in ranks.all:  # where in its memory each rank has what it gives, or gets
        place = (rank + own) % size

        whole = torch.zeros(size, n)
        whole[place] = values(rank, n)
        dist.all_gather_into_tensor(whole, whole[place], group=group)
        same(whole, torch.stack([values(r, n) for r in ranks.all]), "all_gather_into_tensor")

        whole[place] = values(rank, n)
        dist.all_gather(list(whole), whole[place], group=group)
        same(whole, torch.stack([values(r, n) for r in ranks.all]), "all_gather")

        joint = sum(values(r, size, n, dtype=torch.float64) for r in ranks.all)
        whole = values(rank, size, n, dtype=torch.float64)
        dist.reduce_scatter_tensor(whole[place], whole, group=group)
        torch.testing.assert_close(whole[place], joint[rank])  # type: ignore[index]

        whole = values(rank, size, n, dtype=torch.float64)
        dist.reduce_scatter(whole[place], list(whole), group=group)
        torch.testing.assert_close(whole[place], joint[rank])  # type: ignore[index]

        whole = values(rank, size, n)
        dist.all_to_all_single(whole, whole, group=group)
        same(whole, torch.stack([values(r, size, n)[rank] for r in ranks.all]), "to all, single")

        whole = values(rank, size, n)
        dist.all_to_all(list(whole), list(whole.flip(0).flip(0)), group=group)
        whole = values(rank, size, n)
        dist.all_to_all(list(whole), list(whole), group=group)
        same(whole, torch.stack([values(r, size, n)[rank] for r in ranks.all]), "to all")

        whole = torch.zeros(size, n)
        whole[place] = values(rank, n)
        outputs = list(whole) if rank == own else None
        dist.gather(whole[place], outputs, group=group, group_dst=own)
        if rank == own:
            same(whole, torch.stack([values(r, n) for r in ranks.all]), "gather")

        whole = values(own, size, n)
        sources = list(whole) if rank == own else None
        dist.scatter(whole[place], sources, group=group, group_src=own)
        same(whole[place], values(own, size, n)[rank], "scatter")


@on_ranks(2, 3, backends=DURE)
def test_scatter_of_our_own_into_a_row_of_its_source(ranks: Ranks) -> None:
    for algorithm in ("linear", "native"):
        for place in ranks.all:
            whole = values(0, ranks.size, 9)
            collectives.scatter(whole[place], whole, ranks.group, algorithm=algorithm)  # type: ignore[arg-type]
            same(whole[place], values(0, ranks.size, 9)[ranks.rank], (algorithm, place))


@on_ranks(2, backends=DURE)
def test_outputs_that_share_memory_are_refused_everywhere_and_the_group_goes_on(
    ranks: Ranks,
) -> None:
    group, x = ranks.group, torch.zeros(4)
    wide = torch.zeros(1).expand(4)
    windows = torch.zeros(6).unfold(0, 4, 2)
    calls: list[Callable[[], Any]] = [
        lambda: dist.all_reduce(wide, group=group),
        lambda: dist.all_reduce(windows, group=group),
        lambda: dist.all_reduce_coalesced([torch.zeros(2), wide], group=group),
        lambda: dist.all_gather([x, x], torch.ones(4), group=group),
        lambda: dist.all_gather([x[:2], x[1:3]], torch.ones(2), group=group),
        lambda: dist.all_gather_into_tensor(torch.zeros(2, 1).expand(2, 4), x, group=group),
        lambda: dist.reduce_scatter(wide, [x, x], group=group),
        lambda: dist.all_to_all([x, x], [torch.ones(4), torch.ones(4)], group=group),
        lambda: dist.all_to_all_single(wide, torch.ones(4), group=group),
        lambda: dist.scatter(wide, [x, x] if ranks.rank == 0 else None, group=group, group_src=0),
        lambda: collectives.all_reduce(windows, group),
        lambda: collectives.all_reduce(wide, group, "native"),
    ]
    for call in calls:
        with raises(ValueError, "share memory|elements share memory"):
            call()
        goes_on(ranks)


@on_ranks(2, 3, backends=DURE)
def test_columns_of_a_matrix_are_outputs_like_any_other(ranks: Ranks) -> None:
    whole = torch.zeros(5, ranks.size)
    dist.all_gather(list(whole.unbind(1)), values(ranks.rank, 5), group=ranks.group)
    same(whole, torch.stack([values(r, 5) for r in ranks.all], 1))


@on_ranks(2, 3, backends=DURE)
def test_a_rank_that_there_is_not_is_refused_before_anything_travels(ranks: Ranks) -> None:
    group, size = ranks.group, ranks.size
    x = torch.zeros(3)

    def options(kind: Any, root: int) -> Any:
        made = kind()
        made.rootRank = root
        return made

    ours = Group.of(group)
    for wrong in (-1, size, 7):
        calls: list[Callable[[], Any]] = [
            lambda wrong=wrong: group.broadcast([x], options(dist.BroadcastOptions, wrong)),
            lambda wrong=wrong: group.reduce([x], options(dist.ReduceOptions, wrong)),
            lambda wrong=wrong: group.gather([], [x], options(dist.GatherOptions, wrong)),
            lambda wrong=wrong: group.scatter([x], [], options(dist.ScatterOptions, wrong)),
            lambda wrong=wrong: group.send([x], wrong),
            lambda wrong=wrong: group.recv([x], wrong),
            lambda wrong=wrong: ours.send(x, wrong),
            lambda wrong=wrong: ours.receive(x, wrong),
            lambda wrong=wrong: ours.begin_transfer("a message", [(x, wrong)], []),
            lambda wrong=wrong: ours.broadcast_values([x], root=wrong),
            lambda wrong=wrong: ours.among([ours.rank, wrong]),
            lambda wrong=wrong: ours.split_into([[*range(size - 1)], [wrong]]),
            lambda wrong=wrong: ours.global_rank(wrong),
            lambda wrong=wrong: collectives.broadcast(x, group, wrong),
            lambda wrong=wrong: collectives.reduce(x, group, wrong),
            lambda wrong=wrong: collectives.gather(x, group, wrong),
            lambda wrong=wrong: collectives.scatter(x, x.expand(size, 3), group, wrong),
        ]
        for number, call in enumerate(calls):
            with raises(ValueError, "there is no rank|root is|parts are"):
                call()
            assert number >= 0
    goes_on(ranks)


@on_ranks(2, backends=DURE)
def test_wrong_numbers_of_tensors_are_refused_before_anything_travels(ranks: Ranks) -> None:
    group, x = ranks.group, torch.zeros(4)

    def fresh(count: int) -> list[Tensor]:
        return [torch.zeros(4) for _ in range(count)]

    calls: list[Callable[[], Any]] = [
        lambda: dist.all_gather(fresh(3), x, group=group),
        lambda: group.allgather_coalesced([fresh(2), fresh(1)], [x, x]),
        lambda: group.allgather_coalesced([fresh(3), fresh(3)], [x, x]),
        lambda: group.all_gather_single_coalesced([torch.zeros(8)], [x, x]),
        lambda: group.reduce_scatter_single_coalesced(fresh(2), [torch.zeros(8)]),
        lambda: dist.reduce_scatter(x, fresh(1), group=group),
        lambda: dist.all_to_all(fresh(1), fresh(1), group=group),
        lambda: group.all_to_all_single(torch.zeros(4), x, [-1, 5], [2, 2]),
        lambda: group.all_to_all_single(torch.zeros(4), x, [2, 2], [5, -1]),
    ]
    for call in calls:
        with raises(ValueError):
            call()
        goes_on(ranks)


@on_ranks(2, backends=DURE)
def test_begun_calls_take_a_part_in_its_own_place_alone(ranks: Ranks) -> None:
    begun = ranks.group.begun
    for place in ranks.all:
        whole = values(ranks.rank, 2, 8)
        if place == ranks.rank:
            begun.begin_reduce_scatter(whole[place].view(-1), whole.view(-1)).end()
            same(whole[place], values(0, 2, 8)[place] + values(1, 2, 8)[place])
            begun.begin_all_gather(whole, whole[place])()
        else:
            with raises(ValueError, "not the block of rank"):
                begun.begin_reduce_scatter(whole[place], whole)
            with raises(ValueError, "not the block of rank"):
                begun.begin_all_gather(whole, whole[place])
            mine = whole[ranks.rank]
            begun.begin_reduce_scatter(mine, whole).end()
            begun.begin_all_gather(whole, mine)()
