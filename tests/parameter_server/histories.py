"""Histories of servers and workers under a virtual clock, for tests.

What is learned is small and exact: the examples of batch c pull w towards their mean, with the
gradient w - mean(x), so that every part of every batch leaves its mark. Where there is a table,
each example pulls the one row that it reads towards a point of that row and batch.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from random import Random
from typing import Any

import torch
from torch import Tensor, nn

from dure.collectives.compression import Compression, NoCompression
from dure.fleet.virtual_network import MessageFaults, NodeLink, VirtualNetwork, arrives
from dure.parameter_server.compressed import PushCoding, compressors_of
from dure.parameter_server.keys import KeyRange, VectorSize, divide
from dure.parameter_server.layout import ReassignedWork, ShardLayout
from dure.parameter_server.manager import Manager, first_layout
from dure.parameter_server.messages import MANAGER, Message, Snapshot, server, worker
from dure.parameter_server.optimizer import OptimizerRecipe
from dure.parameter_server.scheduler import BatchPart, Scheduler
from dure.parameter_server.server import ShardServer
from dure.parameter_server.shard import Shard, Terms
from dure.parameter_server.table_shard import TableShard
from dure.parameter_server.tables import EmbeddingTable, SparseRows, rule_of, split_rows
from dure.parameter_server.worker import RetryTimes, WorkerProtocol
from dure.parameter_server.worker_node import WorkerNode

Optimizer = Callable[[Sequence[nn.Parameter]], torch.optim.Optimizer]
SGD: Optimizer = partial(torch.optim.SGD, lr=0.1)
INSTANT = NodeLink()
BATCH = 12
"""Examples of a batch, so that four workers may have a part each, and three, and two."""


def examples_at(clock: int, keys: int) -> Tensor:
    """Where the examples of a batch pull the weights: shape (BATCH, keys), float64."""
    example = torch.arange(BATCH, dtype=torch.float64).unsqueeze(1)
    place = torch.arange(keys, dtype=torch.float64)
    return torch.sin(place * 0.7 + example * 1.3 + clock * 0.11)


def reads_at(clock: int, rows: int) -> Tensor:
    """The row that each example of a batch reads."""
    return (torch.arange(BATCH) * 5 + clock * 3) % rows


def first_of(rows: Tensor) -> Tensor:
    """What rows are at first."""
    return torch.cos(rows.double()).unsqueeze(1)


def towards(rows: Tensor, clock: int) -> Tensor:
    """Where a batch pulls the rows that its examples read."""
    return torch.sin(rows.double() * 0.9 + clock * 0.3).unsqueeze(1)


@dataclass
class History:
    """A whole system. Weights: `keys` numbers, all 1 at first, and a table of `rows`, if any."""

    keys: int = 11
    servers: int = 2
    groups: Sequence[Sequence[int]] = ((0, 1, 2),)
    staleness: int | None = 0
    clocks: int = 10
    optimizer: Optimizer = SGD
    replicas: int = 0
    seconds: Callable[[int, int], float] = lambda who, clock: 1.0
    fate: MessageFaults = arrives
    patience: float = 2.0
    again: float = 1.0
    """Seconds after which a message is said again."""
    link: NodeLink = INSTANT
    slows: bool = False
    clip_norm: float | None = None
    rows: int = 0
    compression: Compression = field(default_factory=NoCompression)
    states: Sequence[dict[str, Any]] = ()
    """Of the shards, where it goes on from the end of another."""
    begun: int = 0
    """Pushes of each worker by then."""

    def __post_init__(self) -> None:
        start = nn.Parameter(torch.ones(self.keys, dtype=torch.float64))
        recipe = OptimizerRecipe.of(self.optimizer([start]), [[start]])
        coding = PushCoding(self.compression, [start]) if self.compression.compresses else None
        self.terms = Terms(
            recipe,
            self.staleness,
            slows=self.slows,
            tables=self._tables(),
            coding=coding,
            clip_norm=self.clip_norm,
        )
        self.weighted = torch.zeros(self.keys, dtype=torch.float64)
        """The sum of all gradients that were computed, times their weights."""
        by_server = divide([VectorSize(self.keys, 8)], self.servers)
        self.shards = [keys for ranges in by_server for keys in ranges]
        owners = [number for number, ranges in enumerate(by_server) for _ in ranges]
        of_table = divide([VectorSize(self.rows, 8)], self.servers)
        self.table_shards = [keys for ranges in of_table for keys in ranges]
        owners += [number for number, ranges in enumerate(of_table) for _ in ranges]
        layout = first_layout(owners, self.servers, self.groups, self.replicas)
        self.manager = Manager(layout, self.servers, self.staleness, self.patience, self.replicas)
        self.network = VirtualNetwork(self.fate)
        self.network.add(MANAGER, self.manager)
        self.nodes = [
            ShardServer(number, layout, self.terms, beat=0.25, patience=self.again)
            for number in range(self.servers)
        ]
        for node in self.nodes:
            self.network.add(node.name, node, self.link)
        for number, keys in enumerate([*self.shards, *self.table_shards]):
            first = self.states[number] if self.states else self._first(number, keys).state()
            to = server(owners[number])
            # By hand, since it is no subject of the histories that the beginning gets lost.
            snapshot = Snapshot(number, 0, first["version"], first)
            said = self.nodes[owners[number]].receive(MANAGER, snapshot, self.network.now)
            self.network.send(to, said)
        self.workers = {
            who: WorkerNode(
                own=self.side(who, layout, clock=self.begun),
                next=self._next,
                compute=self._compute,
                seconds=self.seconds,
                other=self._other,
                rows=self._reads,
            )
            for group in self.groups
            for who in group
        }
        for who, one in self.workers.items():
            self.network.add(worker(who), one)

    def _tables(self) -> list[EmbeddingTable]:
        if not self.rows:
            return []
        made = self.optimizer([nn.Parameter(torch.ones(self.rows, 1))])
        rule = rule_of(type(made), made.param_groups[0], "table")
        return [EmbeddingTable("table", self.rows, 1, torch.float64, rule, first_of)]

    def _first(self, number: int, keys: KeyRange) -> Shard:
        if number >= len(self.shards):
            return TableShard(number, keys, self.terms)
        return Shard(number, keys, torch.ones(len(keys), dtype=torch.float64), self.terms)

    def side(self, who: int, layout: ShardLayout, **options: Any) -> WorkerProtocol:
        shards = enumerate([*self.shards, *self.table_shards])
        portions = [(n, keys.start, keys.stop) for n, keys in shards]
        again = self._again if self.terms.recipe.plain and self.staleness != 0 else None
        return WorkerProtocol(
            who,
            layout,
            portions,
            again=again,
            compressors=compressors_of(self.terms.coding, 0, who, self.shards),
            **{"times": RetryTimes(self.again, 0.25), **options},
        )

    def _other(self, owed: ReassignedWork, layout: ShardLayout) -> WorkerProtocol:
        return self.side(owed.worker, layout, clock=owed.first, times=RetryTimes(self.again, None))

    def _again(self, shard: int, start: int, values: Tensor, push: Tensor, weight: float) -> None:
        values.sub_(push * weight, alpha=0.1)

    def _next(self, side: WorkerProtocol, asked: BatchPart | None) -> BatchPart | None:
        members = side.layout.groups[side.layout.group_of(side.number)]
        # Without a bound too each worker has its part at every clock, so that all is known.
        scheduler = Scheduler(members, bounded=True)
        scheduler.until = self.clocks
        return scheduler.next(side.number, side.clock)

    def _reads(self, side: WorkerProtocol, work: BatchPart) -> list[Tensor]:
        """The rows of the table that a part reads, by shard."""
        if not self.rows:
            return []
        rows = reads_at(work.batch, self.rows).tensor_split(work.parts)[work.part].unique()
        return [rows[(keys.start <= rows) & (rows < keys.stop)] for keys in self.table_shards]

    def _compute(
        self, side: WorkerProtocol, work: BatchPart, values: Sequence[Tensor | SparseRows]
    ) -> tuple[Sequence[Tensor | SparseRows], float]:
        """A batch of twelve is divided as evenly as its parts allow."""
        dense, tables = split_rows(values)
        points = examples_at(work.batch, self.keys).tensor_split(work.parts)[work.part]
        gradient = torch.cat(dense) - points.mean(dim=0)
        share = len(points) / BATCH
        weight = share if self.staleness != 0 or self.compression.compresses else len(points)
        self.weighted += weight * gradient
        pulled = []
        for rows, weights in tables:
            reads = reads_at(work.batch, self.rows).tensor_split(work.parts)[work.part]
            often = (reads == rows.unsqueeze(1)).double().mean(dim=1, keepdim=True)
            pulled.append(SparseRows(rows, (weights - towards(rows, work.batch)) * often))
        return [*gradient.split([len(keys) for keys in self.shards]), *pulled], weight

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
        for number in range(len(self.shards) + len(self.table_shards)):
            owner = self.manager.layout.shards[number].owner
            assert owner is not None
            found.append(self.nodes[owner].owned[number].shard)
        return found

    @property
    def weights(self) -> Tensor:
        """What the owners have of the keys."""
        return torch.cat([shard.values for shard in self.owners[: len(self.shards)]])

    @property
    def table(self) -> Tensor:
        """What the owners have of the table, shape (rows, 1)."""
        shards = [shard for shard in self.owners if isinstance(shard, TableShard)]
        every = [torch.arange(shard.keys.start, shard.keys.stop) for shard in shards]
        return torch.cat(
            [shard.table.pull(rows) for shard, rows in zip(shards, every, strict=True)]
        )


def joint(history: History) -> Tensor:
    """What one worker comes to that has all of each batch: data parallel."""
    weights = nn.Parameter(torch.ones(history.keys, dtype=torch.float64))
    optimizer = history.optimizer([weights])
    for clock in range(history.clocks):
        weights.grad = weights.detach() - examples_at(clock, history.keys).mean(dim=0)
        optimizer.step()
    return weights.detach()


def joint_table(history: History) -> Tensor:
    """The same for the table: what a dense one comes to."""
    every = torch.arange(history.rows)
    weights = nn.Parameter(first_of(every))
    optimizer = history.optimizer([weights])
    for clock in range(history.clocks):
        reads = reads_at(clock, history.rows)
        share = (reads == every.unsqueeze(1)).double().mean(dim=1, keepdim=True)
        weights.grad = (weights.detach() - towards(every, clock)) * share
        optimizer.step()
    return weights.detach()


def careless(
    random: Random, loses: float = 0.1, repeats: float = 0.1, delay: float = 1.0
) -> MessageFaults:
    """Messages get lost, come twice, and late, so that they overtake each other."""

    def fate(sender: str, receiver: str, message: Message, now: float) -> Sequence[float]:
        if random.random() < loses:
            return ()
        times = 2 if random.random() < repeats else 1
        return [random.random() * delay for _ in range(times)]

    return fate


def streams(random: Random) -> MessageFaults:
    """Nothing gets lost, and what one says to another comes in order, sooner or later."""
    last: dict[tuple[str, str], float] = {}

    def fate(sender: str, receiver: str, message: Message, now: float) -> Sequence[float]:
        comes = now + random.random() * random.choice([0.02, 2.0])
        last[sender, receiver] = max(last.get((sender, receiver), 0.0), comes)
        return [last[sender, receiver] - now]

    return fate
