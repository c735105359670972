"""Ranks that do not call the same: all of them are told what each of them called, and the group
works on."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from harness import DURE, Ranks, on_ranks, raises, same
from torch.distributed import ReduceOp

from dure.errors import MismatchError


def disagree(ranks: Ranks, usual: Callable[[], Any], odd: Callable[[], Any], who: int = 1) -> str:
    """Rank `who` makes the odd call, the others the usual one; what they are all told. The group
    goes on to work."""
    with raises(MismatchError) as caught:
        (odd if ranks.rank == who else usual)()
    error = caught[0]
    texts = ranks.told_by_all(str(error))
    assert len(set(texts)) == 1, f"not all are told the same: {texts}"
    assert sorted(rank for calling, _ in error.calls for rank in calling) == list(ranks.all), (
        error.calls
    )
    assert len(error.calls) == 2, error.calls
    assert any(calling == (who,) for calling, _ in error.calls), error.calls
    works_on(ranks)
    return texts[0]


def works_on(ranks: Ranks) -> None:
    for n in (5, 20_000):
        tensor = torch.full((n,), float(ranks.rank))
        dist.all_reduce(tensor, group=ranks.group)
        same(tensor, torch.full((n,), float(sum(ranks.all))), "the group works on")


def reduce_all(
    ranks: Ranks, n: int = 10, dtype: torch.dtype = torch.float32, op: Any = ReduceOp.SUM
) -> None:
    dist.all_reduce(torch.ones(n, dtype=dtype), op, ranks.group)


@on_ranks(4, backends=DURE)
def test_tensors_of_different_sizes(ranks: Ranks) -> None:
    for n, other in ((10, 11), (100_000, 100_001), (3, 1_000_000), (0, 4), (1_000_000, 3)):
        text = disagree(
            ranks, lambda n=n: reduce_all(ranks, n), lambda n=other: reduce_all(ranks, n)
        )  # type: ignore[misc]
        assert str(n) in text.replace(",", "").replace("_", ""), text
        assert str(other) in text.replace(",", "").replace("_", ""), text


@on_ranks(4, backends=DURE)
def test_tensors_of_different_dtypes(ranks: Ranks) -> None:
    text = disagree(
        ranks, lambda: reduce_all(ranks), lambda: reduce_all(ranks, dtype=torch.float64)
    )
    assert "float32" in text, text
    assert "float64" in text, text
    disagree(ranks, lambda: reduce_all(ranks), lambda: reduce_all(ranks, dtype=torch.int32))


@on_ranks(4, backends=DURE)
def test_different_operations(ranks: Ranks) -> None:
    text = disagree(
        ranks, lambda: reduce_all(ranks), lambda: reduce_all(ranks, op=ReduceOp.MAX), who=3
    ).lower()
    assert "sum" in text, text
    assert "max" in text, text


@on_ranks(4, backends=DURE)
def test_different_collectives(ranks: Ranks) -> None:
    text = disagree(
        ranks, lambda: reduce_all(ranks), lambda: dist.barrier(ranks.group), who=0
    ).lower()
    assert "barrier" in text, text
    assert "reduce" in text, text
    disagree(
        ranks,
        lambda: dist.broadcast(torch.ones(10), group=ranks.group, group_src=0),
        lambda: dist.all_gather_into_tensor(torch.ones(40), torch.ones(10), group=ranks.group),
    )


@on_ranks(4, backends=DURE)
def test_different_roots(ranks: Ranks) -> None:
    for who in (0, 2):
        disagree(
            ranks,
            lambda: dist.broadcast(torch.ones(10), group=ranks.group, group_src=0),
            lambda: dist.broadcast(torch.ones(10), group=ranks.group, group_src=2),
            who,
        )
    disagree(
        ranks,
        lambda: dist.reduce(torch.ones(10), group=ranks.group, group_dst=0),
        lambda: dist.reduce(torch.ones(10), group=ranks.group, group_dst=1),
    )


@on_ranks(4, backends=DURE)
def test_different_sizes_in_every_collective(ranks: Ranks) -> None:
    def broadcast(n: int) -> None:
        dist.broadcast(torch.ones(n), group=ranks.group, group_src=0)

    def reduce(n: int) -> None:
        dist.reduce(torch.ones(n), group=ranks.group, group_dst=0)

    def all_gather(n: int) -> None:
        dist.all_gather([torch.ones(n) for _ in ranks.all], torch.ones(n), group=ranks.group)

    def all_gather_into_tensor(n: int) -> None:
        dist.all_gather_into_tensor(torch.ones(4 * n), torch.ones(n), group=ranks.group)

    def reduce_scatter_tensor(n: int) -> None:
        dist.reduce_scatter_tensor(torch.ones(n), torch.ones(4 * n), group=ranks.group)

    def reduce_scatter(n: int) -> None:
        dist.reduce_scatter(torch.ones(n), [torch.ones(n) for _ in ranks.all], group=ranks.group)

    for call in (
        broadcast,
        reduce,
        all_gather,
        all_gather_into_tensor,
        reduce_scatter_tensor,
        reduce_scatter,
    ):
        for n, other in ((10, 9), (10, 50_000)):
            try:
                disagree(
                    ranks, lambda call=call, n=n: call(n), lambda call=call, n=other: call(n), who=2
                )  # type: ignore[misc]
            except AssertionError as error:
                raise AssertionError(f"{call.__name__} of {n} and {other}: {error}") from error


def told(ranks: Ranks, call: Callable[[], Any]) -> None:
    """Everybody makes the call, which does not fit together, and is told so in the same words."""
    with raises(MismatchError) as caught:
        call()
    texts = ranks.told_by_all(str(caught[0]))
    assert len(set(texts)) == 1, f"not all are told the same: {texts}"
    works_on(ranks)


@on_ranks(4, backends=DURE)
def test_parts_that_are_not_what_their_receivers_expect(ranks: Ranks) -> None:
    sizes = [3] * 4
    wrong = [3, 4, 3, 3]  # rank 2 has one more for rank 1 than rank 1 expects
    sent = wrong if ranks.rank == 2 else sizes
    told(
        ranks,
        lambda: dist.all_to_all_single(
            torch.ones(12), torch.ones(sum(sent)), sizes, sent, group=ranks.group
        ),
    )
    outputs = [torch.ones(3) for _ in ranks.all] if ranks.rank == 0 else None
    told(
        ranks,
        lambda: dist.gather(
            torch.ones(4 if ranks.rank == 3 else 3), outputs, group=ranks.group, group_dst=0
        ),
    )
    parts = [torch.ones(3) for _ in ranks.all] if ranks.rank == 0 else None
    told(
        ranks,
        lambda: dist.scatter(
            torch.ones(4 if ranks.rank == 3 else 3), parts, group=ranks.group, group_src=0
        ),
    )


@on_ranks(4, backends=DURE)
def test_a_work_tells_when_it_is_waited_for(ranks: Ranks) -> None:
    good = torch.ones(5)
    first: Any = dist.all_reduce(good, group=ranks.group, async_op=True)
    bad: Any = dist.all_reduce(torch.ones(10 + (ranks.rank == 3)), group=ranks.group, async_op=True)
    other = torch.ones(6)
    last: Any = dist.all_reduce(other, group=ranks.group, async_op=True)
    first.wait()
    with raises(MismatchError) as caught:
        bad.wait()
    last.wait()
    same(good, torch.full((5,), 4.0))
    same(other, torch.full((6,), 4.0), "the work after the one that failed")
    assert len(set(ranks.told_by_all(str(caught[0])))) == 1
    works_on(ranks)


@on_ranks(4, backends=DURE)
def test_a_future_tells_too(ranks: Ranks) -> None:
    work: Any = dist.all_reduce(
        torch.ones(10 + (ranks.rank == 3)), group=ranks.group, async_op=True
    )
    with raises(RuntimeError, "disagree"):
        work.get_future().wait()
    works_on(ranks)


@on_ranks(4, backends=DURE)
def test_some_wait_at_once_and_some_later(ranks: Ranks) -> None:
    tensor = torch.ones(10 + (ranks.rank == 1))
    with raises(MismatchError) as caught:
        if ranks.rank < 2:
            dist.all_reduce(tensor, group=ranks.group)
        else:
            work: Any = dist.all_reduce(tensor, group=ranks.group, async_op=True)
            work.wait()
    assert len(set(ranks.told_by_all(str(caught[0])))) == 1
    works_on(ranks)


@on_ranks(4, backends=DURE)
def test_three_kinds_of_calls_are_all_named(ranks: Ranks) -> None:
    with raises(MismatchError) as caught:
        if ranks.rank == 0:
            dist.barrier(ranks.group)
        else:
            reduce_all(ranks, 10 if ranks.rank == 1 else 20)
    assert sorted(sorted(calling) for calling, _ in caught[0].calls) == [[0], [1], [2, 3]], caught[
        0
    ].calls
    assert len(set(ranks.told_by_all(str(caught[0])))) == 1
    works_on(ranks)


@on_ranks(4, backends=DURE)
def test_what_was_brought_survives_a_disagreement(ranks: Ranks) -> None:
    for n in (10, 200_000):
        tensor = torch.full((n + (ranks.rank == 1),), float(ranks.rank))
        with raises(MismatchError):
            dist.all_reduce(tensor, group=ranks.group)
        same(tensor, torch.full((n + (ranks.rank == 1),), float(ranks.rank)), n)


@on_ranks(4, backends=DURE)
def test_the_group_disagrees_again_and_again(ranks: Ranks) -> None:
    for number in range(50):
        with raises(MismatchError):
            reduce_all(ranks, 10 + (ranks.rank == number % 4))
    works_on(ranks)


@on_ranks(4, backends=DURE)
def test_in_a_group_of_some_ranks_they_are_named_as_the_world_knows_them(ranks: Ranks) -> None:
    group = ranks.new_group([1, 3])
    if ranks.rank in (1, 3):
        with raises(MismatchError, "rank 3 ") as caught:
            dist.all_reduce(torch.ones(10 + (ranks.rank == 3)), group=group)
        assert sorted(calling for calling, _ in caught[0].calls) == [(1,), (3,)]
        tensor = torch.ones(2)
        dist.all_reduce(tensor, group=group)
        same(tensor, torch.full((2,), 2.0))
    works_on(ranks)
