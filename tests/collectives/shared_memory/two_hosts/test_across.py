"""Groups that span hosts, on two that are emulated: right results, no byte too many, the same error
on all ranks."""

from __future__ import annotations

import os
import pickle
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import cloudpickle
import pytest
import thread_ranks
import torch
import torch.distributed as dist
from thread_ranks import CORES, Core, built, random_bits, same_bits

import dure
import two_hosts as emulation
from dure.collectives.shared_memory import Options, SharedMemoryGroup
from dure.collectives.shared_memory.calls import OPERATIONS, SENSIBLE
from dure.collectives.shared_memory.portable import reduced
from dure.contracts.world import RankContext
from dure.errors import DureError, MismatchError, PeerLostError
from two_hosts import ADDRESSES, TwoHosts, bytes_over_the_cable

for module in (sys.modules[__name__], thread_ranks, emulation):
    cloudpickle.register_pickle_by_value(module)  # a rank need not import pytest

LIMIT = 2.0
SOON = 10.0
"""Seconds in which a death is noticed, on a busy machine too."""

Layout = tuple[int, ...]
PAIRS: Layout = (0, 0, 1, 1)
UNEQUAL: Layout = (0, 1, 0)
ALONE: Layout = (0, 1)
"""The host of each rank."""


@dataclass
class Stage:
    """Two hosts, and where the ranks of a group live. keeper: the rank that keeps the store."""

    hosts: TwoHosts
    layout: Layout
    core: Core
    keeper: int = 0

    def play(self, body: Callable[[int], object], seconds: float = 20.0) -> None:
        """Plays the body on every rank; the default group of torch.distributed then spans both
        hosts."""

        def program(context: RankContext) -> None:
            rank, size = dist.get_rank(), dist.get_world_size()
            told: list[Any] = [None]
            if rank == self.keeper:
                store = self.store(rank, 0)
                told = [store.port]
            dist.broadcast_object_list(told, self.keeper)
            if rank != self.keeper:
                store = self.store(rank, told[0])
            dist.destroy_process_group()
            limit, options = timedelta(seconds=seconds), Options(core=self.core)
            dist.init_process_group(
                "dure", store=store, rank=rank, world_size=size, timeout=limit, pg_options=options
            )
            body(rank)
            dist.destroy_process_group()

        dure.Processes(len(self.layout), 60).run(program, lambda event: None)

    def store(self, rank: int, port: int) -> Any:
        """Moves the rank to its host, and joins it to the store there."""
        self.hosts.enter(self.layout[rank])
        keeps, patience = rank == self.keeper, timedelta(seconds=20)
        where = ADDRESSES[self.layout[self.keeper]]
        return dist.TCPStore(
            where, port, len(self.layout), keeps, timeout=patience, wait_for_workers=False
        )


@pytest.fixture(params=CORES)
def core(request: pytest.FixtureRequest) -> Core:
    return request.param  # type: ignore[no-any-return]


on_both_layouts = pytest.mark.parametrize(
    "layout", [PAIRS, UNEQUAL], ids=["two and two", "two and one, mixed"]
)


@on_both_layouts
def test_reductions_are_right_and_the_same_on_all_ranks(
    hosts: TwoHosts, core: Core, layout: Layout
) -> None:
    size = len(layout)

    def body(rank: int) -> None:
        for dtype, op in sorted(SENSIBLE, key=str):
            given = [((torch.arange(1000) + 7 * r) % 4).to(dtype) for r in range(size)]
            whole, own = reduced(given, op), given[rank].clone()
            ours = getattr(dist.ReduceOp, OPERATIONS[op].upper())
            dist.all_reduce(own, ours)
            same_bits(own, whole)
            own = given[rank].clone()
            dist.reduce(own, size - 1, ours)
            same_bits(own, whole if rank == size - 1 else given[rank])
            own = whole.new_empty(5)
            dist.reduce_scatter_tensor(own, given[rank][: 5 * size].clone(), ours)
            same_bits(own, whole[5 * rank : 5 * rank + 5])
        for op in (OPERATIONS.index("sum"), OPERATIONS.index("avg")):
            given = [torch.arange(1000.0) + 7 * r for r in range(size)]
            own = given[rank].clone()
            world().begun.begin_all_reduce(own, op)()  # done at once where a host has several ranks
            same_bits(own, reduced(given, op))
        noise = random_bits(100_000, torch.float32, rank)
        dist.all_reduce(noise)
        everybodys = [torch.empty_like(noise) for _ in range(size)]
        dist.all_gather(everybodys, noise)
        for other in everybodys:
            same_bits(other, noise)

    Stage(hosts, layout, core).play(body)


def over_the_cable(call: Callable[[], object]) -> list[int]:
    """Bytes that this host receives and sends while something is called."""
    start = bytes_over_the_cable()
    call()
    return [now - then for now, then in zip(bytes_over_the_cable(), start, strict=True)]


def test_several_sums_may_be_under_way_between_ranks_that_are_alone_on_their_hosts(
    hosts: TwoHosts, core: Core
) -> None:
    def body(rank: int) -> None:
        everybodys, ends = [], []
        for number, (dtype, op) in enumerate(sorted(SENSIBLE, key=str)):
            given = [((torch.arange(1000 + 7 * number) + r) % 4).to(dtype) for r in range(2)]
            own = given[rank].clone()
            everybodys.append((own, reduced(given, op)))
            ends.append(world().begun.begin_all_reduce(own, op))
            if number % 5 == 0:  # what is not planned goes its own way meanwhile
                one = torch.ones(3)
                dist.all_reduce(one)
                assert one.eq(2).all()
        times = [end() for end in ends]
        assert all(0 < moment <= time.perf_counter() for moment in times)
        for own, whole in everybodys:
            same_bits(own, whole)
        idle = over_the_cable(dist.barrier)
        sums = over_the_cable(
            lambda: [
                end()
                for end in [world().begun.begin_all_reduce(torch.ones(S // 16)) for _ in range(4)]
            ]
        )
        for sent, more in zip(sums, idle, strict=True):
            assert sent <= 1.05 * S + 30_000 + 3 * more

    Stage(hosts, ALONE, core).play(body)


def test_scatters_and_gathers_may_be_under_way_too(hosts: TwoHosts, core: Core) -> None:
    def body(rank: int) -> None:
        everybodys, ends = [], []
        for number, (dtype, op) in enumerate(sorted(SENSIBLE, key=str)):
            n = 500 + 7 * number
            given = [((torch.arange(2 * n) + r) % 4).to(dtype) for r in range(2)]
            own, whole = torch.empty(n, dtype=dtype), torch.empty(2 * n, dtype=dtype)
            whole[rank * n : (rank + 1) * n] = given[rank][:n]
            begun = world().begun.begin_reduce_scatter(own, given[rank].clone(), op)
            ends += [
                begun.end,
                world().begun.begin_all_gather(whole, whole[rank * n : (rank + 1) * n]),
            ]
            assert begun.is_read()
            everybodys.append((own, reduced(given, op)[rank * n : (rank + 1) * n]))
            everybodys.append((whole, torch.cat([each[:n] for each in given])))
        times = [end() for end in reversed(ends)]  # in any order
        assert all(0 < moment <= time.perf_counter() for moment in times)
        for own, expected in everybodys:
            same_bits(own, expected)
        idle = over_the_cable(dist.barrier)
        whole, own = torch.ones(S // 4), torch.ones(S // 8)
        for begin in (
            lambda: world().begun.begin_reduce_scatter(own, whole).end,
            lambda: world().begun.begin_all_gather(whole, own),
        ):
            dist.barrier()  # what was sent before has left
            for sent, more in zip(over_the_cable(lambda begin=begin: begin()()), idle, strict=True):  # type: ignore[misc]
                assert sent <= 1.05 * S / 2 + 30_000 + 3 * more

    Stage(hosts, ALONE, core).play(body)


@on_both_layouts
def test_copies_and_messages_arrive(hosts: TwoHosts, core: Core, layout: Layout) -> None:
    size = len(layout)

    def body(rank: int) -> None:
        assert [list(ranks) for ranks in world().hosts] == [
            [r for r in range(size) if layout[r] == host] for host in (0, 1)
        ]
        for n in (3, 50_000):
            mine, everybodys = (
                torch.full((n,), float(rank)),
                torch.arange(float(size)).repeat_interleave(n),
            )
            for root in range(size):
                tensor = mine.clone()
                dist.broadcast(tensor, root)
                assert tensor.eq(root).all()
                parts = list(everybodys.clone().chunk(size)) if rank == root else None
                dist.scatter(tensor, parts, root)
                assert torch.equal(tensor, mine)
                parts = [torch.empty(n) for _ in range(size)] if rank == root else None
                dist.gather(mine, parts, root)
                assert parts is None or torch.equal(torch.cat(parts), everybodys)
            whole = torch.empty(n * size)
            dist.all_gather_into_tensor(whole, mine)
            assert torch.equal(whole, everybodys)
            dist.all_to_all_single(whole, mine.repeat(size))
            assert torch.equal(whole, everybodys)
            incoming = torch.empty(n)
            work: Any = dist.irecv(incoming, (rank - 1) % size, tag=4)
            dist.send(mine, (rank + 1) % size, tag=4)
            work.wait()
            assert incoming.eq((rank - 1) % size).all()
        objects: list[Any] = [None] * size
        dist.all_gather_object(objects, {"rank": rank})
        assert objects == [{"rank": r} for r in range(size)]
        works: list[Any] = [dist.all_reduce(torch.ones(10), async_op=True) for _ in range(5)]
        for work in works:
            work.wait()
        dist.barrier()

    Stage(hosts, layout, core).play(body)


Deed = Callable[[], object]

S = 4_000_000
"""Bytes."""


def crossing() -> dict[str, tuple[int, int, Callable[[int], object]]]:
    """What each call has to send from host 0 to host 1 and back, with two ranks on each, and the
    call of a rank."""
    part = S // 4
    return {
        "all-reduce": (S, S, lambda rank: dist.all_reduce(torch.ones(S // 4))),
        "broadcast": (S, 0, lambda rank: dist.broadcast(torch.ones(S // 4), 1)),
        "all-gather": (
            2 * part,
            2 * part,
            lambda rank: dist.all_gather_into_tensor(torch.empty(S // 4), torch.ones(part // 4)),
        ),
        "reduce-scatter": (
            2 * part,
            2 * part,
            lambda rank: dist.reduce_scatter_tensor(torch.empty(part // 4), torch.ones(S // 4)),
        ),
        "all-to-all": (
            S,
            S,
            lambda rank: dist.all_to_all_single(torch.empty(S // 4), torch.ones(S // 4)),
        ),
        "message": (0, S, lambda rank: message(rank)),
    }


def message(rank: int) -> None:
    if rank == 3:
        dist.send(torch.ones(S // 4), 1)
    if rank == 1:
        dist.recv(torch.empty(S // 4), 3)


def test_no_more_bytes_cross_the_cable_than_have_to(hosts: TwoHosts, tmp_path: Path) -> None:
    def body(rank: int) -> None:
        for name, (leaving, coming, call) in crossing().items():
            dist.barrier()
            before = bytes_over_the_cable()
            dist.barrier()
            call(rank)
            dist.barrier()
            received, sent = (
                now - then for now, then in zip(bytes_over_the_cable(), before, strict=True)
            )
            if rank == 0:
                (tmp_path / name).write_bytes(pickle.dumps(((leaving, coming), (sent, received))))

    Stage(hosts, PAIRS, "torch").play(body)
    for name in crossing():
        for optimum, counted in zip(*pickle.loads((tmp_path / name).read_bytes()), strict=True):
            assert optimum <= counted <= 1.05 * optimum + 30_000, (
                f"{name}: {counted} bytes for {optimum}"
            )


@on_both_layouts
def test_who_calls_something_else_is_told_everywhere_and_the_group_works_on(
    hosts: TwoHosts, core: Core, layout: Layout
) -> None:
    size = len(layout)

    def body(rank: int) -> None:
        tensor = torch.ones(3)
        for n in (3, 300_000):
            with raises(MismatchError) as caught:
                dist.all_reduce(torch.ones(n + (rank == 1)))
            texts: list[Any] = [None] * size
            dist.all_gather_object(texts, str(caught[0]))
            assert len(set(texts)) == 1
            assert f"rank 1 called all_reduce(sum, {n + 1} float32)" in texts[0]
        with raises(MismatchError):
            dist.barrier() if rank == 0 else dist.all_reduce(tensor)
        dist.all_reduce(tensor)
        assert tensor.eq(size).all()

    Stage(hosts, layout, core).play(body)


@dataclass
class Told:
    error: PeerLostError
    seconds: float


def survivors(
    stage: Stage,
    folder: Path,
    victim: int,
    fate: Callable[[], object],
    call: Callable[[], object],
    seconds: float = 20.0,
) -> dict[int, Told]:
    """What each rank is told while it waits for the victim, which meets its fate; the victim too,
    if it lives on."""

    def body(rank: int) -> None:
        for _ in range(2):
            dist.all_reduce(torch.ones(1000))
        dist.barrier()
        started = time.monotonic()
        if rank == victim:
            fate()
        try:
            while True:
                call()
        except PeerLostError as error:
            told = pickle.dumps((error, time.monotonic() - started))
            (folder / str(rank)).write_bytes(told)
        time.sleep(0.5)  # who keeps the store stays for those who are told a moment later

    with suppress(DureError):
        stage.play(body, seconds)
    told = {int(path.name): Told(*pickle.loads(path.read_bytes())) for path in folder.iterdir()}
    assert set(told) | {victim} == set(range(len(stage.layout))), f"only {sorted(told)} were told"
    return told


def killed() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def some_sum() -> None:
    dist.all_reduce(torch.ones(1000))


def long_sum() -> None:
    dist.all_reduce(torch.ones(2_000_000))


@pytest.mark.parametrize(
    ("victim", "call"),
    [(0, some_sum), (2, dist.barrier), (3, some_sum)],
    ids=["the first leader", "the second leader", "no leader"],
)
def test_a_killed_rank_is_named_on_both_hosts(
    hosts: TwoHosts, core: Core, tmp_path: Path, victim: int, call: Callable[[], object]
) -> None:
    told = survivors(Stage(hosts, PAIRS, core, keeper=1), tmp_path, victim, killed, call)
    assert len({str(each.error) for each in told.values()}) == 1, told
    for each in told.values():
        assert each.error.ranks == (victim,)
        assert each.seconds < SOON


def test_a_rank_killed_while_megabytes_cross_is_named(
    hosts: TwoHosts, core: Core, tmp_path: Path
) -> None:
    def fate() -> None:
        threading.Timer(0.1, killed).start()

    told = survivors(Stage(hosts, PAIRS, core), tmp_path, 2, fate, long_sum)
    assert len({str(each.error) for each in told.values()}) == 1, told
    assert all(each.error.ranks == (2,) and each.seconds < SOON for each in told.values()), told


def planned_sums() -> None:
    for end in [world().begun.begin_all_reduce(torch.ones(500_000)) for _ in range(4)]:
        end()


def planned_scatters() -> None:
    for begun in [
        world().begun.begin_reduce_scatter(torch.ones(500_000), torch.ones(1_000_000))
        for _ in range(4)
    ]:
        begun.end()


def planned_gathers() -> None:
    for end in [
        world().begun.begin_all_gather(torch.ones(1_000_000), torch.ones(500_000)) for _ in range(4)
    ]:
        end()


@built
def test_planned_calls_that_differ_are_told_on_both_hosts_and_the_group_works_on(
    hosts: TwoHosts,
) -> None:
    def body(rank: int) -> None:
        ends = [world().begun.begin_all_reduce(torch.ones(n)) for n in (10, 500_000 + rank, 10)]
        ends[0]()
        with raises(MismatchError) as caught:
            ends[1]()
        ends[2]()
        assert str(caught[0]) == (
            "the ranks disagree at call 2: rank 0 called all_reduce(sum, 500000 float32); "
            "rank 1 called all_reduce(sum, 500001 float32)"
        )
        dist.barrier()

    Stage(hosts, ALONE, "c").play(body)


def test_a_killed_rank_whose_child_lives_on_is_named(
    hosts: TwoHosts, core: Core, tmp_path: Path
) -> None:
    def fate() -> None:
        if os.fork() == 0:  # as a loader of data, which has a copy of all connections
            time.sleep(LIMIT)
            os._exit(0)
        killed()

    told = survivors(Stage(hosts, ALONE, core), tmp_path, 1, fate, planned_sums, 3 * LIMIT)
    assert told[0].error.ranks == (1,)


@pytest.mark.parametrize(
    ("calls", "dies"),
    [
        (planned_sums, True),
        (planned_sums, False),
        (planned_scatters, True),
        (planned_gathers, True),
    ],
    ids=["sums, killed", "sums, hung", "scatters, killed", "gathers, killed"],
)
def test_who_is_lost_while_planned_calls_are_under_way_is_named(
    hosts: TwoHosts, core: Core, tmp_path: Path, calls: Callable[[], None], dies: bool
) -> None:
    def fate() -> None:
        threading.Timer(0.1, killed).start() if dies else time.sleep(LIMIT + 2)

    limit = (
        3 * LIMIT if dies else LIMIT
    )  # gloo tells most deaths at once, and leaves some to the time-out
    told = survivors(Stage(hosts, ALONE, core), tmp_path, 1, fate, calls, limit)
    assert told[0].error.ranks == (1,)
    assert told[0].seconds < LIMIT + 2 + SOON


@pytest.mark.parametrize(
    ("core", "victim"),
    [pytest.param("c", 0, marks=built), ("torch", 2), ("torch", 3)],
    ids=["the first leader", "the second leader", "no leader"],
)
def test_a_hung_rank_is_named_on_both_hosts_and_is_told_too(
    hosts: TwoHosts, core: Core, tmp_path: Path, victim: int
) -> None:
    stage = Stage(hosts, PAIRS, core, keeper=1)
    told = survivors(stage, tmp_path, victim, lambda: time.sleep(LIMIT + 2), some_sum, LIMIT)
    assert len({str(each.error) for each in told.values()}) == 1, told
    for rank, each in told.items():
        assert each.error.ranks == (victim,)
        assert f"did not come within {LIMIT:g} s" in str(each.error)
        assert each.seconds < LIMIT + 2 + SOON, f"rank {rank}"


def test_everybody_ends_when_the_store_dies_with_its_rank(
    hosts: TwoHosts, core: Core, tmp_path: Path
) -> None:
    told = survivors(Stage(hosts, PAIRS, core), tmp_path, 0, killed, some_sum)
    assert all(each.seconds < SOON for each in told.values()), told


def world() -> SharedMemoryGroup:
    group: Any = dist.group.WORLD
    return group  # type: ignore[no-any-return]


@contextmanager
def raises(kind: type[BaseException]) -> Iterator[list[Any]]:
    """As pytest's, without pytest in the ranks. Yields a list that will hold the error."""
    caught: list[Any] = []
    try:
        yield caught
    except kind as error:
        caught.append(error)
    else:
        raise AssertionError(f"nothing was raised, not {kind}")
