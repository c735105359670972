"""Works that are not waited for at once: handles, futures, many at a time, coalescing."""

from __future__ import annotations

import queue
import threading
import time
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from harness import DURE, Ranks, on_ranks, raises, same, values
from torch import Tensor
from torch.distributed.distributed_c10d import _coalescing_manager


def summed(ranks: Ranks, *shape: int, seed: int = 0) -> Tensor:
    return torch.full(shape, float(sum(r + seed for r in ranks.all)))


def brought(ranks: Ranks, *shape: int, seed: int = 0) -> Tensor:
    return torch.full(shape, float(ranks.rank + seed))


@on_ranks()
def test_a_handle_is_completed_after_wait(ranks: Ranks) -> None:
    tensor = brought(ranks, 1_000)
    work = dist.all_reduce(tensor, group=ranks.group, async_op=True)
    assert work is not None
    assert work.wait()
    assert work.is_completed()
    same(tensor, summed(ranks, 1_000))


@on_ranks(2, 3)
def test_a_work_completes_without_being_waited_for(ranks: Ranks) -> None:
    tensor = brought(ranks, 1_000)
    work = dist.all_reduce(tensor, group=ranks.group, async_op=True)
    assert work is not None
    until = time.monotonic() + 10
    while not work.is_completed() and time.monotonic() < until:
        time.sleep(0.001)
    assert work.is_completed()
    same(tensor, summed(ranks, 1_000))


@on_ranks(2, 3)
def test_a_handle_does_not_wait_for_those_who_come_late(ranks: Ranks) -> None:
    tensor = brought(ranks, 10)
    if ranks.rank == 0:
        ranks.wait_for("a look at the handle")
    work = dist.all_reduce(tensor, group=ranks.group, async_op=True)
    assert work is not None
    if ranks.rank == 1:
        assert not work.is_completed()
        ranks.tell("a look at the handle")
    work.wait()
    same(tensor, summed(ranks, 10))


@on_ranks(1, 2, 3)
def test_every_collective_has_a_handle(ranks: Ranks) -> None:
    group, n = ranks.group, ranks.size
    mine, others = values(ranks.rank, 6), [values(r, 6) for r in ranks.all]
    broadcast, total, scattered = mine.clone(), mine.clone(), torch.zeros(6)
    gathered, collected = [torch.zeros(6) for _ in ranks.all], [torch.zeros(6) for _ in ranks.all]
    flat, part, exchanged = torch.zeros(n, 6).view(-1), torch.zeros(6), torch.zeros(n)
    is_root = ranks.rank == 0
    works: list[Any] = [
        dist.broadcast(broadcast, group=group, group_src=n - 1, async_op=True),
        dist.reduce(total, group=group, group_dst=0, async_op=True),
        dist.scatter(
            scattered, list(others) if is_root else None, group=group, group_src=0, async_op=True
        ),
        dist.gather(mine, collected if is_root else None, group=group, group_dst=0, async_op=True),
        dist.all_gather(gathered, mine, group=group, async_op=True),
        dist.all_gather_into_tensor(flat, mine, group=group, async_op=True),
        dist.reduce_scatter_tensor(part, torch.ones(n * 6), group=group, async_op=True),
        dist.all_to_all_single(
            exchanged, torch.full((n,), float(ranks.rank)), group=group, async_op=True
        ),
        dist.barrier(group, async_op=True),
    ]
    for work in works:
        work.wait()
        assert work.is_completed() or ranks.backend == "gloo", "some of gloo's handles never say so"
    same(broadcast, others[-1], "broadcast")
    same(scattered, others[ranks.rank], "scatter")
    same(torch.stack(gathered), torch.stack(others), "all_gather")
    same(flat, torch.cat(others), "all_gather_into_tensor")
    same(part, torch.full((6,), float(n)), "reduce_scatter_tensor")
    same(exchanged, torch.arange(float(n)), "all_to_all_single")
    if is_root:
        same(torch.stack(collected), torch.stack(others), "gather")
        torch.testing.assert_close(total, sum(others))


@on_ranks(2, 3, 4)
def test_many_works_are_waited_for_in_any_order(ranks: Ranks) -> None:
    count = 60
    tensors = [brought(ranks, 1 + 97 * number, seed=number) for number in range(count)]
    works: list[Any] = [
        dist.all_reduce(tensor, group=ranks.group, async_op=True) for tensor in tensors
    ]
    for number in torch.randperm(
        count, generator=torch.Generator().manual_seed(ranks.rank)
    ).tolist():
        works[number].wait()
        same(tensors[number], summed(ranks, 1 + 97 * number, seed=number), number)


@on_ranks(2, 3)
def test_the_last_work_may_be_waited_for_alone(ranks: Ranks) -> None:
    tensors = [brought(ranks, 5_000, seed=number) for number in range(20)]
    works: list[Any] = [
        dist.all_reduce(tensor, group=ranks.group, async_op=True) for tensor in tensors
    ]
    works[-1].wait()
    same(tensors[-1], summed(ranks, 5_000, seed=19))
    for work in works:
        work.wait()


@on_ranks(2, 3)
def test_large_works_overlap_with_small_ones(ranks: Ranks) -> None:
    large, small = brought(ranks, 2_500_000), brought(ranks, 3, seed=1)
    works: list[Any] = [
        dist.all_reduce(large, group=ranks.group, async_op=True),
        dist.all_reduce(small, group=ranks.group, async_op=True),
    ]
    works[1].wait()
    works[0].wait()
    same(small, summed(ranks, 3, seed=1))
    same(large, summed(ranks, 2_500_000))


@on_ranks(2, 3)
def test_a_handle_may_be_forgotten(ranks: Ranks) -> None:
    kept = [brought(ranks, 700, seed=number) for number in range(10)]
    for tensor in kept:
        dist.all_reduce(tensor, group=ranks.group, async_op=True)
    dist.barrier(ranks.group)
    last = brought(ranks, 4)
    dist.all_reduce(last, group=ranks.group)
    same(last, summed(ranks, 4))


@on_ranks(2, 3)
def test_the_tensor_of_a_work_may_be_forgotten(ranks: Ranks) -> None:
    works = [
        dist.all_reduce(brought(ranks, 50_000), group=ranks.group, async_op=True) for _ in range(10)
    ]
    for work in works:
        assert work is not None
        work.wait()


@on_ranks(2, 3)
def test_waiting_twice_is_waiting_once(ranks: Ranks) -> None:
    tensor = brought(ranks, 9)
    work = dist.all_reduce(tensor, group=ranks.group, async_op=True)
    assert work is not None
    work.wait()
    work.wait()
    same(tensor, summed(ranks, 9))


@on_ranks(1, 2, 3)
def test_a_future_holds_the_result_and_goes_on(ranks: Ranks) -> None:
    tensor = brought(ranks, 11)
    work = dist.all_reduce(tensor, group=ranks.group, async_op=True)
    assert work is not None
    halved = work.get_future().then(lambda future: future.value()[0] / 2)
    same(halved.wait(), summed(ranks, 11) / 2)
    work.wait()


@on_ranks(2, 3)
def test_a_future_can_be_had_after_the_work_is_done(ranks: Ranks) -> None:
    tensor = brought(ranks, 11)
    work = dist.all_reduce(tensor, group=ranks.group, async_op=True)
    assert work is not None
    work.wait()
    future = work.get_future()
    future.wait()
    assert future.done()
    same(future.value()[0], summed(ranks, 11))


@on_ranks(2, 3)
def test_futures_of_many_works_are_collected(ranks: Ranks) -> None:
    tensors = [brought(ranks, 20, seed=number) for number in range(12)]
    works = [dist.all_reduce(tensor, group=ranks.group, async_op=True) for tensor in tensors]
    torch.futures.wait_all([work.get_future() for work in works if work is not None])
    for number, tensor in enumerate(tensors):
        same(tensor, summed(ranks, 20, seed=number), number)


@on_ranks(2)
def test_a_send_and_a_receive_have_handles(ranks: Ranks) -> None:
    tensor = values(0, 100) if ranks.rank == 0 else torch.zeros(100)
    work: Any = (
        dist.isend(tensor, group=ranks.group, group_dst=1)
        if ranks.rank == 0
        else dist.irecv(tensor, group=ranks.group, group_src=0)
    )
    work.wait()
    assert work.is_completed()
    same(tensor, values(0, 100))


@on_ranks(2, 3, backends=DURE)
def test_coalesced_all_reduces_are_waited_for_together(ranks: Ranks) -> None:
    tensors = [brought(ranks, 10 + number, seed=number) for number in range(5)]
    with _coalescing_manager(ranks.group, async_ops=True) as manager:
        for tensor in tensors:
            dist.all_reduce(tensor, group=ranks.group)
    manager.wait()
    for number, tensor in enumerate(tensors):
        same(tensor, summed(ranks, 10 + number, seed=number), number)


@on_ranks(1, 2, 3, backends=DURE)
def test_coalesced_works_are_done_when_the_block_ends(ranks: Ranks) -> None:
    tensors = [brought(ranks, 10, seed=number) for number in range(3)]
    gathered = [torch.zeros(ranks.size * 4) for _ in range(3)]
    parts = [torch.zeros(4) for _ in range(3)]
    with _coalescing_manager(ranks.group):
        for tensor in tensors:
            dist.all_reduce(tensor, group=ranks.group)
    with _coalescing_manager(ranks.group):
        for number, output in enumerate(gathered):
            dist.all_gather_into_tensor(
                output, values(ranks.rank, 4, seed=number), group=ranks.group
            )
    with _coalescing_manager(ranks.group):
        for number, part in enumerate(parts):
            dist.reduce_scatter_tensor(
                part, brought(ranks, ranks.size * 4, seed=number), group=ranks.group
            )
    for number in range(3):
        same(tensors[number], summed(ranks, 10, seed=number), ("all_reduce", number))
        same(
            gathered[number],
            torch.cat([values(r, 4, seed=number) for r in ranks.all]),
            ("all_gather", number),
        )
        same(parts[number], summed(ranks, 4, seed=number), ("reduce_scatter", number))


@on_ranks(2, 3)
def test_synchronous_calls_between_asynchronous_ones(ranks: Ranks) -> None:
    early, late = brought(ranks, 30_000), brought(ranks, 30, seed=2)
    work = dist.all_reduce(early, group=ranks.group, async_op=True)
    between = values(ranks.rank, 8)
    dist.broadcast(between, group=ranks.group, group_src=1)
    other = dist.all_reduce(late, group=ranks.group, async_op=True)
    same(between, values(1, 8))
    assert work is not None
    assert other is not None
    other.wait()
    work.wait()
    same(early, summed(ranks, 30_000))
    same(late, summed(ranks, 30, seed=2))


@on_ranks(2, 3, backends=DURE)
def test_the_same_tensor_is_reduced_again_and_again(ranks: Ranks) -> None:
    tensor = torch.ones(1_000)
    works: list[Any] = [dist.all_reduce(tensor, group=ranks.group, async_op=True) for _ in range(6)]
    for work in works:
        work.wait()
    same(tensor, torch.full((1_000,), float(ranks.size**6)))


@on_ranks(2, 3)
def test_a_rank_that_waits_lets_its_other_threads_run(ranks: Ranks) -> None:
    """Rank 0 comes when a thread of rank 1, which waits for it, has said so."""
    waiting: queue.Queue[str] = queue.Queue()

    def count() -> None:
        while wait_in := waiting.get():
            for _ in range(20):
                time.sleep(0.001)
            ranks.tell(f"a wait in {wait_in}")

    thread = threading.Thread(target=count, daemon=True)
    thread.start()
    for wait_in in ("all_reduce", "barrier", "recv"):
        if ranks.rank == 0:
            ranks.wait_for(f"a wait in {wait_in}")
        elif ranks.rank == 1:
            waiting.put(wait_in)
        if wait_in == "all_reduce":
            dist.all_reduce(torch.ones(10), group=ranks.group)
        elif wait_in == "barrier":
            dist.barrier(ranks.group)
        elif ranks.rank == 0:
            dist.send(torch.ones(1), group=ranks.group, group_dst=1)
        elif ranks.rank == 1:
            dist.recv(torch.ones(1), group=ranks.group, group_src=0)
    waiting.put("")
    thread.join()


@on_ranks(2, backends=DURE)
def test_waiting_has_a_limit_of_its_own_and_the_work_goes_on(ranks: Ranks) -> None:
    tensor = brought(ranks, 10)
    if ranks.rank == 0:
        ranks.wait_for("the end of a wait")
    work = dist.all_reduce(tensor, group=ranks.group, async_op=True)
    assert work is not None
    if ranks.rank == 1:
        with raises((RuntimeError, TimeoutError)):
            work.wait(timedelta(seconds=0.05))
        ranks.tell("the end of a wait")
    work.wait()
    same(tensor, summed(ranks, 10))


@on_ranks(2, backends=DURE)
def test_works_run_where_gradients_and_inference_mode_do_not_matter(ranks: Ranks) -> None:
    with torch.inference_mode():
        tensor, gathered = torch.ones(6)[::2], torch.zeros(6)
    works: list[Any] = [
        dist.all_reduce(tensor, group=ranks.group, async_op=True),
        dist.all_gather_into_tensor(
            gathered, torch.ones(3, requires_grad=True), group=ranks.group, async_op=True
        ),
    ]
    for work in works:
        work.wait()
    same(tensor, torch.full((3,), 2.0))
    same(gathered, torch.ones(6))
