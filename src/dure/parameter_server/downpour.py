"""Downpour SGD: replicas train on data of their own, and communicate only with the servers.

    replica:  t mod n_fetch = 0:  begin to fetch w      accrued <- accrued + g;  w <- w - alpha·g
              t mod n_push = 0:   begin to push accrued;  accrued <- 0          (`replica`)
    server:   each push is a step of the task's optimizer, or of Adagrad with the rate gamma
              (`adagrad`), on the keys that it owns

Fetches, pushes and gradients overlap. Unlike a worker of the asynchronous parameter server
(`dure.parameter_server.strategy`), a replica has its own part of the data, trains on its own
weights between fetches, and may push the sum of several gradients.

    bytes of a step and replica     d/n_push up and d/n_fetch down, for d bytes of weights
                                    up those of a codec's message (`compressed`), if there is one

and an additional push and fetch at the end of a round, if the steps there include none.

Source: Dean et al. 2012, "Large Scale Distributed Deep Networks" (DistBelief).
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import ClassVar

from torch import nn

from dure.arguments import above, at_least, check_ranges
from dure.collectives.compression import Compression, NoCompression
from dure.collectives.compression import parse as parse_compression
from dure.contracts.learner import Learner, Proof
from dure.contracts.strategy import Feature, RunTraits, Strategy, Traits
from dure.contracts.task import Task
from dure.contracts.world import Kind, RankContext, World
from dure.data import partition
from dure.data.batches import check_batch_size
from dure.data.partition import IID, Partition, PartitionDescription, describe
from dure.parameter_server.downpour_plan import DownpourPlan
from dure.parameter_server.embeddings import check_no_tables
from dure.parameter_server.plan import (
    CANNOT,
    TRAINS_WITH,
    WITHOUT,
    check_compressed,
    check_compression,
    check_model,
    check_reached,
    check_unfreeze,
    check_world,
)
from dure.parameter_server.processes.learner import ProcessesLearner, run_server_or_worker
from dure.parameter_server.replica import Pace
from dure.parameter_server.simulated_replicas import SimulatedReplicas
from dure.settings import parse_fields
from dure.tasks.batch_norm import check_own_batches


@dataclass(frozen=True)
class Downpour(Strategy):
    """Downpour SGD: replicas train on their own data, and push and fetch at their own pace.

    Args:
        replicas: number of copies of the model that train.
        partitions: machines over which each replica is divided, as a pipeline.
        servers: number of servers that share the weights.
        batch_size: examples of a replica's step; None is all of its data.
        fetch_every: steps between fetches of the weights.
        push_every: steps between pushes of the summed gradients.
        warm_start: steps that the first replica makes alone, before the others begin.
        gamma: rate of Adagrad at the servers, in place of the task's optimizer.
        alpha: rate of the replicas' own steps; by default the learning rate of the task.
        overlap: whether fetches and pushes overlap with a replica's computation.
        period: steps between rounds, after which all replicas are evaluated or saved; None is an
            epoch.
        microbatches: microbatches of a replica's batch, if the replica is a pipeline.
        partition: how examples are divided over replicas: iid, label-shards:2, dirichlet:0.5,
            quantity-skew:1, feature-skew:0.8 or blocks:2.
        copies: copies of each server's weights, 0 or 1: with a copy, a server may fail.
        compression: compression of the replicas' pushes, such as top-k:0.01.
        accumulate: pieces in which a worker computes its part of a batch, one after another.
    """

    replicas: int = field(default=4, metadata=at_least(1))
    partitions: int = field(default=1, metadata=at_least(1))
    servers: int = field(default=1, metadata=at_least(1))
    batch_size: int | None = 64
    fetch_every: int = field(default=1, metadata=at_least(1))
    push_every: int = field(default=1, metadata=at_least(1))
    warm_start: int = field(default=0, metadata=at_least(0))
    gamma: float | None = field(default=None, metadata=above(0))
    alpha: float | None = field(default=None, metadata=above(0))
    overlap: bool = True
    period: int | None = field(default=None, metadata=at_least(1))
    microbatches: int = field(default=4, metadata=at_least(1))
    partition: Partition = field(default_factory=IID)
    copies: int = 0
    compression: Compression = field(default_factory=NoCompression)
    accumulate: int = field(default=1, metadata=at_least(1))

    name: ClassVar[str] = "downpour"
    traits: ClassVar[Traits] = Traits(
        kind="ranks",
        unit="round",
        additional_worlds={"clients": "Downpour SGD, simulated"},
        trains_with=TRAINS_WITH,
        without=frozenset({*WITHOUT, "server_examples_per_second"}),
        coordinated=True,
    )

    def __post_init__(self) -> None:
        parse_fields(self, {"partition": partition.parse, "compression": parse_compression})

    @property
    def run_traits(self) -> RunTraits:
        return RunTraits(
            ranks=1 + self.servers + self.replicas * self.partitions,
            # Arrival order, and the time of a fetch, depend on the machine.
            deterministic=self.replicas == 1 and not self.overlap,
        )

    @property
    def label(self) -> str:
        parts = ["Downpour SGD", f"{self.fetch_every}/{self.push_every}"]
        if self.gamma is not None:
            parts.append("Adagrad")
        parts += [str(self.compression)] if self.compression.compresses else []
        return " ".join(parts)

    def label_in(self, kind: Kind) -> str:
        return f"{self.label}, simulated" if kind == "clients" else self.label

    @property
    def plan(self) -> DownpourPlan:
        """Plan of servers and undivided replicas, as in simulations."""
        return DownpourPlan(
            servers=self.servers,
            groups=(tuple(range(self.replicas)),),
            batch_size=self.batch_size,
            staleness=None,
            period=self.period,
            replicas=self.copies,
            slows_stale=False,
            compression=self.compression,
            accumulate=self.accumulate,
            pace=Pace(self.fetch_every, self.push_every, self.overlap),
            stages=self.partitions,
            microbatches=self.microbatches,
            data_partition=self.partition,
            warm_start=self.warm_start,
            gamma=self.gamma,
            alpha=self.alpha,
        )

    def cannot(self, feature: Feature, kind: Kind) -> str | None:
        if self.partitions > 1:
            return self.plan.pipeline.parallel.cannot(feature, kind)
        return CANNOT.get(feature)

    def check(self, task: Task, world: World) -> None:
        check_ranges(self)
        if self.copies not in (0, 1) or (self.copies and self.servers < 2):
            raise ValueError(
                f"copies is {self.copies} with servers={self.servers}, but it has to be 0, or 1 "
                "with at least two servers"
            )
        check_compression(self.compression)
        if self.accumulate > 1 and self.partitions > 1:
            raise ValueError(
                "a replica of several partitions computes its batch in microbatches: leave "
                "accumulate out"
            )
        check_batch_size(self.batch_size)
        self.partition.divide(self.replicas, task.train)
        ranks = self.run_traits.ranks
        if world.workers not in (None, ranks):
            raise ValueError(
                f"servers={self.servers} and {self.replicas} replicas of {self.partitions} need "
                f"{ranks} ranks including the leader, but the world has {world.workers}"
            )
        check_world(world)

    def check_model(self, task: Task, model: nn.Module, world: World) -> None:
        """Check that servers can train this model; raises ValueError if not."""
        check_model(model)
        check_no_tables(model)
        check_compressed(self.plan, model)
        self.plan.terms(task, model)
        check_unfreeze(task, self.plan.skips(task, model))
        together = None if self.batch_size is None else self.batch_size * self.replicas
        check_own_batches(task, model, together, self.replicas, self.accumulate)
        part = len(task.train) // self.replicas if self.batch_size is None else self.batch_size
        check_reached(task, model, part, self.plan.skips(task, model))
        if self.partitions > 1:
            self.plan.pipeline.check(task, model)

    def prove(self, task: Task, model: nn.Module, world: World) -> Proof | None:
        """Run the stages of a divided replica and the undivided model side by side.

        None if undivided.
        """
        self.check_model(task, model, world)
        if self.partitions == 1:
            return None
        return self.plan.pipeline.parallel.prove(task, model, world)

    def division(self, task: Task, seed: int) -> PartitionDescription | None:
        train = task.train
        parts = self.partition.divide(self.replicas, train, seed)
        return describe(self.partition, parts, train.labels(), train.classes)

    def run_assistant(self, task: Task, context: RankContext, seed: int) -> str:
        return run_server_or_worker(task, context, seed, self.plan)

    def learner(self, task: Task, context: RankContext, seed: int) -> Learner:
        if context.kind == "clients":
            return SimulatedReplicas(task, context, seed, self.plan)
        return ProcessesLearner(task, context, seed, self.plan)
