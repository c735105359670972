"""The sends and receives that everything else is made of."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
from on_ranks import Measured, measured, on_ranks

from dure.collectives import Group, all_reduce
from dure.collectives.algorithms.native import is_staged
from dure.contracts.world import RankContext
from dure.errors import PeerLostError


@pytest.mark.parametrize("way", ["_transfer", "_transfer_by_way_of_memory", "_transfer_in_a_batch"])
def test_every_way_of_transfer_sends_and_receives_all_at_once(way: str) -> None:
    def program(context: RankContext) -> list[float]:
        group, arrived = context.group, torch.zeros(3)
        others = [rank for rank in range(3) if rank != group.rank]
        sends = [(torch.tensor([10.0 * group.rank + rank]), rank) for rank in others]
        getattr(group, way)(sends, [(arrived[rank : rank + 1], rank) for rank in others])
        return arrived.tolist()

    assert on_ranks(3, program) == [[0, 10, 20], [1, 0, 21], [2, 12, 0]]


def test_empty_tensors_do_not_travel_and_the_rest_is_counted() -> None:
    def program(context: RankContext) -> Measured:
        group, into = context.group, torch.zeros(2)
        peer = 1 - group.rank
        receives = [(into, peer)] if group.rank else []
        sends = [] if group.rank else [(torch.ones(2), peer), (torch.ones(0), peer)]

        def call() -> list[float]:
            group.transfer(sends, [*receives, (torch.ones(0), peer)])
            return into.tolist()

        return measured(group, call)

    assert on_ranks(2, program) == [Measured([0, 0], 8, 1), Measured([1, 1], 0, 0)]


def test_some_of_the_ranks_are_a_group_in_an_order_of_their_own() -> None:
    def program(context: RankContext) -> tuple[float, int] | None:
        if context.group.rank == 1:
            return None
        part = context.group.among([3, 0, 2])
        into = torch.zeros(1)
        part.exchange(
            torch.tensor([float(part.rank)]), (part.rank + 1) % 3, into, (part.rank - 1) % 3
        )
        return into.item(), part.global_rank(0)

    assert on_ranks(4, program) == [(0, 3), None, (1, 3), (2, 3)]


def test_who_does_not_come_to_a_new_group_is_named_as_in_the_world() -> None:
    def program(context: RankContext) -> str:
        if context.group.rank == 2:
            return "did not come"
        try:
            dist.new_group([1, 2], backend="dure", timeout=timedelta(seconds=0.5))
        except PeerLostError as error:
            return str(error)
        return "is no member"

    here, waits, away = on_ranks(3, program)
    assert (here, away) == ("is no member", "did not come")
    assert "rank 2 did not come within 0.5 s" in waits


def test_groups_over_one_process_group_keep_one_order() -> None:
    def program(context: RankContext) -> bool:
        running = all_reduce(torch.ones(200_000), dist.group.WORLD, async_op=True)
        all_reduce(torch.ones(3), context.group)
        return running.is_completed() and running.wait()[0].item() == 2

    assert on_ranks(2, program) == [True, True]


def test_a_group_says_what_carries_its_bytes() -> None:
    assert Group().backend(torch.device("cpu")) == ""
    assert on_ranks(2, lambda context: context.group.backend(torch.device("cpu"))) == [
        "gloo",
        "gloo",
    ]


def test_where_tensors_of_a_device_travel_follows_from_what_the_backend_carries() -> None:
    cpu, gpu = torch.device("cpu"), torch.device("cuda", 0)

    def program(context: RankContext) -> list[Any]:
        group = context.group
        found = [group._carried_on(devices).type for devices in ({cpu}, {gpu}, {cpu, gpu})]
        # No backend has a tensor of the device meta.
        staged = [is_staged(torch.empty(1, device=kind), group) for kind in ("cpu", "meta")]
        return [*found, *staged, group.backend(gpu)]

    # gloo reaches into a GPU's memory in collectives; dure's own is for the CPU.
    (found, _) = on_ranks(2, program, backend="gloo")
    assert found == ["cpu", "cuda", "cpu", False, True, "gloo"]
    (found, _) = on_ranks(2, program, backend="dure")
    assert found == ["cpu", "cpu", "cpu", False, True, ""]


def test_what_a_group_is_at_is_what_its_copies_are_at() -> None:
    group = Group()
    quiet, part = group.unmetered(), group.among([0])
    group.step = "step 5"
    assert (quiet.step, part.step) == ("step 5", "step 5")
    quiet.step = "step 6"
    assert group.step == "step 6"
