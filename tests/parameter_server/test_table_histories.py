"""Histories with a table under a virtual clock: it is late, lost and dead like other shards."""

from __future__ import annotations

from functools import partial
from random import Random

import pytest
import torch
from histories import SGD, History, Optimizer, careless, joint, joint_table
from hypothesis import given, settings
from hypothesis import strategies as st

from dure.parameter_server.digests import KnownRowLists
from dure.parameter_server.messages import Message, Pull, Push, PushRefused, server, worker
from dure.parameter_server.table_shard import TableShard

ADAGRAD: Optimizer = partial(torch.optim.Adagrad, lr=0.1)


def learned(history: History) -> bool:
    """Whether weights and table are what one worker with a dense table comes to."""
    pairs = [(history.weights, joint(history)), (history.table, joint_table(history))]
    return all(torch.allclose(one, other, rtol=0, atol=1e-12) for one, other in pairs)


@pytest.mark.parametrize("optimizer", [SGD, ADAGRAD])
@pytest.mark.parametrize("rows", [2, 7, 50])
@pytest.mark.parametrize("replicas", [0, 1])
def test_bulk_synchronous_workers_come_to_what_one_comes_to(
    optimizer: Optimizer, rows: int, replicas: int
) -> None:
    assert learned(History(optimizer=optimizer, rows=rows, servers=3, replicas=replicas).run())


@given(
    optimizer=st.sampled_from([SGD, ADAGRAD]),
    staleness=st.sampled_from([0, 1, None]),
    servers=st.integers(1, 4),
)
@settings(max_examples=20, deadline=None)
def test_one_worker_comes_to_the_same_at_any_staleness(
    optimizer: Optimizer, staleness: int | None, servers: int
) -> None:
    assert learned(
        History(
            optimizer=optimizer, staleness=staleness, servers=servers, rows=9, groups=((0,),)
        ).run()
    )


@pytest.mark.parametrize("staleness", [0, 2, None])
@pytest.mark.parametrize("dies", ["nobody", "server 1", "worker 2"])
@pytest.mark.parametrize("seed", range(4))
def test_whatever_is_lost_each_push_counts_once(
    seed: int, staleness: int | None, dies: str
) -> None:
    random = Random(seed)
    history = History(
        rows=13,
        servers=3,
        replicas=1,
        staleness=staleness,
        seconds=lambda who, clock: random.random() * (4 if who == 0 else 1),
        fate=careless(random),
        patience=6,
        clocks=8,
    )
    # Not before the copies are there.
    history.until(5 + 8 * random.random())
    if dies != "nobody":
        history.network.kill(dies)
    history.run(3000)
    for who, at_work in history.workers.items():
        if history.manager.alive(worker(who)):
            assert at_work.own.clock == 8
            assert {shard.contains(who, shard.keys.start) for shard in history.owners} == {8}
    if staleness is not None:
        assert all(behind <= staleness for behind in history.observed)
    if staleness == 0:
        assert learned(history)


def test_a_server_that_does_not_know_a_list_asks_for_it() -> None:
    said: list[Message] = []

    def listens(sender: str, receiver: str, message: Message, now: float) -> list[float]:
        said.append(message)
        return [0.0]

    history = History(
        rows=13, servers=2, replicas=1, groups=((0,),), clocks=12, fate=listens, staleness=0
    )
    history.until(5.5)
    history.network.kill(server(1))
    history.run()
    assert learned(history)
    # A push names its rows by a digest where they are those of the pull.
    pushes = [one for one in said if isinstance(one, Push) and one.shard >= 2]
    assert any(one.digest is not None and one.rows is None for one in pushes)
    assert not any(one.digest is not None and one.rows is not None for one in pushes)
    # The heir has not been sent the lists of the dead.
    late = [one for one in said if isinstance(one, Pull) and one.epoch > 0 and one.shard == 3]
    assert late[0].rows is not None


def test_lists_that_were_forgotten_are_sent_again() -> None:
    said: list[Message] = []

    def forgets(sender: str, receiver: str, message: Message, now: float) -> list[float]:
        said.append(message)
        for node in history.nodes:
            for one in node.owned.values():
                if isinstance(one.shard, TableShard):
                    one.shard.lists = KnownRowLists()
        return [0.0]

    history = History(rows=7, servers=1, groups=((0,),), clocks=6, staleness=0)
    history.network.fate = forgets
    history.run()
    assert learned(history)
    assert any(isinstance(one, PushRefused) and one.reason == "rows" for one in said)
