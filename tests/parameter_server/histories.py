"""Histories of servers and workers under a virtual clock, for tests.

What is learned is small and exact: the examples of batch c pull w towards their mean, with the
gradient w - mean(x), so that every part of every batch leaves its mark.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from random import Random
from typing import Any

import torch
from torch import Tensor, nn

from dure.parameter_server.at_work import Worker
from dure.parameter_server.keys import Vector, divide
from dure.parameter_server.layout import Layout, Owed
from dure.parameter_server.manager import Manager, first_layout
from dure.parameter_server.messages import MANAGER, Message, Snapshot, server, worker
from dure.parameter_server.optimizer import Recipe
from dure.parameter_server.scheduler import Scheduler, Work
from dure.parameter_server.server import Server
from dure.parameter_server.shard import Shard, Terms
from dure.parameter_server.virtual import Fate, Link, VirtualNetwork, arrives
from dure.parameter_server.worker import WorkerSide

Optimizer = Callable[[Sequence[nn.Parameter]], torch.optim.Optimizer]
SGD: Optimizer = partial(torch.optim.SGD, lr=0.1)
INSTANT = Link()
BATCH = 12
"""Examples of a batch, so that four workers may have a part each, and three, and two."""


def examples_at(clock: int, keys: int) -> Tensor:
    """Where the examples of a batch pull the weights: shape (BATCH, keys), float64."""
    example = torch.arange(BATCH, dtype=torch.float64).unsqueeze(1)
    place = torch.arange(keys, dtype=torch.float64)
    return torch.sin(place * 0.7 + example * 1.3 + clock * 0.11)


@dataclass
class History:
    """A whole system. Weights: `keys` numbers, all 1 at first."""

    keys: int = 11
    servers: int = 2
    groups: Sequence[Sequence[int]] = ((0, 1, 2),)
    staleness: int | None = 0
    clocks: int = 10
    optimizer: Optimizer = SGD
    replicas: int = 0
    seconds: Callable[[int, int], float] = lambda who, clock: 1.0
    fate: Fate = arrives
    patience: float = 2.0
    again: float = 1.0
    """Seconds after which a message is said again."""
    link: Link = INSTANT
    slows: bool = False

    def __post_init__(self) -> None:
        start = nn.Parameter(torch.ones(self.keys, dtype=torch.float64))
        recipe = Recipe.of(self.optimizer([start]), [[start]])
        self.terms = Terms(recipe, self.staleness, slows=self.slows)
        by_server = divide([Vector(self.keys, 8)], self.servers)
        self.shards = [keys for ranges in by_server for keys in ranges]
        owners = [number for number, ranges in enumerate(by_server) for _ in ranges]
        layout = first_layout(owners, self.servers, self.groups, self.replicas)
        self.manager = Manager(layout, self.servers, self.staleness, self.patience, self.replicas)
        self.network = VirtualNetwork(self.fate)
        self.network.add(MANAGER, self.manager)
        self.nodes = [
            Server(number, layout, self.terms, beat=0.25, patience=self.again)
            for number in range(self.servers)
        ]
        for node in self.nodes:
            self.network.add(node.name, node, self.link)
        for number, keys in enumerate(self.shards):
            values = torch.ones(len(keys), dtype=torch.float64)
            first = Shard(number, keys, values, self.terms).state()
            to = server(owners[number])
            # By hand, since it is no subject of the histories that the beginning gets lost.
            said = self.nodes[owners[number]].receive(
                MANAGER, Snapshot(number, 0, 0, first), self.network.now
            )
            self.network.send(to, said)
        self.workers = {
            who: Worker(
                own=self.side(who, layout),
                next=self._next,
                compute=self._compute,
                seconds=self.seconds,
                other=self._other,
            )
            for group in self.groups
            for who in group
        }
        for who, one in self.workers.items():
            self.network.add(worker(who), one)

    def side(self, who: int, layout: Layout, **options: Any) -> WorkerSide:
        portions = [(n, keys.start, keys.stop) for n, keys in enumerate(self.shards)]
        again = self._again if self.terms.recipe.plain and self.staleness != 0 else None
        return WorkerSide(
            who, layout, portions, again=again, **{"beat": 0.25, "patience": self.again, **options}
        )

    def _other(self, owed: Owed, layout: Layout) -> WorkerSide:
        return self.side(owed.worker, layout, clock=owed.first, beat=None)

    def _again(self, shard: int, start: int, values: Tensor, push: Tensor, weight: float) -> None:
        values.sub_(push * weight, alpha=0.1)

    def _next(self, side: WorkerSide, asked: Work | None) -> Work | None:
        members = side.layout.groups[side.layout.group_of(side.number)]
        # Without a bound too each worker has its part at every clock, so that all is known.
        scheduler = Scheduler(members, bounded=True)
        scheduler.until = self.clocks
        return scheduler.next(side.number, side.clock)

    def _compute(
        self, side: WorkerSide, work: Work, values: Sequence[Tensor]
    ) -> tuple[Sequence[Tensor], float]:
        """A batch of twelve is divided as evenly as its parts allow."""
        points = examples_at(work.batch, self.keys).tensor_split(work.parts)[work.part]
        gradient = torch.cat(list(values)) - points.mean(dim=0)
        weight = len(points) if self.staleness == 0 else len(points) / BATCH
        return gradient.split([len(keys) for keys in self.shards]), weight

    @property
    def observed(self) -> set[int]:
        """By how many clocks the weights were behind that workers took."""
        sides = [side for one in self.workers.values() for side in one.sides]
        return {behind for side in sides for behind in side.staleness}

    # What happens

    def done(self) -> bool:
        """Whether every worker that is alive has done what it has to do."""
        return all(
            one.finished for who, one in self.workers.items() if self.manager.alive(worker(who))
        )

    def until(self, time: float) -> None:
        """Lets time pass to here, or to where all is done."""
        self.network.run(lambda: self.network.now >= time or self.done(), 1e4)

    def run(self, limit: float = 1e4) -> History:
        """To the end. Fails where that does not come."""
        assert self.network.run(self.done, limit), f"not done at {self.network.now}"
        return self

    @property
    def owners(self) -> list[Shard]:
        """Each shard, where it is answered for."""
        found = []
        for number in range(len(self.shards)):
            owner = self.manager.layout.shards[number].owner
            assert owner is not None
            found.append(self.nodes[owner].owned[number].shard)
        return found

    @property
    def weights(self) -> Tensor:
        """What the owners have."""
        return torch.cat([shard.values for shard in self.owners])


def joint(history: History) -> Tensor:
    """What one worker comes to that has all of each batch: data parallel."""
    weights = nn.Parameter(torch.ones(history.keys, dtype=torch.float64))
    optimizer = history.optimizer([weights])
    for clock in range(history.clocks):
        weights.grad = weights.detach() - examples_at(clock, history.keys).mean(dim=0)
        optimizer.step()
    return weights.detach()


def careless(random: Random, loses: float = 0.1, repeats: float = 0.1, delay: float = 1.0) -> Fate:
    """Messages get lost, come twice, and late, so that they overtake each other."""

    def fate(sender: str, receiver: str, message: Message, now: float) -> Sequence[float]:
        if random.random() < loses:
            return ()
        times = 2 if random.random() < repeats else 1
        return [random.random() * delay for _ in range(times)]

    return fate
