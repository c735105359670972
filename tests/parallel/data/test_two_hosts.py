"""Data parallel and ZeRO between hosts, messages under way at once: the path of one process, and
what is counted."""

from __future__ import annotations

import itertools
import sys
from collections.abc import Callable
from dataclasses import replace
from datetime import timedelta
from typing import Any

import cloudpickle
import loops
import torch
import torch.distributed as dist
from loops import batches, both, distance, network, part, train, vector
from torch.nn import functional as F

import dure
import two_hosts as emulation
from dure.collectives.group import Group
from dure.contracts.world import RankContext
from dure.parallel import DistributedDataParallel, ZeroRedundancy
from two_hosts import ADDRESSES, TwoHosts

for module in (sys.modules[__name__], loops, emulation):
    cloudpickle.register_pickle_by_value(module)


def on_two_hosts(hosts: TwoHosts, body: Callable[[RankContext], Any]) -> list[Any]:
    """What `body` returns on two ranks, each on a host of its own, in a group of the backend
    dure."""

    def program(context: RankContext) -> list[Any]:
        rank, patience = context.group.rank, timedelta(seconds=20)
        told: list[Any] = [None]
        if rank == 0:
            hosts.enter(0)
            store = dist.TCPStore(
                ADDRESSES[0], 0, 2, True, timeout=patience, wait_for_workers=False
            )
            told = [store.port]
        dist.broadcast_object_list(told, 0)
        if rank != 0:
            hosts.enter(1)
            store = dist.TCPStore(ADDRESSES[0], told[0], 2, False, timeout=patience)
        dist.destroy_process_group()
        dist.init_process_group("dure", store=store, rank=rank, world_size=2, timeout=patience)
        results: list[Any] = [None, None]
        dist.all_gather_object(results, body(replace(context, group=Group.default())))
        dist.destroy_process_group()
        return results

    results: list[Any] = dure.Processes(2, backend="gloo").run(program, lambda event: None)
    return results


def test_hosts_walk_the_path_of_one_process_with_any_buckets(hosts: TwoHosts) -> None:
    def body(context: RankContext) -> list[tuple[float, bytes]]:
        results = [both(context, steps=8, bucket_bytes=size) for size in (1, 600, None)]
        return [*results, both(context, steps=8, bucket_bytes=1, all_reduce="ring")]

    first, second = on_two_hosts(hosts, body)
    for (far, bits), (_, other) in zip(first, second, strict=True):
        assert far < 1e-12
        assert bits == other
    assert len({bits for _, bits in first}) == 1, "two numbers have one sum"


def test_zero_walks_the_path_of_one_process_too(hosts: TwoHosts) -> None:
    def body(context: RankContext) -> list[tuple[float, bool, bytes, list[int]]]:
        joint, alone, results = batches(5, 8), network(), []
        train(alone, joint)
        for stage, overlap in [(1, False), (1, True), (2, False), (2, True), (3, False)]:
            model = network()
            optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
            zero = ZeroRedundancy(
                model, optimizer, stage, context.group, units=60, overlap_gather=overlap
            )
            sent = []
            for batch in joint:
                before = context.group.meter.counters.bytes_sent
                inputs, targets = part(batch, context)
                optimizer.zero_grad()
                F.cross_entropy(model(inputs), targets).backward()
                optimizer.step()
                sent.append(
                    context.group.meter.counters.bytes_sent - before - zero.bytes_per_step()
                )
            whole = network()
            whole.load_state_dict(zero.state_dict(everywhere=True))
            results.append(
                (
                    distance(whole, alone),
                    zero.wire.planned == overlap,
                    vector(whole).numpy().tobytes(),
                    sent[1:],
                )
            )
        return results

    first, second = on_two_hosts(hosts, body)
    assert [row[2] for row in first] == [row[2] for row in second]
    for far, as_asked, _, beyond in first:
        assert far < 1e-12
        assert as_asked
        assert not any(beyond), "bytes beyond the formula"


def test_transfers_follow_each_other_and_are_all_told(hosts: TwoHosts) -> None:
    def body(context: RankContext) -> list[tuple[int, float, float]]:
        model = DistributedDataParallel(network(), context.group, bucket_bytes=1)
        train(model, [part(batch, context) for batch in batches(3, 8)])
        return [
            (transfer.number, transfer.start, transfer.end) for transfer in model.reducer.transfers
        ]

    for transfers in on_two_hosts(hosts, body):
        assert [number for number, _, _ in transfers] == list(range(len(transfers)))
        assert len(transfers) >= 6, "a message for each gradient"
        for (_, start, end), (_, following, _) in itertools.pairwise(transfers):
            assert start <= end <= following
