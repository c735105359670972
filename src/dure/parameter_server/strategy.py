"""Parameter server: servers hold the weights, workers push gradients and pull weights.

    worker:   w = pull();  g = gradient of its part of a batch at w;  push(g);  and again
    server:   w <- w - step(g)     by the task's optimizer, on the keys that it owns

Workers do not communicate with each other. The staleness is the number of clocks by which a worker
may be ahead of the slowest: 0 is bulk synchronous, and equals data parallel; s is stale synchronous
parallel; None is asynchronous. A run consists of *rounds* of `period` batches, after which all
workers meet, so that the run can be evaluated, saved, or ended.

    bytes of a step and worker     d up and d down, for d bytes of weights
                                   up those of a codec's message (`compressed`), if there is one

    rows of sparse embeddings      only those of the batch (`table_shard`)

and as much again between servers for every update with a copy (`server`): for each push, or once
for the whole batch with staleness 0.

Source: Li et al. 2014, "Scaling Distributed Machine Learning with the Parameter Server"; Ho et al.
2013, "More Effective Distributed ML via a Stale Synchronous Parallel Parameter Server".
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import ClassVar

from torch import nn

from dure.arguments import at_least, check_ranges
from dure.collectives.compression import Compression, NoCompression
from dure.collectives.compression import parse as parse_compression
from dure.contracts.learner import Learner
from dure.contracts.strategy import Feature, RunTraits, Strategy, Traits
from dure.contracts.task import Task
from dure.contracts.world import Kind, RankContext, World
from dure.data.batches import check_joint_batch
from dure.fleet.conditions import conditions_of
from dure.parameter_server.embeddings import check_tables_on
from dure.parameter_server.plan import (
    CANNOT,
    TRAINS_WITH,
    WITHOUT,
    ParameterServerPlan,
    check_compressed,
    check_compression,
    check_model,
    check_reached,
    check_sparse,
    check_tables_whole,
    check_unfreeze,
    check_world,
    recipe_of,
)
from dure.parameter_server.processes.learner import ProcessesLearner, run_server_or_worker
from dure.parameter_server.processes.meeting import ranks_of
from dure.parameter_server.simulated import SimulatedParameterServer
from dure.settings import parse_fields
from dure.tasks.batch_norm import check_pieces


@dataclass(frozen=True)
class ParameterServer(Strategy):
    """Servers own the weights by ranges of keys; workers push gradients and pull weights.

    Args:
        servers: number of servers that share the weights.
        workers: number of workers that compute gradients, in all groups together.
        batch_size: examples of a step over all workers of a group together; None is all the data.
        staleness: steps by which a worker may be ahead of the slowest of its group: 0 is
            synchronous,
            None is unbounded.
        period: steps between rounds, after which all workers are evaluated or saved; None is an
            epoch.
        replicas: copies of each server's weights, 0 or 1: with a copy, a server may fail.
        groups: number of worker groups, which share the weights and do not wait for each other;
            each
            group processes all the data, in an order of its own.
        slows_stale: whether an update whose gradient is n updates old counts one n-th.
        compression: compression of the workers' pushes, such as top-k:0.01.
        accumulate: pieces in which a worker computes its part of a batch, one after another.
    """

    servers: int = field(default=1, metadata=at_least(1))
    workers: int = field(default=2, metadata=at_least(1))
    batch_size: int | None = 64
    staleness: int | None = 0
    period: int | None = field(default=None, metadata=at_least(1))
    replicas: int = 0
    groups: int = field(default=1, metadata=at_least(1))
    slows_stale: bool = False
    compression: Compression = field(default_factory=NoCompression)
    accumulate: int = field(default=1, metadata=at_least(1))

    name: ClassVar[str] = "parameter-server"
    traits: ClassVar[Traits] = Traits(
        kind="ranks",
        unit="round",
        additional_worlds={"clients": "parameter server, simulated"},
        trains_with=TRAINS_WITH,
        without=frozenset({*WITHOUT, "server_examples_per_second"}),
        coordinated=True,
    )

    def __post_init__(self) -> None:
        parse_fields(self, {"compression": parse_compression})

    @property
    def run_traits(self) -> RunTraits:
        return RunTraits(
            ranks=ranks_of(self.plan),
            # Arrival order depends on the machine unless workers wait for all others.
            deterministic=self.staleness == 0 and self.groups == 1,
        )

    def label_in(self, kind: Kind) -> str:
        return f"{self.label}, simulated" if kind == "clients" else self.label

    @property
    def label(self) -> str:
        ahead = {0: "synchronous", None: "asynchronous"}
        parts = ["parameter server", ahead.get(self.staleness, f"staleness {self.staleness}")]
        parts += [str(self.compression)] if self.compression.compresses else []
        return " ".join(parts)

    @property
    def plan(self) -> ParameterServerPlan:
        """Plan with the numbers of servers and workers."""
        each = self.workers // self.groups
        return ParameterServerPlan(
            servers=self.servers,
            groups=tuple(tuple(range(g * each, (g + 1) * each)) for g in range(self.groups)),
            batch_size=self.batch_size,
            staleness=self.staleness,
            period=self.period,
            replicas=self.replicas,
            slows_stale=self.slows_stale,
            compression=self.compression,
            accumulate=self.accumulate,
        )

    def cannot(self, feature: Feature, kind: Kind) -> str | None:
        return CANNOT.get(feature)

    def check(self, task: Task, world: World) -> None:
        check_ranges(self)
        if self.staleness is not None and self.staleness < 0:
            raise ValueError(
                f"staleness is {self.staleness}, but it has to be 0 or more (None: unlimited)"
            )
        if self.workers % self.groups:
            raise ValueError(
                f"{self.workers} workers cannot be divided into {self.groups} groups of one size"
            )
        if self.replicas not in (0, 1) or (self.replicas and self.servers < 2):
            raise ValueError(
                f"replicas is {self.replicas} with servers={self.servers}, but it has to be 0, or "
                "1 with at least two servers"
            )
        if self.slows_stale and self.staleness == 0:
            raise ValueError(
                "slows_stale applies to stale gradients, but with staleness=0 no gradient is stale"
            )
        check_compression(self.compression)
        check_joint_batch(self.batch_size, len(task.train), self.workers // self.groups)
        ranks = ranks_of(self.plan)
        if world.workers not in (None, ranks):
            raise ValueError(
                f"servers={self.servers} and workers={self.workers} need {ranks} ranks "
                f"including the leader, but the world has {world.workers}"
            )
        check_world(world)

    def check_model(self, task: Task, model: nn.Module, world: World) -> None:
        """Check that servers can train this model; raises ValueError if not."""
        check_model(model)
        check_sparse(task, model)
        check_tables_whole(model, self.accumulate)
        check_unfreeze(task, recipe_of(task, model).plain)
        check_compressed(self.plan, model)
        recipe_of(task, model)
        check_pieces(task, model, self.batch_size, self.workers // self.groups, self.accumulate)
        batch = len(task.train) if self.batch_size is None else self.batch_size
        part = batch // (self.workers // self.groups)
        check_reached(task, model, part, recipe_of(task, model).plain)
        conditions = conditions_of(world)
        if conditions is not None:
            check_tables_on(model, conditions.device)

    def run_assistant(self, task: Task, context: RankContext, seed: int) -> str:
        return run_server_or_worker(task, context, seed, self.plan)

    def learner(self, task: Task, context: RankContext, seed: int) -> Learner:
        if context.kind == "clients":
            return SimulatedParameterServer(task, context, seed, self.plan)
        return ProcessesLearner(task, context, seed, self.plan)
