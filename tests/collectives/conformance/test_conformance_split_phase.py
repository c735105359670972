"""Reduce-scatters and all-reduces that are begun and ended later: the same bits as at once,
whatever comes between."""

from __future__ import annotations

import random
import weakref
from typing import Any

import torch
import torch.distributed as dist
from harness import DURE, Ranks, on_ranks, raises, same
from torch import Tensor
from torch.distributed import ReduceOp

from dure.collectives.shared_memory.backend import SharedMemoryGroup
from dure.collectives.shared_memory.calls import AVG, SUM
from dure.errors import MismatchError

SIZES = (0, 1, 1_000, 100_000)
REDUCTIONS = [
    (torch.float32, SUM),
    (torch.float64, AVG),
    (torch.bfloat16, SUM),
    (torch.float16, AVG),
    (torch.int64, SUM),
]


def group_of(ranks: Ranks) -> SharedMemoryGroup:
    assert isinstance(ranks.group, SharedMemoryGroup)
    return ranks.group


def drawn(ranks: Ranks, n: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> Tensor:
    """This rank's message, in shared memory or not."""
    from dure.collectives import empty_shared

    message = torch.randn(
        n * ranks.size, generator=torch.Generator().manual_seed(31 * seed + ranks.rank)
    ).to(dtype)
    return (
        empty_shared(n * ranks.size, dtype=dtype).copy_(message)
        if (seed + ranks.rank) % 3
        else message
    )


def at_once(ranks: Ranks, message: Tensor, op: Any = ReduceOp.SUM) -> Tensor:
    result = torch.empty(message.numel() // ranks.size, dtype=message.dtype)
    dist.reduce_scatter_tensor(result, message.clone(), op, ranks.group)
    return result


@on_ranks(1, 2, 3, backends=DURE)
def test_the_same_bits_as_at_once(ranks: Ranks) -> None:
    group = group_of(ranks)
    for seed, (dtype, op) in enumerate(REDUCTIONS):
        for n in SIZES:
            message = drawn(ranks, n, dtype, seed)
            out = torch.empty(n, dtype=dtype)
            group.begun.begin_reduce_scatter(out, message, op).end()
            same(out, at_once(ranks, message, ReduceOp.AVG if op == AVG else ReduceOp.SUM))


@on_ranks(2, 4, backends=DURE)
def test_many_are_under_way_and_ended_in_any_order_or_by_other_calls(ranks: Ranks) -> None:
    group, chance = group_of(ranks), random.Random(7)
    for turn in range(6):
        messages = [drawn(ranks, chance.choice(SIZES), seed=number) for number in range(9)]
        expected = [at_once(ranks, message) for message in messages]
        outs = [torch.empty(message.numel() // ranks.size) for message in messages]
        begun = [
            group.begun.begin_reduce_scatter(out, message)
            for out, message in zip(outs, messages, strict=True)
        ]
        if turn % 2:
            dist.barrier(ranks.group)
        for each in sorted(begun, key=lambda _: random.random()):  # each rank in its own order
            each.end()
        for out, right in zip(outs, expected, strict=True):
            same(out, right)


@on_ranks(2, 3, backends=DURE)
def test_the_result_may_be_the_own_block_of_the_message(ranks: Ranks) -> None:
    message = drawn(ranks, 1_000, seed=1)
    right = at_once(ranks, message)
    own = message.view(ranks.size, -1)[ranks.rank]
    group_of(ranks).begun.begin_reduce_scatter(own, message).end()
    same(own, right)


@on_ranks(1, 2, 3, backends=DURE)
def test_the_own_block_may_lie_in_parts_anywhere(ranks: Ranks) -> None:
    group, chance = group_of(ranks), random.Random(5)
    for seed, (dtype, op) in enumerate(REDUCTIONS):
        for n in SIZES:
            message = drawn(ranks, n, dtype, seed)
            right = at_once(ranks, message, ReduceOp.AVG if op == AVG else ReduceOp.SUM)
            own = message.view(ranks.size, n)[ranks.rank]
            cuts = sorted(chance.randint(0, n) for _ in range(3))
            parts = [part.clone() for part in own.tensor_split(cuts)]
            own.fill_(77)  # is not looked at
            out, begin = (
                torch.empty(n, dtype=dtype),
                group.begun.prepare_reduce_scatter(torch.empty(n, dtype=dtype), message),
            )
            group.begun.begin_reduce_scatter(out, message, op, parts).end()
            same(out, right)
            begin(parts).end()  # and what is prepared is begun again with others
            begin([part + 1 for part in parts]).end()


@on_ranks(2, backends=("c",))
def test_what_is_own_is_let_go_at_the_end(ranks: Ranks) -> None:
    begun = group_of(ranks).begun.begin_reduce_scatter(
        torch.empty(10), drawn(ranks, 10, seed=1), own=[own := torch.ones(10)]
    )
    kept = weakref.ref(own)
    del own
    assert kept() is not None
    begun.end()
    assert kept() is None


@on_ranks(2, backends=DURE)
def test_an_own_block_that_does_not_fit_is_refused(ranks: Ranks) -> None:
    group, message = group_of(ranks), drawn(ranks, 10)
    other = ([torch.ones(9)], [torch.ones(5), torch.ones(6)], [torch.ones(10).double()])
    for own in (*other, [torch.ones(20)[::2]], [torch._neg_view(torch.ones(10))]):
        with raises(ValueError):
            group.begun.begin_reduce_scatter(torch.empty(10), message, own=own)
    same(at_once(ranks, torch.ones(6)), torch.full((3,), 2.0))


@on_ranks(2, 3, backends=DURE)
def test_a_message_is_read_when_all_have_ended(ranks: Ranks) -> None:
    group = group_of(ranks)
    begun = group.begun.begin_reduce_scatter(torch.empty(100), drawn(ranks, 100, seed=2))
    begun.end()
    dist.barrier(ranks.group)  # before which every rank has ended it
    assert begun.is_read()


@on_ranks(2, backends=("c",))
def test_nobody_waits_for_those_who_come_late(ranks: Ranks) -> None:
    group, (first, second) = group_of(ranks), (ranks.world_rank(rank) for rank in ranks.all)
    if ranks.rank == 1:  # begins only when it knows that the other one has
        dist.recv(torch.zeros(1), first, group=ranks.group)
    message = drawn(ranks, 100, seed=3)
    out = torch.empty(100)
    begun = group.begun.begin_reduce_scatter(out, message)
    if ranks.rank == 0:
        assert not begun.is_read()
        dist.send(torch.ones(1), second, group=ranks.group)
    begun.end()
    same(out, at_once(ranks, message))


@on_ranks(2, 3, backends=("c",))
def test_a_message_outlives_the_tensor_until_it_is_read(ranks: Ranks) -> None:
    """Whoever drops a message at once does not take it from those who still have to read it."""
    group = group_of(ranks)
    expected = [at_once(ranks, drawn(ranks, 1_000, seed=seed)) for seed in range(20)]
    for seed, right in enumerate(expected):
        out = torch.empty(1_000)
        begun = group.begun.begin_reduce_scatter(out, drawn(ranks, 1_000, seed=seed))
        drawn(ranks, 1_000, seed=100 + seed)  # would lie where the message lay
        begun.end()
        same(out, right)


@on_ranks(3, backends=("c",))
def test_ranks_that_begin_different_things_are_told_and_go_on(ranks: Ranks) -> None:
    group = group_of(ranks)
    for n, other in ((10, 11), (1, 1_000)):
        mine = other if ranks.rank == 1 else n
        with raises(MismatchError) as caught:
            group.begun.begin_reduce_scatter(torch.empty(mine), drawn(ranks, mine)).end()
        assert "begun reduce_scatter" in str(caught[0])
        assert (
            len(set(ranks.told_by_all(str(caught[0])))) == 1
            if ranks.size == dist.get_world_size()
            else True
        )
        same(at_once(ranks, torch.ones(6)), torch.full((2,), 3.0))


@on_ranks(2, backends=("c",))
def test_a_call_of_another_kind_does_not_fit_one_that_is_begun(ranks: Ranks) -> None:
    group = group_of(ranks)
    with raises(MismatchError):
        if ranks.rank == 0:
            group.begun.begin_reduce_scatter(torch.empty(5), drawn(ranks, 5)).end()
        else:
            dist.reduce_scatter_tensor(torch.empty(5), torch.ones(10), group=ranks.group)
    same(at_once(ranks, torch.ones(6)), torch.full((3,), 2.0))


@on_ranks(2, backends=DURE)
def test_a_destroyed_group_begins_nothing(ranks: Ranks) -> None:
    assert group_of(ranks)
    other = ranks.new_group([0, 1]) if ranks.size == dist.get_world_size() else None
    if other is None:
        return
    dist.destroy_process_group(other)
    with raises(RuntimeError):
        other.begun.begin_reduce_scatter(torch.empty(5), torch.ones(10)).end()


# All-reduces.


def summed(ranks: Ranks, message: Tensor, op: Any = ReduceOp.SUM) -> Tensor:
    result = message.clone()
    dist.all_reduce(result, op, ranks.group)
    return result


@on_ranks(1, 2, 3, backends=DURE)
def test_all_reduces_give_the_same_bits_as_at_once(ranks: Ranks) -> None:
    group = group_of(ranks)
    for seed, (dtype, op) in enumerate(REDUCTIONS):
        for n in SIZES:
            message = drawn(ranks, n, dtype, seed)
            right = summed(ranks, message, ReduceOp.AVG if op == AVG else ReduceOp.SUM)
            group.begun.begin_all_reduce(message, op)()
            same(message, right)


@on_ranks(2, 4, backends=DURE)
def test_many_all_reduces_are_under_way_among_scatters_and_ended_by_each_other(
    ranks: Ranks,
) -> None:
    group, chance = group_of(ranks), random.Random(8)
    for turn in range(6):
        messages = [drawn(ranks, chance.choice(SIZES[1:]), seed=number) for number in range(9)]
        expected = [summed(ranks, message) for message in messages]
        scattered, own = drawn(ranks, 500, seed=9), torch.empty(500)
        block = at_once(ranks, scattered)
        ends = [group.begun.begin_all_reduce(message) for message in messages[:3]]
        begun = group.begun.begin_reduce_scatter(own, scattered)
        ends += [group.begun.begin_all_reduce(message) for message in messages[3:]]
        if turn % 2:
            dist.barrier(ranks.group)
        for end in reversed(ends) if turn % 3 else ends:
            end()
        begun.end()
        same(own, block)
        for message, right in zip(messages, expected, strict=True):
            same(message, right)


@on_ranks(2, 3, backends=DURE)
def test_an_all_reduce_that_is_prepared_is_begun_again_and_again(ranks: Ranks) -> None:
    for tensor in (
        drawn(ranks, 1_000, seed=1),
        torch.zeros(20, 30).T,
    ):  # in shared memory, and neither there nor dense
        begin = group_of(ranks).begun.prepare_all_reduce(tensor, AVG)
        for turn in range(4):
            tensor.fill_(turn + ranks.rank)
            begin()()
            same(tensor, torch.full_like(tensor, turn + (ranks.size - 1) / 2))


@on_ranks(2, backends=("c",))
def test_nobody_waits_to_begin_an_all_reduce_and_who_is_late_is_helped(ranks: Ranks) -> None:
    group, (first, second) = group_of(ranks), (ranks.world_rank(rank) for rank in ranks.all)
    message = drawn(ranks, 100_000, seed=3)
    right = summed(ranks, message)
    if ranks.rank == 1:  # begins only when it knows that the other one has
        dist.recv(torch.zeros(1), first, group=ranks.group)
    end = group.begun.begin_all_reduce(message)
    if ranks.rank == 0:
        dist.send(torch.ones(1), second, group=ranks.group)
    end()
    same(message, right)


@on_ranks(3, backends=("c",))
def test_ranks_that_begin_different_all_reduces_are_told_and_go_on(ranks: Ranks) -> None:
    group = group_of(ranks)
    for n, other in ((10, 11), (1, 1_000)):
        mine = other if ranks.rank == 1 else n
        with raises(MismatchError) as caught:
            group.begun.begin_all_reduce(drawn(ranks, mine))()
        assert "begun all_reduce" in str(caught[0])
        same(summed(ranks, torch.ones(6)), torch.full((6,), 3.0))


@on_ranks(2, backends=("c",))
def test_a_rank_that_ends_all_reduces_before_others_have_begun_theirs_is_told(ranks: Ranks) -> None:
    group = group_of(ranks)
    first = group.begun.begin_all_reduce(drawn(ranks, 1_000))
    with raises(MismatchError) as caught:
        if ranks.rank == 0:
            first()
        else:
            group.begun.begin_all_reduce(drawn(ranks, 1_000))()
    assert "end of begun all_reduces" in str(caught[0])
    same(summed(ranks, torch.ones(6)), torch.full((6,), 2.0))


@on_ranks(2, backends=("c",))
def test_an_all_reduce_that_is_begun_does_not_fit_one_at_once(ranks: Ranks) -> None:
    with raises(MismatchError):
        if ranks.rank == 0:
            group_of(ranks).begun.begin_all_reduce(drawn(ranks, 5))()
        else:
            dist.all_reduce(torch.ones(10), group=ranks.group)
    same(summed(ranks, torch.ones(6)), torch.full((6,), 2.0))
