"""Whole histories under a virtual clock: what may come of late, lost and repeated messages, and
of deaths."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from functools import partial
from random import Random

import pytest
import torch
from histories import SGD, History, Optimizer, careless, joint, streams
from hypothesis import given, settings
from hypothesis import strategies as st

from dure.fleet.virtual_network import arrives
from dure.parameter_server.messages import MANAGER, Message, Snapshot, server, worker

OPTIMIZERS: list[Optimizer] = [
    SGD,
    partial(torch.optim.SGD, lr=0.1, momentum=0.9, nesterov=True, weight_decay=0.01),
    partial(torch.optim.Adam, lr=0.01),
    partial(torch.optim.AdamW, lr=0.01, amsgrad=True),
    partial(torch.optim.Adagrad, lr=0.1),
    partial(torch.optim.RMSprop, lr=0.01, centered=True),
]


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("replicas", [0, 1])
def test_bulk_synchronous_workers_come_to_what_data_parallel_comes_to(
    optimizer: Optimizer, replicas: int
) -> None:
    history = History(optimizer=optimizer, replicas=replicas, servers=3).run()
    assert torch.allclose(history.weights, joint(history), rtol=0, atol=1e-12)


@given(
    optimizer=st.sampled_from(OPTIMIZERS),
    servers=st.integers(1, 5),
    staleness=st.sampled_from([0, 1, 3, None]),
)
@settings(max_examples=20, deadline=None)
def test_one_worker_has_the_bits_of_local_training_whatever_the_servers(
    optimizer: Optimizer, servers: int, staleness: int | None
) -> None:
    history = History(
        optimizer=optimizer, servers=servers, staleness=staleness, groups=((0,),)
    ).run()
    assert torch.equal(history.weights, joint(history))


def test_groups_share_the_weights_and_wait_for_their_own_alone() -> None:
    history = History(groups=((0, 1), (2, 3)), seconds=lambda who, clock: 1.0 if who < 2 else 7.0)
    network = history.network
    network.run(lambda: all(history.workers[who].finished for who in (0, 1)), 1e4)
    # The slow group is at its first clock or second still.
    assert network.now < 15
    history.run()
    assert all(one.own.clock == 10 for one in history.workers.values())


@pytest.mark.parametrize("staleness", [0, 1, 2, 4])
def test_workers_are_ahead_by_as_many_clocks_as_they_may_and_by_no_more(staleness: int) -> None:
    history = History(
        staleness=staleness, clocks=20, seconds=lambda who, clock: 9.0 if who == 0 else 1.0
    ).run()
    assert max(history.observed) == staleness


def test_without_a_bound_nobody_waits_for_a_straggler() -> None:
    history = History(
        staleness=None, clocks=20, seconds=lambda who, clock: 50.0 if who == 0 else 1.0
    )
    done = history.network.run(
        lambda: all(history.workers[who].finished for who in (1, 2)), limit=25
    )
    assert done
    assert history.workers[0].own.clock == 0


class Drawn:
    """A history with everything in it, drawn under a seed."""

    def __init__(self, seed: int) -> None:
        random = self.random = Random(seed)
        self.replicas = random.choice([0, 1])
        self.servers = random.choice([2, 3])
        self.workers = random.randrange(1, 5)
        self.staleness = random.choice([0, 0, 1, 3, None])
        self.history = History(
            staleness=self.staleness,
            replicas=self.replicas,
            servers=self.servers,
            groups=(tuple(range(self.workers)),),
            optimizer=random.choice(OPTIMIZERS),
            clocks=8,
            seconds=lambda who, clock: random.random() * (5 if who == 0 else 1),
            fate=careless(random) if random.random() < 0.7 else arrives,
            patience=6,
        )
        self.fallen: list[str] = []

    def deaths(self) -> Iterator[tuple[float, str]]:
        """At most a server, where there are copies, and a worker that is not the last."""
        random = self.random
        if self.replicas and random.random() < 0.7:
            yield random.random() * 15, server(random.randrange(self.servers))
        if self.workers > 1 and random.random() < 0.6:
            yield random.random() * 15, worker(random.randrange(self.workers))

    def run(self) -> History:
        history = self.history
        network = history.network
        for at, name in sorted(self.deaths()):
            history.until(at)
            way = self.random.choice(["killed", "stopped", "seen to die"])
            self.fallen.append(name)
            if way == "stopped":
                network.stop(name, 20)
                continue
            network.kill(name)
            if way == "seen to die":
                network.send(MANAGER, history.manager.lost(name, "was killed", network.now))
        return history.run(3000)


@pytest.mark.parametrize("first", range(0, 60, 20))
def test_whatever_happens_it_ends_and_each_push_counts_once(first: int) -> None:
    for seed in range(first, first + 20):
        drawn = Drawn(seed)
        history = drawn.run()
        said = f"seed {seed}: {drawn.fallen}"
        if drawn.staleness is not None:
            assert all(behind <= drawn.staleness for behind in history.observed), said
        for who, at_work in history.workers.items():
            if history.manager.alive(worker(who)):
                assert at_work.own.clock == 8, said
                assert [shard.contains(who, shard.keys.start) for shard in history.owners] == [
                    8 for _ in history.owners
                ], said
        # What was done twice, or not at all, would be seen in the weights.
        # That holds with dead workers as well: others compute their parts.
        if drawn.staleness == 0:
            assert torch.allclose(history.weights, joint(history), rtol=0, atol=1e-12), said


def test_a_server_that_dies_leaves_the_bits_of_a_run_in_which_it_lives() -> None:
    whole = History(replicas=1, servers=3).run()
    for at in (0.5, 3.0, 3.5, 9.9):
        history = History(replicas=1, servers=3)
        history.until(at)
        history.network.kill(server(1))
        history.run()
        assert torch.equal(history.weights, whole.weights)
        assert [loss.shards for loss in history.manager.losses] == [()]


def test_a_server_without_a_copy_is_lost_with_its_shards_and_that_is_told() -> None:
    history = History(servers=2)
    history.until(3)
    history.network.kill(server(1))
    history.network.run(lambda: bool(history.manager.losses), 1e4)
    assert history.network.now < 3 + 2 * history.patience
    assert history.manager.losses[0].shards == (1,)
    assert history.manager.layout.shards[1].owner is None


def test_a_server_that_dies_before_its_copy_was_made_is_a_loss_that_is_told() -> None:
    def fate(sender: str, receiver: str, message: Message, now: float) -> Sequence[float]:
        return () if isinstance(message, Snapshot) else (0.0,)

    history = History(servers=2, replicas=1, fate=fate)
    history.network.run(lambda: history.network.now >= 0.5, 1e4)
    history.network.kill(server(0))
    history.network.run(lambda: any(loss.shards for loss in history.manager.losses), 100)
    assert [loss.shards for loss in history.manager.losses] == [(), (0,)]
    assert history.manager.layout.shards[0].owner is None


def test_a_server_that_wakes_up_is_refused_and_gives_nobody_what_it_has() -> None:
    history = History(replicas=1, servers=3, staleness=None, clocks=60)
    network = history.network
    history.until(5)
    network.stop(server(0), 30)
    history.until(40)
    assert not history.manager.alive(server(0))
    assert history.nodes[0].owned == {}
    history.run()


def test_what_a_dead_worker_owes_another_computes_in_its_name() -> None:
    history = History(staleness=0, clocks=12)
    history.until(4.5)
    history.network.kill(worker(1))
    history.run()
    members = history.manager.layout.groups[0]
    end = members.end(1)
    assert end is not None
    # Up to its end the clocks are whole, as if it had lived.
    shard = history.nodes[0].owned[0].shard
    assert shard.contains(1, shard.keys.start) == end
    assert members.at(end) == (0, 2)


def test_the_manager_goes_on_from_what_it_wrote_down() -> None:
    history = History(replicas=1, servers=3, clocks=20)
    network = history.network
    history.until(3)
    network.kill(server(2))
    network.run(lambda: not history.manager.alive(server(2)), 1e4)
    written = history.manager.state()
    network.kill(MANAGER)
    # Nobody needs it while nobody dies, until the leases are over.
    history.until(6.5)
    again = type(history.manager)(
        history.manager.layout, 3, history.staleness, history.patience, replicas=1
    )
    again.restore(written)
    history.manager = again
    network.add(MANAGER, again)
    history.run()
    assert torch.allclose(history.weights, joint(history), rtol=0, atol=1e-12)


@pytest.mark.parametrize("staleness", [0, 2])
def test_what_was_on_a_connection_that_broke_is_said_again(staleness: int) -> None:
    def fate(sender: str, receiver: str, message: Message, now: float) -> Sequence[float]:
        # All that is said meanwhile is lost; what the manager hears and says is not.
        broken = 3 <= now < 3.5 and MANAGER not in (sender, receiver)
        return () if broken else (0.01,)

    history = History(
        staleness=staleness, replicas=1, servers=3, again=math.inf, fate=fate, patience=math.inf
    )
    history.until(3.6)
    for number in range(3):
        for one in history.workers.values():
            one.own.cut(server(number))
        for node in history.nodes:
            node.cut(server(number))
    history.run(100)
    assert all(one.own.clock == 10 for one in history.workers.values())
    if staleness == 0:
        assert torch.allclose(history.weights, joint(history), rtol=0, atol=1e-12)


def test_weights_of_the_beginning_are_taken_once() -> None:
    history = History(clocks=5).run()
    before = history.weights.clone()
    for number in range(2):
        shard = history.nodes[number].owned[number].shard
        late = Snapshot(number, 0, 0, {**shard.state(), "values": torch.zeros(len(shard.keys))})
        history.nodes[number].receive(MANAGER, late, history.network.now)
    assert torch.equal(history.weights, before)


def test_the_same_history_comes_twice() -> None:
    one, two = (Drawn(3).run() for _ in range(2))
    assert torch.equal(one.weights, two.weights)
    assert one.network.now == two.network.now


@given(
    seed=st.integers(0, 2**32),
    staleness=st.sampled_from([0, 1, None]),
    rows=st.sampled_from([0, 13]),
    who=st.sampled_from(["server 0", "server 1", "server 2", "worker 1"]),
    how=st.sampled_from([math.inf, 20.0, 9.0, 3.0]),
)
@settings(max_examples=40, deadline=None)
def test_over_streams_nothing_need_be_said_again_by_the_clock(
    seed: int, staleness: int | None, rows: int, who: str, how: float
) -> None:
    # A new layout reaches some before others, so that some are refused by those who come late.
    random = Random(seed)
    history = History(
        servers=3,
        replicas=1,
        staleness=staleness,
        again=math.inf,
        patience=8,
        fate=streams(random),
        rows=rows,
        seconds=lambda who, clock: random.random(),
    )
    # Not before the copies are there.
    history.until(8 + 6 * random.random())
    if math.isinf(how):
        history.network.kill(who)
    else:
        history.network.stop(who, how)
    history.run(400)
    if staleness == 0:
        assert torch.allclose(history.weights, joint(history), rtol=0, atol=1e-12)
