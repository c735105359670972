"""Plan of a run with servers and workers, and checks of task, model and conditions."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from dure.collectives.compression import Compression
from dure.collectives.compression.bucket import CompressionBucket
from dure.contracts.lr_schedule import factor_at
from dure.contracts.strategy import Feature
from dure.contracts.task import Task
from dure.contracts.training_options import Part, trained_from
from dure.contracts.world import World
from dure.fleet.conditions import Conditions, conditions_of
from dure.machine.devices import to_host
from dure.machine.memory import available_memory
from dure.parameter_server.compressed import PushCoding
from dure.parameter_server.embeddings import (
    Tables,
    check_tables,
    dense_of,
    embeddings_of,
    tables_of,
)
from dure.parameter_server.gradients import GradientComputation, no_gradient
from dure.parameter_server.keys import KeyRange, VectorSize, divide
from dure.parameter_server.layout import ShardLayout
from dure.parameter_server.manager import first_layout
from dure.parameter_server.optimizer import OptimizerRecipe, check_new
from dure.parameter_server.shard import Shard, Terms
from dure.parameter_server.table_shard import TableShard
from dure.parameter_server.tables import EmbeddingTable
from dure.tasks.unused_parameters import parameters_without_gradient
from dure.tensors.flat import by_dtype, check_no_shared_memory, trainable_parameters

TRAINS_WITH: frozenset[Part] = frozenset(
    {"clip_norm", "precision", "compile", "unfreeze", "adapter"}
)
"""Optional parts of a task that workers of parameter servers support."""

CANNOT: Mapping[Feature, str] = {
    "ema": "the servers hold the weights, and no process has all of them after a push"
}


@dataclass(frozen=True)
class ParameterServerPlan:
    """Numbers of servers and workers, and their settings.

    Args:
        servers: number of servers.
        groups: numbers of the workers in each group.
        batch_size: as in `ParameterServer`.
        staleness: as in `ParameterServer`.
        period: as in `ParameterServer`.
        replicas: copies of each shard.
        slows_stale: as in `ParameterServer`.
        compression: as in `ParameterServer`.
        accumulate: as in `ParameterServer`.
    """

    servers: int
    groups: tuple[tuple[int, ...], ...]
    batch_size: int | None
    staleness: int | None
    period: int | None
    replicas: int
    slows_stale: bool
    compression: Compression
    accumulate: int

    copies_field: ClassVar[str] = "replicas"
    """Name of the user's setting for `replicas`."""

    @property
    def workers(self) -> list[int]:
        """All workers."""
        return [worker for group in self.groups for worker in group]

    def made_for(self, task: Task, model: nn.Module) -> ParameterServerPlan:
        """Return the plan for ranks that have this model."""
        return self

    @property
    def shares_data(self) -> bool:
        """Whether a group's workers share its batches, so that one can compute another's part."""
        return True

    @property
    def deals(self) -> bool:
        """Whether a scheduler assigns parts of batches to idle workers."""
        return self.shares_data and self.staleness is None

    @property
    def teams(self) -> list[Sequence[int]]:
        """Workers that must have made equally many steps at a graceful stop."""
        return [] if self.deals else list(self.groups)

    def worker_batches(self, worker: int, batches: int) -> int:
        """Return the batches of a worker until the end of a round.

        batches: batches of the worker's group until then.
        """
        return batches

    def steps_per_epoch(self, computing: GradientComputation) -> int:
        """Return the batches in a pass over the data."""
        return computing.steps_per_epoch

    def companions(self, worker: int) -> list[int]:
        """Return the workers that cannot continue without this worker."""
        return []

    def group_of(self, worker: int) -> int:
        """Return the number of a worker's group."""
        return next(n for n, workers in enumerate(self.groups) if worker in workers)

    def keys(self, model: nn.Module) -> list[list[KeyRange]]:
        """Return the key ranges of each server."""
        vectors = by_dtype(dense_of(model))
        return divide(
            [
                VectorSize(sum(one.numel() for one in parameters), dtype.itemsize)
                for dtype, parameters in vectors.items()
            ],
            self.servers,
        )

    def shards(self, model: nn.Module) -> list[KeyRange]:
        """Return all key ranges, by the number of the shard."""
        return [keys for ranges in self.keys(model) for keys in ranges]

    def table_shards(self, model: nn.Module) -> list[KeyRange]:
        """Return all row ranges, whose shards follow those of keys; `vector` is the table."""
        return [keys for _, keys in self._rows(model)]

    def _rows(self, model: nn.Module) -> list[tuple[int, KeyRange]]:
        """Return (server, rows) of each shard of a table."""
        found = []
        for number, module in enumerate(embeddings_of(model).values()):
            rows, dim = module.weight.shape
            size = VectorSize(rows, dim * module.weight.dtype.itemsize)
            for server, ranges in enumerate(divide([size], self.servers)):
                found += [(server, KeyRange(number, keys.start, keys.stop)) for keys in ranges]
        return found

    def all_portions(self, model: nn.Module) -> list[tuple[int, int, int]]:
        """Return (shard, start, stop) of every shard, those of tables last."""
        shards = [*self.shards(model), *self.table_shards(model)]
        return [(number, keys.start, keys.stop) for number, keys in enumerate(shards)]

    def layout(self, model: nn.Module) -> ShardLayout:
        """Return the initial layout."""
        owners = [server for server, ranges in enumerate(self.keys(model)) for _ in ranges]
        owners += [server for server, _ in self._rows(model)]
        return first_layout(owners, self.servers, self.groups, self.replicas)

    def coding(self, model: nn.Module) -> PushCoding | None:
        """Return the encoder of pushes; None without compression."""
        if not self.compression.compresses:
            return None
        return PushCoding(self.compression, dense_of(model), waits=self.staleness != 0)

    @property
    def remembers(self) -> bool:
        """Whether workers keep residuals of compressed pushes."""
        return self.compression.compresses and self.compression.remembers

    def terms(self, task: Task, model: nn.Module) -> Terms:
        """Return the training terms of key shards. Raises ValueError as `OptimizerRecipe.of`."""
        schedule: Callable[[int], float] | None = None
        if task.lr_schedule is not None:
            schedule = partial(factor_at, task.lr_schedule)
        return Terms(
            recipe=recipe_of(task, model),
            staleness=self.staleness,
            schedule=schedule,
            slows=self.slows_stale,
            coding=self.coding(model),
            clip_norm=task.clip_norm if self.staleness == 0 else None,
        )

    def terms_with_tables(self, task: Task, model: nn.Module, seed: int) -> Terms:
        """Return `terms` with tables.

        Call this before `tables`, which removes them from the model.
        """
        return replace(self.terms(task, model), tables=tables_of(task, model, seed))

    def tables(self, model: nn.Module, tables: Sequence[EmbeddingTable]) -> Tables | None:
        """Replace the sparse embeddings of a model by these tables; None without tables."""
        return Tables(model, tables, self.table_shards(model)) if tables else None

    def gradients(self, task: Task, model: nn.Module, seed: int) -> GradientComputation:
        """Return the gradient computation of this model; the caller sets its tables."""
        return GradientComputation(
            task,
            model,
            seed,
            self.batch_size,
            bulk=self.staleness == 0,
            skips=recipe_of(task, model).plain,
            groups=len(self.groups),
            compressed=self.compression.compresses,
            accumulate=self.accumulate,
        )


def first_states(
    shards: Sequence[KeyRange],
    computing: GradientComputation,
    terms: Terms,
    table_shards: Sequence[KeyRange] = (),
) -> list[Mapping[str, Any]]:
    """Return the initial states of shards, those of tables last."""
    states = states_of_keys(shards, computing.flat.buffers, terms)
    states += [
        TableShard(number, rows, terms).state()
        for number, rows in enumerate(table_shards, start=len(shards))
    ]
    return states


def states_of_keys(
    shards: Sequence[KeyRange], vectors: Sequence[Tensor], terms: Terms
) -> list[Mapping[str, Any]]:
    """Return the states of key shards that begin with the values of these vectors."""
    return [
        # The servers have their weights in the CPU's memory.
        Shard(number, keys, to_host(vectors[keys.vector][keys.start : keys.stop]), terms).state()
        for number, keys in enumerate(shards)
    ]


def in_words(
    shards: Sequence[KeyRange],
    vectors: Sequence[Tensor],
    table_shards: Sequence[KeyRange] = (),
    tables: Sequence[EmbeddingTable] = (),
) -> list[str]:
    """Return a description of each shard, for errors."""
    dtypes = [str(vector.dtype).removeprefix("torch.") for vector in vectors]
    names = [f"the {dtypes[keys.vector]} keys {keys.start} to {keys.stop - 1}" for keys in shards]
    names += [
        f"rows {keys.start} to {keys.stop - 1} of {tables[keys.vector].name}"
        for keys in table_shards
    ]
    return names


def recipe_of(task: Task, model: nn.Module) -> OptimizerRecipe:
    """Return the recipe of the task's optimizer. Raises ValueError if servers cannot use it."""
    vectors = list(by_dtype(dense_of(model)).values())
    optimizer = task.optimizer(model.parameters())
    check_new(optimizer)
    # A model with tables alone needs only their update rules.
    return (
        OptimizerRecipe.of(optimizer, vectors)
        if vectors
        else OptimizerRecipe(type(optimizer), [], [])
    )


def check_compression(compression: Compression) -> None:
    """Check that a single worker's gradient can be encoded; raises ValueError if not."""
    try:
        compression.codec(CompressionBucket([torch.empty(1)]))
    except (ValueError, NotImplementedError) as error:
        raise ValueError(
            f"compression is {compression}, which cannot encode a push of a single worker, "
            "because all ranks compute its messages together: use another, such as top-k:0.01, "
            "or none"
        ) from error


def check_compressed(plan: ParameterServerPlan, model: nn.Module) -> None:
    """Check that the model's pushes can be compressed; raises ValueError if not."""
    coding = plan.coding(model)
    if coding is None:
        return
    name = next(iter(embeddings_of(model)), None)
    if name is not None:
        raise ValueError(
            f"compression is {plan.compression}, but {name} is sparse, and pushed rows cannot be "
            "compressed: leave out compression, or use sparse=False"
        )
    for keys in plan.shards(model):
        coding.codec(keys)


def check_tables_whole(model: nn.Module, accumulate: int) -> None:
    """Check that `accumulate` is 1 for a model with tables; raises ValueError if not.

    A worker requests the rows of a whole part at once.
    """
    if accumulate > 1 and embeddings_of(model):
        raise ValueError(
            f"accumulate is {accumulate}, but {next(iter(embeddings_of(model)))} is sparse, and a "
            "worker pulls the rows of its whole part at once: use accumulate=1"
        )


def check_unfreeze(task: Task, skips: bool) -> None:
    """Check that the servers' optimizer leaves frozen parameters unchanged; raises ValueError.

    `skips`: whether the optimizer leaves elements with a zero gradient unchanged.
    """
    if task.unfreeze is not None and not skips:
        raise ValueError(
            "unfreeze: the optimizer at the servers also changes parameters without a gradient: "
            "use SGD without momentum and weight decay"
        )


def check_reached(task: Task, model: nn.Module, part: int, skips: bool) -> None:
    """Check that all parameters that the servers would move have a gradient; raises ValueError.

    `part` is the number of examples of a worker's step. `skips` is as in `check_unfreeze`.
    """
    if skips:
        return
    for name in parameters_without_gradient(task, model, max(1, min(part, len(task.train)))):
        raise ValueError(no_gradient(name))


def check_sparse(task: Task, model: nn.Module) -> None:
    """Check that servers can train the sparse embeddings as tables; raises ValueError if not."""
    check_tables(task, model)
    _check_memory(model)
    if task.compile and embeddings_of(model):
        raise ValueError(
            f"{next(iter(embeddings_of(model)))} is sparse, and a worker computes with the rows "
            "that it received, which a compiled model cannot use: leave compile out, or use "
            "sparse=False"
        )
    for name in trained_from(task, embeddings_of(model)):
        raise ValueError(
            f"unfreeze names {name}, which is sparse, and servers train its rows from the start: "
            "leave it out of unfreeze, or use sparse=False"
        )
    if task.clip_norm is not None and embeddings_of(model):
        raise ValueError(
            f"clip_norm is {task.clip_norm}, but {next(iter(embeddings_of(model)))} is sparse, "
            "and torch cannot compute norms of sparse gradients: leave it out, or use "
            "sparse=False"
        )


def _check_memory(model: nn.Module) -> None:
    """Check that this machine has memory to write the tables; raises ValueError if not."""
    names = {name: m.weight for name, m in embeddings_of(model).items() if m.weight.is_meta}
    available = available_memory()
    needed = sum(weight.nbytes for weight in names.values())
    if available is not None and needed > available:
        raise ValueError(
            f"{', '.join(names)} have {needed / 2**30:.1f} GiB, and this machine has "
            f"{available / 2**30:.1f} GiB, but rank 0 writes the whole model: use fewer rows"
        )


def check_model(model: nn.Module) -> None:
    """Check that the model's weights can form vectors of keys; raises ValueError if not."""
    trained = trainable_parameters(model)
    if not trained:
        raise ValueError(
            "the model has no parameter that is trained: servers would have nothing to hold"
        )
    # Tables may be on the meta device: servers create their rows.
    device = next((p.device for p in dense_of(model) if p.device.type != "cpu"), None)
    if device is not None:
        raise ValueError(f"the model is on {device}, but servers hold weights in CPU memory")
    if any(parameter.is_complex() for parameter in trained):
        raise ValueError("the model has complex parameters, which servers cannot hold")
    check_no_shared_memory(model)


def check_world(world: World) -> None:
    """Check that the world has ranks or simulated workers, and conditions that workers support.

    Raises ValueError if not.
    """
    if world.serves:
        raise ValueError(
            "a parameter server's workers have to be ranks or simulated: for clients over a "
            "network use a federated system, such as FedAvg"
        )
    conditions = conditions_of(world)
    if conditions is not None:
        _check_conditions(conditions)


WITHOUT = (
    "availability",
    "arrival",
    "drop_out",
    "attack",
    "engine",
    "energy",
    "transfer_budget",
    "keep_updates",
    "deadline",
)
"""Conditions of clients that workers do not support."""


def _check_conditions(conditions: Conditions) -> None:
    ideal = Conditions()
    if conditions.server_examples_per_second != ideal.server_examples_per_second:
        raise ValueError(
            "server_examples_per_second applies only to the server of split learning, which "
            "computes a part of the model: leave it out"
        )
    for name in WITHOUT:
        if getattr(conditions, name) != getattr(ideal, name):
            raise ValueError(
                f"{name.replace('_', ' ')} applies to clients, but a parameter server has "
                "workers: leave it out"
            )
