"""Ranks that die, fall silent or leave while others wait for them: the others are told who, and
nothing is left."""

from __future__ import annotations

import gc
import os
import pickle
import signal
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import cloudpickle
import pytest
import torch
import torch.distributed as dist
from harness import DURE, Backend, make_group, need, raises, same

import dure
from dure.contracts.world import RankContext
from dure.errors import PeerLostError
from dure.worlds.processes.fork_server import server

cloudpickle.register_pickle_by_value(sys.modules[__name__])

Deed = Callable[[Any], object]
"""What a rank does with the group."""

VICTIM = 2
SOON = 10.0
"""Seconds in which a death must be noticed, on a busy machine too; the groups themselves wait for
longer."""
LIMIT = 2.0
"""The time-out of groups that shall run into it."""

on_both_cores = pytest.mark.parametrize("core", DURE)


@dataclass
class Told:
    """The error that a survivor got, and after how long."""

    error: PeerLostError
    seconds: float


@dataclass
class Scene:
    """Four ranks: one meets its fate, the others go on until they are told."""

    core: Backend
    folder: Path

    def play(
        self, fate: Deed, others: Deed, seconds: float = 30.0, victim: int = VICTIM
    ) -> dict[int, Told]:
        """By rank, what the others were told; all of them must be. seconds: the time-out of the
        group."""
        folder, core = self.folder, self.core

        def program(context: RankContext) -> None:
            group = make_group([0, 1, 2, 3], core, seconds)
            for _ in range(3):
                reduce(group)
            if dist.get_rank() == victim:
                fate(group)
                return
            started = time.monotonic()
            try:
                others(group)
            except PeerLostError as error:
                told = Told(error, time.monotonic() - started)
                (folder / str(dist.get_rank())).write_bytes(pickle.dumps((error, told.seconds)))
                raise

        with pytest.raises(PeerLostError):
            dure.Processes(4, 60).run(program, lambda event: None)
        told = {
            int(path.name): Told(*pickle.loads(path.read_bytes())) for path in self.folder.iterdir()
        }
        assert sorted(told) == [rank for rank in range(4) if rank != victim], (
            "not all others were told"
        )
        for rank, each in told.items():
            assert each.error.ranks == (victim,), f"rank {rank} was told that {each.error}"
            assert str(each.error).startswith(f"rank {victim} ")
        return told


@pytest.fixture
def scene(core: Backend, tmp_path: Path) -> Scene:
    need(core)
    return Scene(core, tmp_path)


def reduce(group: Any, n: int = 1_000) -> None:
    dist.all_reduce(torch.ones(n), group=group)


def for_ever(group: Any, n: int = 1_000) -> None:
    while True:
        reduce(group, n)


def killed(group: Any) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def stopped(group: Any) -> None:
    os.kill(os.getpid(), signal.SIGSTOP)


def asynchronously(group: Any) -> None:
    works: list[Any] = [
        dist.all_reduce(torch.ones(1_000), group=group, async_op=True) for _ in range(5)
    ]
    for work in works:
        work.wait()


def by_a_future(group: Any) -> None:
    work: Any = dist.all_reduce(torch.ones(1_000), group=group, async_op=True)
    try:
        work.get_future().wait()
    except RuntimeError:  # through C++ it comes as its text
        work.wait()


def begun_and_ended(group: Any) -> None:
    for begun in [
        group.begun.begin_reduce_scatter(torch.empty(1_000), torch.ones(4_000)) for _ in range(3)
    ]:
        begun.end()


def reductions_begun_and_ended(group: Any) -> None:
    for end in [group.begun.begin_all_reduce(torch.ones(1_000)) for _ in range(3)]:
        end()


WAITING: dict[str, Deed] = {
    "all_reduce": reduce,
    "all_reduce of megabytes": lambda group: reduce(group, 2_000_000),
    "barrier": lambda group: dist.barrier(group),
    "broadcast from it": lambda group: dist.broadcast(torch.ones(10), VICTIM, group=group),
    "all_gather": lambda group: dist.all_gather(
        [torch.ones(10) for _ in range(4)], torch.ones(10), group=group
    ),
    "all_gather_into_tensor": lambda group: dist.all_gather_into_tensor(
        torch.ones(40), torch.ones(10), group=group
    ),
    "reduce_scatter_tensor": lambda group: dist.reduce_scatter_tensor(
        torch.ones(10), torch.ones(40), group=group
    ),
    "reduce_scatters that were begun": begun_and_ended,
    "all_reduces that were begun": reductions_begun_and_ended,
    "all_to_all_single": lambda group: dist.all_to_all_single(
        torch.ones(40), torch.ones(40), group=group
    ),
    "asynchronous works": asynchronously,
    "a future": by_a_future,
    "a receive": lambda group: dist.recv(torch.ones(10), VICTIM, group=group),
    "an object": lambda group: dist.all_gather_object([None] * 4, "mine", group=group),
    "a monitored barrier": lambda group: group.monitored_barrier(timedelta(seconds=30)),
}


@on_both_cores
@pytest.mark.parametrize("waiting", WAITING)
def test_a_killed_rank_is_named_to_those_who_wait(scene: Scene, waiting: str) -> None:
    for each in scene.play(killed, WAITING[waiting]).values():
        assert each.seconds < SOON, each


@on_both_cores
@pytest.mark.parametrize("n", [1_000, 3_000_000])
def test_a_rank_killed_in_the_middle_of_a_call_is_named(scene: Scene, n: int) -> None:
    def fate(group: Any) -> None:
        threading.Timer(0.15, os.kill, (os.getpid(), signal.SIGKILL)).start()
        for_ever(group, n)

    for each in scene.play(fate, lambda group: for_ever(group, n)).values():
        assert each.seconds < SOON + 0.15, each


@on_both_cores
@pytest.mark.parametrize("victim", [0, 3])
def test_the_first_and_the_last_rank_die_like_any_other(scene: Scene, victim: int) -> None:
    for each in scene.play(killed, for_ever, victim=victim).values():
        assert each.seconds < SOON, each


@on_both_cores
def test_a_rank_killed_in_the_middle_of_a_message_is_named(scene: Scene) -> None:
    def fate(group: Any) -> None:
        threading.Timer(0.15, os.kill, (os.getpid(), signal.SIGKILL)).start()
        dist.recv(torch.ones(10), 0, group=group, tag=9)  # nobody sends

    def others(group: Any) -> None:
        while True:
            dist.send(torch.ones(200_000), VICTIM, group=group)

    for each in scene.play(fate, others).values():
        assert each.seconds < SOON + 0.15, each


@on_both_cores
def test_a_stopped_rank_is_named_within_the_time_out(scene: Scene) -> None:
    for each in scene.play(stopped, for_ever, seconds=LIMIT).values():
        assert 1 < each.seconds < LIMIT + SOON, each
        assert "call" in str(each.error), "it says how far the rank was"


@on_both_cores
def test_a_rank_that_makes_one_call_fewer_is_named_with_what_it_did_last(scene: Scene) -> None:
    def fate(group: Any) -> None:
        dist.all_gather_into_tensor(torch.ones(40), torch.ones(10), group=group)
        time.sleep(30)

    def others(group: Any) -> None:
        dist.all_gather_into_tensor(torch.ones(40), torch.ones(10), group=group)
        reduce(group)

    for each in scene.play(fate, others, seconds=LIMIT).values():
        assert "all_gather" in each.error.reason, each.error.reason
        assert "all_reduce" in each.error.operation.replace("-", "_"), each.error.operation


@on_both_cores
@pytest.mark.parametrize("waiting", ["a receive", "barrier", "asynchronous works"])
def test_a_rank_that_sleeps_is_named_to_those_who_wait(scene: Scene, waiting: str) -> None:
    for each in scene.play(lambda group: time.sleep(30), WAITING[waiting], seconds=LIMIT).values():
        assert each.seconds < LIMIT + SOON, each


@on_both_cores
def test_receiving_from_anybody_ends_when_nobody_sends(scene: Scene) -> None:
    folder, core = scene.folder, scene.core

    def program(context: RankContext) -> None:
        group = make_group([0, 1], core, LIMIT)
        reduce(group)
        if dist.get_rank() == 0:
            with raises(RuntimeError):
                dist.recv(torch.ones(1), group=group)
            (folder / "told").touch()
        dist.barrier()

    dure.Processes(2, 20).run(program, lambda event: None)
    assert (folder / "told").exists()


@on_both_cores
@pytest.mark.parametrize("waiting", ["all_reduce", "a receive", "asynchronous works"])
def test_a_rank_that_destroys_the_group_early_has_left(scene: Scene, waiting: str) -> None:
    for each in scene.play(dist.destroy_process_group, WAITING[waiting]).values():
        assert each.seconds < SOON, each
        assert "left" in each.error.reason, each.error


@on_both_cores
@pytest.mark.parametrize("status", [0, 3])
def test_a_rank_that_exits_early_is_named(scene: Scene, status: int) -> None:
    for each in scene.play(lambda group: os._exit(status), for_ever).values():
        assert each.seconds < SOON, each


@on_both_cores
def test_a_rank_that_returns_early_is_named_within_the_time_out(scene: Scene) -> None:
    for each in scene.play(lambda group: None, for_ever, seconds=LIMIT).values():
        assert each.seconds < LIMIT + SOON, each


@on_both_cores
def test_after_a_loss_every_call_says_so_and_the_group_can_be_destroyed(scene: Scene) -> None:
    def others(group: Any) -> None:
        try:
            for_ever(group)
        except PeerLostError as error:
            first = str(error)
        for call in (reduce, lambda group: dist.barrier(group), asynchronously):
            with raises(PeerLostError) as caught:
                call(group)
            assert caught[0].ranks == (VICTIM,), (first, str(caught[0]))
        dist.destroy_process_group(group)
        raise PeerLostError((VICTIM,), "x", "y", "was mourned")

    for each in scene.play(killed, others).values():
        assert each.error.reason == "was mourned"


@on_both_cores
def test_the_survivors_make_a_group_of_their_own(scene: Scene) -> None:
    core = scene.core

    def others(group: Any) -> None:
        try:
            for_ever(group)
        except PeerLostError as error:
            smaller = make_group([0, 1, 3], core, 20, use_local_synchronization=True)
            tensor = torch.ones(5)
            dist.all_reduce(tensor, group=smaller)
            same(tensor, torch.full((5,), 3.0))
            raise error

    scene.play(killed, others)


@on_both_cores
def test_a_stopped_rank_that_wakes_up_is_told_too(scene: Scene) -> None:
    folder, core = scene.folder, scene.core

    def program(context: RankContext) -> None:
        group = make_group([0, 1], core, LIMIT)
        reduce(group)
        rank = dist.get_rank()
        processes: list[Any] = [None, None]
        dist.all_gather_object(processes, os.getpid())
        if rank == 1:
            os.kill(processes[0], signal.SIGSTOP)
        with raises(PeerLostError) as caught:
            for_ever(group)
        (folder / f"told {rank}").write_text(str(caught[0]))
        if rank == 1:
            os.kill(processes[0], signal.SIGCONT)

    dure.Processes(2, 20).run(program, lambda event: None)
    assert sorted(path.name for path in folder.iterdir()) == ["told 0", "told 1"]
    assert (folder / "told 1").read_text().startswith("rank 0 ")


@on_both_cores
def test_two_lost_ranks_end_the_group_for_the_others(scene: Scene) -> None:
    folder, core = scene.folder, scene.core

    def program(context: RankContext) -> None:
        group = make_group([0, 1, 2, 3], core, 30)
        reduce(group)
        if dist.get_rank() in (1, 2):
            killed(group)
        try:
            for_ever(group)
        except PeerLostError as error:
            (folder / str(dist.get_rank())).write_bytes(pickle.dumps(error.ranks))
            raise

    with pytest.raises(PeerLostError):
        dure.Processes(4, 60).run(program, lambda event: None)
    told = {path.name: pickle.loads(path.read_bytes()) for path in folder.iterdir()}
    assert sorted(told) == ["0", "3"]
    assert told["0"] == told["3"]
    assert set(told["0"]) <= {1, 2}


@on_both_cores
def test_a_loss_in_one_group_leaves_the_others_alone(scene: Scene) -> None:
    """Rank 2 dies; 0 and 3 share a group with it, and each has another with 1, which goes on to
    work."""
    folder, core = scene.folder, scene.core

    def program(context: RankContext) -> None:
        three, pair = make_group([0, 2, 3], core, 30), make_group([0, 1, 3], core, 30)
        rank = dist.get_rank()
        if rank == 2:
            reduce(three)
            killed(three)
        if rank in (0, 3):
            with raises(PeerLostError, "rank 2 "):
                for_ever(three)
        for _ in range(10):
            reduce(pair)
        (folder / str(rank)).touch()
        raise PeerLostError((2,), "x", "y", "was mourned")

    with pytest.raises(PeerLostError):
        dure.Processes(4, 60).run(program, lambda event: None)
    assert sorted(path.name for path in folder.iterdir()) == ["0", "1", "3"]


def open_files(pid: int) -> list[str]:
    """The anonymous files that a process holds."""
    found = []
    for path in Path(f"/proc/{pid}/fd").iterdir():
        try:
            found.append(os.readlink(path))
        except OSError:
            continue
    return sorted(link for link in found if "memfd:" in link or "/dev/shm" in link)


@on_both_cores
def test_neither_parent_nor_fork_server_holds_the_memory_of_ranks_that_were_killed(
    scene: Scene,
) -> None:
    server.ready()
    assert server.pid is not None
    gc.collect()  # what earlier tests of this process have left
    before = (open_files(os.getpid()), open_files(server.pid))
    scene.play(killed, for_ever)
    assert (open_files(os.getpid()), open_files(server.pid)) == before
    assert not [name for name in os.listdir("/dev/shm") if "dure" in name]


@on_both_cores
def test_a_group_that_a_rank_does_not_join_is_not_waited_for_for_ever(scene: Scene) -> None:
    core = scene.core

    def program(context: RankContext) -> None:
        if dist.get_rank() == 0:
            with raises(RuntimeError):
                make_group([0, 1], core, LIMIT, use_local_synchronization=True)

    dure.Processes(2, 20).run(program, lambda event: None)


@on_both_cores
def test_a_silent_rank_is_noticed_though_others_keep_talking(scene: Scene) -> None:
    """Rank 0 waits for a stopped one while the messages of 1 and 3 come in all the time."""
    folder, core = scene.folder, scene.core

    def program(context: RankContext) -> None:
        group = make_group([0, 1, 2, 3], core, LIMIT)
        reduce(group)
        rank = dist.get_rank()
        if rank == VICTIM:
            stopped(group)
        began = time.monotonic()
        try:
            if rank == 0:
                dist.recv(torch.ones(1), VICTIM, group=group)
            while time.monotonic() - began < LIMIT + SOON + 5:
                dist.send(torch.ones(1), 0, group=group, tag=9)
                time.sleep(0.005)
        except PeerLostError as error:
            if rank == 0:
                (folder / "told").write_bytes(pickle.dumps((error.ranks, time.monotonic() - began)))
            raise

    with pytest.raises(PeerLostError):
        dure.Processes(4, 60).run(program, lambda event: None)
    ranks, seconds = pickle.loads((folder / "told").read_bytes())
    assert ranks == (VICTIM,)
    assert seconds < LIMIT + SOON


@on_both_cores
@pytest.mark.parametrize("waiting", ["all_reduce", "a receive", "asynchronous works"])
def test_ctrl_c_reaches_a_rank_that_waits_and_the_others_are_told(
    scene: Scene, waiting: str
) -> None:
    folder, core = scene.folder, scene.core

    def program(context: RankContext) -> None:
        group = make_group([0, 1, 2, 3], core, 30)
        reduce(group)
        rank = dist.get_rank()
        if rank == VICTIM:
            time.sleep(1)  # whom the others wait for
        if rank == 0:
            signal.signal(signal.SIGINT, signal.default_int_handler)
            threading.Timer(0.2, os.kill, (os.getpid(), signal.SIGINT)).start()
            with raises(KeyboardInterrupt):
                WAITING[waiting](group)
                for_ever(group)
            dist.destroy_process_group(group)
        else:
            with raises(PeerLostError) as caught:
                for_ever(group)
            assert 0 in caught[0].ranks, str(caught[0])
        (folder / str(rank)).touch()

    dure.Processes(4, 60).run(program, lambda event: None)
    assert sorted(path.name for path in folder.iterdir()) == ["0", "1", "2", "3"]


@on_both_cores
def test_a_signals_handler_runs_while_a_rank_waits_and_the_call_goes_on(scene: Scene) -> None:
    core = scene.core

    def program(context: RankContext) -> None:
        group = make_group([0, 1], core, 30)
        heard: list[float] = []
        began = time.monotonic()
        if dist.get_rank() == 1:
            signal.signal(signal.SIGALRM, lambda *_: heard.append(time.monotonic() - began))
            signal.setitimer(signal.ITIMER_REAL, 0.1)
        else:
            time.sleep(2.5)
        tensor = torch.ones(4)
        dist.all_reduce(tensor, group=group)
        took = time.monotonic() - began
        same(tensor, torch.full((4,), 2.0))
        assert dist.get_rank() == 0 or heard[0] < took - 0.3, (
            f"at {heard}, and the call ended at {took}"
        )

    dure.Processes(2, 60).run(program, lambda event: None)
