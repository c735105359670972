"""Workers with data of their own, under a virtual clock: they leave when they like, and some die.

What a worker leaves of a clock shows in the weights of each shard: a clock's step is the mean of
the pushes that the shard contains, whatever was lost, late or said twice.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from random import Random

import pytest
import torch
from histories import History, careless
from torch import Tensor

from dure.parameter_server.messages import MANAGER, worker
from dure.parameter_server.scheduler import BatchPart
from dure.parameter_server.shard import Shard
from dure.parameter_server.tables import SparseRows, split_rows
from dure.parameter_server.worker import WorkerProtocol


def point(who: int, clock: int, keys: int) -> Tensor:
    """Where a worker pulls the weights."""
    return torch.sin(torch.arange(keys, dtype=torch.float64) * 0.7 + 5 * who + 0.3 * clock)


@dataclass
class OwnLoops(History):
    """leaves: after how many pushes each worker leaves."""

    leaves: Sequence[int] = (4, 7, 10)

    def __post_init__(self) -> None:
        super().__post_init__()
        self.manager.inherits = False

    def _next(self, side: WorkerProtocol, asked: BatchPart | None) -> BatchPart | None:
        return BatchPart(side.clock, 0, 1) if side.clock < self.leaves[side.number] else None

    def _compute(
        self, side: WorkerProtocol, work: BatchPart, values: Sequence[Tensor | SparseRows]
    ) -> tuple[Sequence[Tensor | SparseRows], float]:
        dense, _ = split_rows(values)
        gradient = torch.cat(dense) - point(side.number, side.clock, self.keys)
        weight = 1.0 + side.number
        return gradient.split([len(keys) for keys in self.shards]), weight

    def _to_leave(self) -> list[int]:
        """Who is done, and has not left."""
        alive = [who for who in self.workers if self.manager.alive(worker(who))]
        done = [who for who in alive if self.workers[who].own.clock == self.leaves[who]]
        return [who for who in done if self.workers[who].finished]

    def done(self) -> bool:
        for who in self._to_leave():
            said = self.manager.leave(who, self.leaves[who])
            self.network.send(MANAGER, said)
        return not any(self.manager.alive(worker(who)) for who in self.workers)


def by_hand(history: OwnLoops, shard: Shard) -> Tensor:
    """What a shard comes to by the pushes that it contains, with staleness 0."""
    begin, stop = shard.keys.start, shard.keys.stop
    weights = torch.ones(stop - begin, dtype=torch.float64)
    for clock in range(max(history.leaves)):
        members = [who for who in history.workers if shard.contains(who, begin) > clock]
        total = sum(1.0 + who for who in members)
        gradient = sum(
            (1.0 + who) / total * (weights - point(who, clock, history.keys)[begin:stop])
            for who in members
        )
        weights = weights - 0.1 * gradient
    return weights


@pytest.mark.parametrize("replicas", [0, 1])
@pytest.mark.parametrize("staleness", [0, 1, None])
def test_each_leaves_and_one_dies_and_nobody_waits_for_them(
    staleness: int | None, replicas: int
) -> None:
    for seed in range(12):
        random = Random(seed)
        history = OwnLoops(
            staleness=staleness,
            replicas=replicas,
            leaves=[random.randrange(12) for _ in range(3)],
            seconds=lambda who, clock, random=random: 0.1 + random.random(),
            fate=careless(random),
            patience=12.0,
        )
        dies = random.randrange(3)
        history.until(8 * random.random())
        history.network.kill(worker(dies))
        history.run()
        counts = []
        for shard in history.owners:
            counts.append([shard.contains(who, shard.keys.start) for who in range(3)])
            for who, leaves in enumerate(history.leaves):
                # All that was acknowledged, and no more than was pushed.
                portion = history.workers[who].own.portions[shard.number]
                least = leaves if who != dies else portion.safe
                assert least <= counts[-1][who] <= leaves
            if staleness == 0:
                assert torch.allclose(shard.values, by_hand(history, shard), rtol=0, atol=1e-12), (
                    f"history {seed}"
                )
        if staleness is not None:
            assert all(behind <= staleness for behind in history.observed)


def test_a_worker_that_has_left_is_not_missed_and_that_is_written_down() -> None:
    history = OwnLoops(leaves=(1, 30, 30))
    history.until(10)
    manager = history.manager
    assert not manager.alive(worker(0))
    assert manager.dead == {}
    assert manager.layout.groups[0].end(0) == 1
    manager.restore(manager.state())
    assert not manager.alive(worker(0))
    history.run()


def test_a_push_of_a_clock_in_which_nobody_takes_part_any_more_is_dropped() -> None:
    history = OwnLoops(leaves=(3, 3, 3), seconds=lambda who, clock: 1.0 if who else 50.0)
    # The others have pushed their first, and wait for that of worker 0, when they die.
    history.until(2)
    for who in (1, 2):
        history.network.kill(worker(who))
    assert history.owners[0].count(1) == (0, 1)
    history.until(10)
    assert history.manager.layout.groups[0].at(0) == (0,)
    # And it leaves in place of pushing.
    history.network.kill(worker(0))
    history.network.send(MANAGER, history.manager.leave(0, 0))
    history.network.run(lambda: history.network.now > 20, 1e4)
    assert history.manager.layout.groups[0].at(0) == ()
    assert torch.equal(history.weights, torch.ones(11, dtype=torch.float64))
