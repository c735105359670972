"""Runs that end before all meet: where everybody stops, and what becomes of the rest."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from random import Random

import pytest
import torch
from histories import History, careless, joint
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from dure.parameter_server.graceful_stop import GracefulStop, owed_until
from dure.parameter_server.layout import ShardLayout
from dure.parameter_server.manager import first_layout
from dure.parameter_server.members import WorkerMembers
from dure.parameter_server.messages import Acknowledged, Envelope, Pull, Push, Values, worker
from dure.parameter_server.replica import DownpourReplica, Pace
from dure.parameter_server.scheduler import BatchPart, Scheduler
from dure.parameter_server.worker import CONNECTED, WorkerProtocol


def alive(history: History) -> list[int]:
    return [who for who in history.workers if history.manager.alive(worker(who))]


def stopped(history: History) -> int:
    """Stops a history where it is; the clock before which all workers have stopped then."""
    begun = {who: one.own.clock for who, one in history.workers.items()}
    holding = GracefulStop(history.groups)
    for who in alive(history):
        holding.held(who, history.workers[who].hold())
    # Whoever is given up meanwhile is waited for.
    history.network.run(lambda: not history.manager.layout.closing, 1e4)

    def least(who: int) -> int:
        return owed_until(history.manager.layout.groups[0], history.clocks)

    assert holding.decide(alive(history), least)
    assert holding.decided
    (until,) = set(holding.until.values())
    assert max(begun[who] for who in alive(history)) <= until
    history.clocks = until
    for one in history.workers.values():
        one.go_on()
    history.run(3000)
    return until


def after(history: History, until: int, clocks: int) -> History:
    """Another history that goes on from there."""
    states = [shard.state() for shard in history.owners]
    for state in states:
        everybody = dict.fromkeys(history.workers, until)
        state["clock"] = [[*ends, times | everybody] for *ends, times in state["clock"]]
    return dataclasses.replace(history, clocks=clocks, states=states, begun=until)


@given(
    staleness=st.sampled_from([0, 0, 1, 3]),
    workers=st.integers(1, 4),
    at=st.floats(0, 40),
    seed=st.integers(0, 1000),
)
@settings(max_examples=25, deadline=None)
def test_all_stop_at_one_clock_and_go_on_from_there(
    staleness: int, workers: int, at: float, seed: int
) -> None:
    random = Random(seed)
    history = History(
        staleness=staleness,
        groups=(tuple(range(workers)),),
        clocks=12,
        seconds=lambda who, clock: random.random() * (5 if who == 0 else 1),
        fate=careless(random),
        patience=math.inf,
    )
    history.until(at)
    furthest = max(one.own.clock for one in history.workers.values())
    until = stopped(history)
    # Nobody begins a clock for it, but those who are behind.
    assert until <= furthest + 1
    assert {one.own.clock for one in history.workers.values()} == {until}
    again = after(history, until, 12).run(3000)
    assert {one.own.clock for one in again.workers.values()} == {12}
    if staleness == 0:
        whole = History(groups=(tuple(range(workers)),), clocks=12).run()
        assert torch.equal(again.weights, whole.weights)


@pytest.mark.parametrize("first", [0, 15])
def test_a_worker_that_died_takes_part_again_where_the_others_have_stopped(first: int) -> None:
    for seed in range(first, first + 15):
        random = Random(seed)
        history = History(
            staleness=0,
            clocks=12,
            seconds=lambda who, clock, random=random: random.random() * 2,  # type: ignore[misc]
        )
        dies = random.random() * 12
        history.until(dies)
        history.network.kill(worker(1))
        history.until(dies + random.random() * 4)
        until = stopped(history)
        again = after(history, until, 12).run()
        assert {one.own.clock for one in again.workers.values()} == {12}
        # Each batch counts once, whoever has computed its parts.
        assert torch.allclose(again.weights, joint(again), rtol=0, atol=1e-12), seed


@given(
    workers=st.integers(1, 4),
    batches=st.integers(0, 30),
    turns=st.lists(st.tuples(st.integers(0, 3), st.integers(0, 8), st.booleans()), max_size=20),
)
def test_each_part_is_done_once_though_what_was_dealt_came_back(
    workers: int, batches: int, turns: list[tuple[int, int, bool]]
) -> None:
    scheduler = Scheduler(WorkerMembers.of(range(workers)), bounded=False)
    scheduler.until = batches
    done: list[BatchPart] = []
    has: dict[int, list[BatchPart]] = {who: [] for who in range(workers)}
    for who, count, asks in turns:
        who %= workers
        if asks:
            has[who] += scheduler.deal(who)
        for work in has[who][:count]:
            scheduler.done(who, work)
        done += has[who][:count]
        has[who] = has[who][count:]
    scheduler.held = True
    for who, works in has.items():
        assert scheduler.deal(who) == ()
        scheduler.back(who, works)
    assert scheduler.idle
    again = Scheduler(WorkerMembers.of(range(workers)), bounded=False)
    again.resume(*scheduler.undone())
    again.until = batches
    while works := again.deal(0):
        for work in works:
            again.done(0, work)
        done += works
    assert again.idle
    expected = [BatchPart(b, p, workers) for b in range(batches) for p in range(workers)]
    assert sorted(done, key=lambda work: (work.batch, work.part)) == expected


def test_teams_go_to_the_furthest_of_their_own() -> None:
    holding = GracefulStop([(0, 1), (2, 3)])
    for who, until in enumerate([4, 6, 9, 2]):
        assert not holding.decide(range(4), lambda who: 0)
        assert holding.awaited(range(4)) == [*range(who, 4)]
        holding.held(who, until)
    # One that has died since is not waited for, and is behind nobody.
    assert holding.decide([0, 1, 3], lambda who: 5)
    assert holding.until == {0: 6, 1: 6, 2: 5, 3: 5}


def test_who_was_given_up_takes_part_until_its_end_and_no_further_than_was_granted() -> None:
    members = WorkerMembers.of((0, 1, 2)).without(1, 7)
    assert owed_until(WorkerMembers.of((0, 1)), 10) == 0
    assert owed_until(members, 10) == 7
    assert owed_until(members, 5) == 5


class Server:
    """One that has the weights of a replica, and makes a step of plain SGD of each push."""

    def __init__(self) -> None:
        self.weights = torch.ones(1, dtype=torch.float64)
        self.pushes = 0

    def answer(self, said: Sequence[Envelope], replica: DownpourReplica) -> None:
        """Answers what a replica has said, and what it says to that."""
        for to, message in said:
            if isinstance(message, Pull):
                answer: Values | Acknowledged = Values(
                    0, 0, message.number, self.weights.clone(), self.pushes, self.pushes, None, 0
                )
            else:
                assert isinstance(message, Push)
                self.weights -= 0.1 * message.gradient
                self.pushes += 1
                answer = Acknowledged(0, 0, 0, self.pushes)
            self.answer(replica.receive(to, answer, 0.0), replica)


@dataclasses.dataclass
class Now:
    """A gradient that is there when `ready` is."""

    gradient: Tensor
    ready: bool = False
    is_empty: bool = False

    @property
    def ends(self) -> float:
        return -math.inf if self.ready else math.inf

    def result(self) -> list[Tensor]:
        return [self.gradient]


def test_a_replica_whose_part_is_empty_moves_the_clock_and_no_weights() -> None:
    said: list[Push] = []

    def compute(step: int, weights: Sequence[Tensor], now: float) -> Now:
        return Now(torch.zeros(1, dtype=torch.float64), ready=True, is_empty=True)

    layout: ShardLayout = first_layout([0], 1, [(0,)])
    side = WorkerProtocol(0, layout, [(0, 0, 1)], times=CONNECTED)
    replica = DownpourReplica(side, Pace(1, 1, False), [Server().weights], compute, lambda *_: None)
    replica.grant(1)
    server = Server()
    server.answer(replica.tick(0.0), replica)
    said += [one for _, one in replica.tick(0.0) if isinstance(one, Push)]
    assert [(one.clock, one.weight) for one in said] == [(0, 0.0)]


def steps(server: Server, first: int, count: int, begun: bool, push_every: int) -> int:
    """Has a replica do steps from `first` on, of which the last has only begun, and stop then.

    Returns before which step it has stopped, with everything pushed.
    """
    jobs: list[Now] = []

    def compute(step: int, weights: Sequence[Tensor], now: float) -> Now:
        jobs.append(Now((weights[0] - step).clone()))
        return jobs[-1]

    def move(weights: Sequence[Tensor], gradients: Sequence[Tensor], step: int) -> None:
        weights[0].sub_(gradients[0], alpha=0.1)

    layout: ShardLayout = first_layout([0], 1, [(0,)])
    side = WorkerProtocol(0, layout, [(0, 0, 1)], clock=server.pushes, times=CONNECTED)
    pace = Pace(1000, push_every, overlap=False)
    replica = DownpourReplica(side, pace, [server.weights], compute, move, done=first)
    replica.grant(100)
    server.answer(replica.tick(0.0), replica)
    for _ in range(count - begun):
        jobs[-1].ready = True
        server.answer(replica.tick(0.0), replica)
    until = replica.hold()
    replica.stop_at(until)
    jobs[-1].ready = True
    while replica.wake < 0 and not replica.finished:
        server.answer(replica.tick(0.0), replica)
    assert replica.finished
    assert not replica.computing
    return until


@given(counts=st.lists(st.integers(1, 6), min_size=1, max_size=4))
def test_a_replica_that_was_stopped_has_pushed_every_gradient(counts: list[int]) -> None:
    server = Server()
    first = 0
    for count in counts:
        first = steps(server, first, count, begun=True, push_every=3)
    # Its own steps are those of the server.
    weights = 1.0
    for step in range(first):
        weights -= 0.1 * (weights - step)
    assert first >= sum(counts)
    assert server.weights.item() == pytest.approx(weights, abs=1e-12)
