"""Groups: of some ranks, overlapping, nested, destroyed and made again; the monitored barrier; what
a group keeps."""

from __future__ import annotations

import gc
import os
import threading
import time
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from harness import DURE, Ranks, on_ranks, raises, same, values

from dure.errors import PeerLostError


def summed(group: Any, n: int = 10) -> None:
    """An all-reduce in a group, checked."""
    members = dist.get_process_group_ranks(group)
    tensor = torch.full((n,), float(dist.get_rank()))
    dist.all_reduce(tensor, group=group)
    same(tensor, torch.full((n,), float(sum(members))), members)


@on_ranks(4)
def test_groups_of_some_ranks(ranks: Ranks) -> None:
    for members in ([0, 1], [1, 3], [2], [0, 2, 3], [3, 0]):
        group = ranks.new_group(members)
        if ranks.rank in members:
            assert dist.get_world_size(group) == len(members)
            summed(group)
            tensor = values(ranks.rank, 6)
            dist.broadcast(tensor, members[-1], group=group)
            same(tensor, values(members[-1], 6), members)


@on_ranks(4)
def test_overlapping_groups_are_used_in_turn(ranks: Ranks) -> None:
    pairs = [[0, 1], [1, 2], [2, 3], [0, 3]]
    groups = [ranks.new_group(pair) for pair in pairs]
    for _ in range(30):
        for pair, group in zip(pairs, groups, strict=True):
            if ranks.rank in pair:
                summed(group)
        summed(ranks.group)


@on_ranks(4)
def test_works_of_overlapping_groups_are_under_way_at_once(ranks: Ranks) -> None:
    sets = [[0, 1], [1, 2, 3], [0, 2], [0, 1, 2, 3], [1, 3]]
    groups = [ranks.new_group(members) for members in sets]
    for n in (10, 50_000):
        begun = []
        for number, (members, group) in enumerate(zip(sets, groups, strict=True)):
            if ranks.rank in members:
                tensor = torch.full((n,), float(ranks.rank + number))
                begun.append(
                    (dist.all_reduce(tensor, group=group, async_op=True), tensor, members, number)
                )
        for work, tensor, members, number in begun if ranks.rank % 2 else begun[::-1]:
            assert work is not None
            work.wait()
            same(tensor, torch.full((n,), float(sum(r + number for r in members))), members)


@on_ranks(4)
def test_two_groups_of_the_same_ranks_are_two(ranks: Ranks) -> None:
    one, other = ranks.new_group([0, 1, 2, 3]), ranks.new_group([0, 1, 2, 3])
    first, second = torch.ones(100), torch.full((7,), 2.0)
    groups = [(one, first), (other, second)]
    works: list[Any] = [
        dist.all_reduce(tensor, group=group, async_op=True)
        for group, tensor in (
            groups if ranks.rank % 2 else groups[::-1]
        )  # each group has an order of its own
    ]
    for work in works:
        work.wait()
    same(first, torch.full((100,), 4.0))
    same(second, torch.full((7,), 8.0))


@on_ranks(4)
def test_two_threads_use_two_groups(ranks: Ranks) -> None:
    groups = [ranks.new_group([0, 1, 2, 3]) for _ in range(2)]
    errors: list[BaseException] = []

    def many(group: Any) -> None:
        try:
            for _ in range(100):
                summed(group)
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=many, args=(group,)) for group in groups]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not errors, errors


@on_ranks(4)
def test_messages_in_a_group_go_by_the_ranks_of_the_world(ranks: Ranks) -> None:
    group = ranks.new_group([1, 3])
    tensor = torch.tensor([float(ranks.rank)])
    if ranks.rank == 3:
        dist.send(tensor, 1, group=group)
    elif ranks.rank == 1:
        assert dist.recv(tensor, 3, group=group) == 3
        same(tensor, torch.tensor([3.0]))
        dist.send(torch.tensor([9.0]), group=group, group_dst=1)
    if ranks.rank == 3:
        assert dist.recv(tensor, group=group) == 1
        same(tensor, torch.tensor([9.0]))


@on_ranks(4, backends=DURE)
def test_groups_are_made_and_destroyed_many_times(ranks: Ranks) -> None:
    for number in range(10):
        members = [[0, 1, 2, 3], [0, 1], [2, 3]][number % 3]
        group = ranks.new_group(members)
        if ranks.rank in members:
            summed(group)
            ranks._made.remove(group)
            dist.destroy_process_group(group)
    summed(ranks.group)


def held() -> tuple[int, int, int, int]:
    """Open files, mapped anonymous files, threads, and megabytes of shared memory of this
    process."""
    gc.collect()
    with open("/proc/self/maps") as maps:
        mapped = sum(
            "memfd:" in line or "/dev/shm" in line or "dure" in line.rpartition(" ")[2]
            for line in maps
        )
    with open("/proc/self/status") as status:
        shared = (
            next(int(line.split()[1]) for line in status if line.startswith("RssShmem")) // 1024
        )
    return len(os.listdir("/proc/self/fd")), mapped, len(os.listdir("/proc/self/task")), shared


@on_ranks(4, backends=DURE)
def test_a_destroyed_group_gives_back_what_it_held(ranks: Ranks) -> None:
    def use() -> None:
        group = ranks.new_group([0, 1, 2, 3])
        summed(group, 600_000)
        tensor = torch.zeros(100_000)
        work = dist.all_reduce(tensor, group=group, async_op=True)
        assert work is not None
        work.wait()
        message = torch.zeros(100_000)
        if ranks.rank == 0:
            dist.send(message, 1, group=group)
        elif ranks.rank == 1:
            dist.recv(message, 0, group=group)
        dist.barrier(group)
        ranks._made.remove(group)
        dist.destroy_process_group(group)

    use()
    before = held()
    for _ in range(4):
        use()
    until = time.monotonic() + 5  # a thread that has been told to end needs a moment
    while (
        any(new > old for old, new in zip(before, held(), strict=True)) and time.monotonic() < until
    ):
        time.sleep(0.01)
    after = held()
    assert all(new <= old for old, new in zip(before, after, strict=True)), (
        f"it grows: from {before} to {after}"
    )


@on_ranks(4, backends=DURE)
def test_nothing_is_left_in_dev_shm_while_groups_live(ranks: Ranks) -> None:
    group = ranks.new_group([0, 1, 2, 3])
    summed(group, 600_000)
    named = [name for name in os.listdir("/dev/shm") if "dure" in name]
    assert not named, "a group that is killed would leave them for ever"


@on_ranks(4, backends=DURE)
def test_a_group_can_be_made_by_its_members_alone(ranks: Ranks) -> None:
    if ranks.rank in (1, 2):
        group = ranks.new_group([1, 2], use_local_synchronization=True)
        summed(group)
    dist.barrier()


@on_ranks(1, 2, 3)
def test_a_group_says_who_it_is(ranks: Ranks) -> None:
    assert dist.get_backend(ranks.group) == ("gloo" if ranks.backend == "gloo" else "dure")
    assert (ranks.group.rank(), ranks.group.size()) == (ranks.rank, ranks.size)
    members = dist.get_process_group_ranks(ranks.group)
    assert [dist.get_group_rank(ranks.group, member) for member in members] == list(ranks.all)
    assert ranks.group.group_name


@on_ranks(1, 2, 3)
def test_a_monitored_barrier_that_all_reach(ranks: Ranks) -> None:
    for wait_all_ranks in (False, True):
        ranks.group.monitored_barrier(timedelta(seconds=20), wait_all_ranks)


@on_ranks(4, backends=DURE)
def test_a_monitored_barrier_names_who_did_not_come(ranks: Ranks) -> None:
    group = ranks.new_group([0, 1, 2, 3], 10)
    if ranks.rank != 2:
        with raises(PeerLostError, "rank 2") as caught:
            group.monitored_barrier(timedelta(seconds=3))
        assert caught[0].ranks == (2,)
        # What torch's own tests look for in gloo's errors.
        said = f"Rank {ranks.rank} successfully reached monitoredBarrier, but received errors"
        if ranks.rank == 0:
            said = "[Rank 0]: Rank 2 failed to pass monitoredBarrier in 3000 ms"
        assert said in str(caught[0])
        assert " Timed out waiting 3000ms" in str(caught[0])
    dist.barrier()


@on_ranks(4, backends=DURE)
def test_a_monitored_barrier_names_all_who_did_not_come(ranks: Ranks) -> None:
    group = ranks.new_group([0, 1, 2, 3], 10)
    if ranks.rank in (0, 3):
        with raises(PeerLostError, "ranks 1, 2") as caught:
            group.monitored_barrier(timedelta(seconds=3), True)
        assert caught[0].ranks == (1, 2)
        if ranks.rank == 0:
            assert "Ranks 1, 2 failed to pass monitoredBarrier in 3000 ms" in str(caught[0])
    dist.barrier()
