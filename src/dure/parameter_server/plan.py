"""What a run of servers and workers is to be, before any of them lives."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from dure.collectives.compression import Compression
from dure.collectives.compression.bucket import Bucket
from dure.contracts.learning import Part, trained_from
from dure.contracts.lr_schedule import factor_at
from dure.contracts.strategy import World
from dure.contracts.task import Task
from dure.fleet.conditions import Conditions
from dure.machine.memory import available_memory
from dure.parameter_server.compressed import Coding
from dure.parameter_server.embeddings import (
    Tables,
    check_tables,
    dense_of,
    embeddings_of,
    tables_of,
)
from dure.parameter_server.gradients import Gradients, no_gradient
from dure.parameter_server.keys import Range, Vector, divide
from dure.parameter_server.layout import Layout
from dure.parameter_server.manager import first_layout
from dure.parameter_server.optimizer import Recipe, check_new
from dure.parameter_server.shard import Shard, Terms
from dure.parameter_server.table_shard import TableShard
from dure.parameter_server.tables import Table
from dure.tasks.unreached import unreached
from dure.tensors.flat import by_dtype, check_apart, trained_of

TRAINS_WITH: frozenset[Part] = frozenset({"clip_norm", "precision", "compile", "unfreeze"})
"""Of what a task may ask for, what workers of parameter servers can do."""

CANNOT: Mapping[Part, str] = {
    "ema": "the weights lie with the servers, and after a push nobody has them all"
}


@dataclass(frozen=True)
class Plan:
    """How many there are of each, and how they work together.

    groups: the workers of each, by number. staleness, batch_size, period, replicas, slows_stale,
    compression, accumulate: as in `ParameterServer`.
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
    """What users call `replicas`."""

    @property
    def workers(self) -> list[int]:
        """All of them."""
        return [worker for group in self.groups for worker in group]

    def made_for(self, task: Task, model: nn.Module) -> Plan:
        """The same for ranks that have this model."""
        return self

    @property
    def shares_data(self) -> bool:
        """Whether a group's workers share its batches, so that one computes what another left."""
        return True

    @property
    def deals(self) -> bool:
        """Whether parts of batches are dealt out to whoever is free."""
        return self.shares_data and self.staleness is None

    @property
    def teams(self) -> list[Sequence[int]]:
        """Workers that have to be equally far where a run ends before all meet."""
        return [] if self.deals else list(self.groups)

    def until(self, worker: int, batches: int) -> int:
        """Before which of its batches a worker stops, where all meet after so many of a group."""
        return batches

    def steps_per_epoch(self, computing: Gradients) -> int:
        """Batches in a pass over the data."""
        return computing.steps_per_epoch

    def companions(self, worker: int) -> list[int]:
        """Workers that cannot go on without this one."""
        return []

    def group_of(self, worker: int) -> int:
        """The number of a worker's group."""
        return next(n for n, workers in enumerate(self.groups) if worker in workers)

    def keys(self, model: nn.Module) -> list[list[Range]]:
        """The ranges of each server."""
        vectors = by_dtype(dense_of(model))
        return divide(
            [
                Vector(sum(one.numel() for one in parameters), dtype.itemsize)
                for dtype, parameters in vectors.items()
            ],
            self.servers,
        )

    def shards(self, model: nn.Module) -> list[Range]:
        """All ranges of keys, by the number of the shard."""
        return [keys for ranges in self.keys(model) for keys in ranges]

    def table_shards(self, model: nn.Module) -> list[Range]:
        """All ranges of rows, whose shards come after those of keys; `vector` is the table."""
        return [keys for _, keys in self._rows(model)]

    def _rows(self, model: nn.Module) -> list[tuple[int, Range]]:
        """(server, rows) of each shard of a table."""
        found = []
        for number, module in enumerate(embeddings_of(model).values()):
            rows, dim = module.weight.shape
            size = Vector(rows, dim * module.weight.dtype.itemsize)
            for server, ranges in enumerate(divide([size], self.servers)):
                found += [(server, Range(number, keys.start, keys.stop)) for keys in ranges]
        return found

    def all_portions(self, model: nn.Module) -> list[tuple[int, int, int]]:
        """(shard, start, stop) of every shard, those of tables at the end."""
        shards = [*self.shards(model), *self.table_shards(model)]
        return [(number, keys.start, keys.stop) for number, keys in enumerate(shards)]

    def layout(self, model: nn.Module) -> Layout:
        """Who owns what at first."""
        owners = [server for server, ranges in enumerate(self.keys(model)) for _ in ranges]
        owners += [server for server, _ in self._rows(model)]
        return first_layout(owners, self.servers, self.groups, self.replicas)

    def coding(self, model: nn.Module) -> Coding | None:
        """How pushes are compressed; None where they are not."""
        if not self.compression.compresses:
            return None
        return Coding(self.compression, dense_of(model), waits=self.staleness != 0)

    @property
    def remembers(self) -> bool:
        """Whether workers keep what compressed pushes have left out."""
        return self.compression.compresses and self.compression.remembers

    def terms(self, task: Task, model: nn.Module) -> Terms:
        """On what terms the shards of keys train. Raises ValueError as `Recipe.of` does."""
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
        """As `terms`, for shards of tables too. Call it before `tables`, which takes them out."""
        return replace(self.terms(task, model), tables=tables_of(task, model, seed))

    def tables(self, model: nn.Module, tables: Sequence[Table]) -> Tables | None:
        """Takes the tables, which are those of the terms, out of a model; None: it has none."""
        return Tables(model, tables, self.table_shards(model)) if tables else None

    def gradients(self, task: Task, model: nn.Module, seed: int) -> Gradients:
        """What computes gradients with this model. Its tables are still to be told to it."""
        return Gradients(
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
    shards: Sequence[Range],
    computing: Gradients,
    terms: Terms,
    table_shards: Sequence[Range] = (),
) -> list[Mapping[str, Any]]:
    """The states of shards, and behind them those of tables, with the weights of the beginning."""
    states = states_of_keys(shards, computing.flat.buffers, terms)
    states += [
        TableShard(number, rows, terms).state()
        for number, rows in enumerate(table_shards, start=len(shards))
    ]
    return states


def states_of_keys(
    shards: Sequence[Range], vectors: Sequence[Tensor], terms: Terms
) -> list[Mapping[str, Any]]:
    """The states of shards of keys that begin with the values of these vectors."""
    return [
        Shard(number, keys, vectors[keys.vector][keys.start : keys.stop].clone(), terms).state()
        for number, keys in enumerate(shards)
    ]


def in_words(
    shards: Sequence[Range],
    vectors: Sequence[Tensor],
    table_shards: Sequence[Range] = (),
    tables: Sequence[Table] = (),
) -> list[str]:
    """What each shard holds, for errors."""
    dtypes = [str(vector.dtype).removeprefix("torch.") for vector in vectors]
    names = [f"the {dtypes[keys.vector]} keys {keys.start} to {keys.stop - 1}" for keys in shards]
    names += [
        f"rows {keys.start} to {keys.stop - 1} of {tables[keys.vector].name}"
        for keys in table_shards
    ]
    return names


def recipe_of(task: Task, model: nn.Module) -> Recipe:
    """How servers make the task's optimizer. Raises ValueError where they cannot."""
    vectors = list(by_dtype(dense_of(model)).values())
    optimizer = task.optimizer(model.parameters())
    check_new(optimizer)
    # Where there are tables and nothing else, their own rules are all that counts.
    return Recipe.of(optimizer, vectors) if vectors else Recipe(type(optimizer), [], [])


def check_compression(compression: Compression) -> None:
    """Raises ValueError for one that makes no message of a single worker's gradient."""
    try:
        compression.codec(Bucket([torch.empty(1)]))
    except (ValueError, NotImplementedError) as error:
        raise ValueError(
            f"compression is {compression}, which encodes no push of a single worker, since only "
            f"ranks together can make its messages: take another, such as top-k:0.01, or none"
        ) from error


def check_compressed(plan: Plan, model: nn.Module) -> None:
    """Raises ValueError for a model whose pushes cannot be compressed as they are to be."""
    coding = plan.coding(model)
    if coding is None:
        return
    name = next(iter(embeddings_of(model)), None)
    if name is not None:
        raise ValueError(
            f"compression is {plan.compression}, but {name} is sparse, and the rows that are "
            f"pushed of it are not compressed: leave out compression, or take sparse=False"
        )
    for keys in plan.shards(model):
        coding.codec(keys)


def check_tables_whole(model: nn.Module, accumulate: int) -> None:
    """Raises ValueError for tables, of which the rows of a whole part are asked for at once."""
    if accumulate > 1 and embeddings_of(model):
        raise ValueError(
            f"accumulate is {accumulate}, but {next(iter(embeddings_of(model)))} is sparse, and a "
            f"worker asks for the rows of its whole part at once: take accumulate=1"
        )


def check_unfreeze(task: Task, skips: bool) -> None:
    """Raises ValueError where the optimizer at the servers would move what is frozen.

    skips: whether it leaves alone what has a gradient of zero.
    """
    if task.unfreeze is not None and not skips:
        raise ValueError(
            "unfreeze: the optimizer at the servers moves parameters that have no gradient as "
            "well: take SGD without momentum and weight decay"
        )


def check_reached(task: Task, model: nn.Module, part: int, skips: bool) -> None:
    """Raises ValueError for a parameter without a gradient that the servers would move.

    part: examples of a worker's step. skips: whether the optimizer leaves alone what has a gradient
    of zero.
    """
    if skips:
        return
    for name in unreached(task, model, max(1, min(part, len(task.train)))):
        raise ValueError(no_gradient(name))


def check_sparse(task: Task, model: nn.Module) -> None:
    """Raises ValueError for sparse embeddings that servers cannot have as tables."""
    check_tables(task, model)
    _check_memory(model)
    if task.compile and embeddings_of(model):
        raise ValueError(
            f"{next(iter(embeddings_of(model)))} is sparse, and a worker computes with the rows "
            f"that it was sent, which a compiled model does not see: leave compile out, or take "
            f"sparse=False"
        )
    for name in trained_from(task, embeddings_of(model)):
        raise ValueError(
            f"unfreeze names {name}, which is sparse, and servers train its rows from the start: "
            f"leave it out of unfreeze, or take sparse=False"
        )
    if task.clip_norm is not None and embeddings_of(model):
        raise ValueError(
            f"clip_norm is {task.clip_norm}, but {next(iter(embeddings_of(model)))} is sparse, and "
            f"torch takes no norms of sparse gradients: leave it out, or take sparse=False"
        )


def _check_memory(model: nn.Module) -> None:
    """Raises ValueError for tables that would not be there when the model is written."""
    names = {name: m.weight for name, m in embeddings_of(model).items() if m.weight.is_meta}
    available = available_memory()
    needed = sum(weight.nbytes for weight in names.values())
    if available is not None and needed > available:
        raise ValueError(
            f"{', '.join(names)} have {needed / 2**30:.1f} GiB, and this machine has "
            f"{available / 2**30:.1f} GiB, but rank 0 writes the model as a whole: take fewer rows"
        )


def check_model(model: nn.Module) -> None:
    """Raises ValueError for a model whose weights cannot lie in vectors of keys."""
    trained = trained_of(model)
    if not trained:
        raise ValueError("the model has no parameter that is trained: servers would hold nothing")
    # Tables may have no memory: servers make their rows.
    device = next((p.device for p in dense_of(model) if p.device.type != "cpu"), None)
    if device is not None:
        raise ValueError(f"the model is on {device}, and servers hold weights in the CPU's memory")
    if any(parameter.is_complex() for parameter in trained):
        raise ValueError("the model has complex parameters, which servers cannot hold")
    check_apart(model)


def check_world(world: World) -> None:
    """Raises ValueError for clients over a network, which are no workers."""
    if world.serves:
        raise ValueError(
            "a parameter server's workers are ranks, or simulated: clients over a network have "
            "federated systems, such as FedAvg"
        )


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
"""Conditions of clients that workers do not have."""


def check_under(conditions: Conditions) -> None:
    """Raises ValueError for conditions that workers do not have."""
    ideal = Conditions()
    if conditions.server_examples_per_second != ideal.server_examples_per_second:
        raise ValueError(
            "server_examples_per_second is of the server of split learning, which has a part of "
            "the model: leave it out"
        )
    for name in WITHOUT:
        if getattr(conditions, name) != getattr(ideal, name):
            raise ValueError(
                f"{name.replace('_', ' ')} is about clients, and a parameter server has workers: "
                f"leave it out"
            )
