"""What a run of servers and workers is to be, before any of them lives."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from torch import nn

from dure.contracts.lr_schedule import factor_at
from dure.contracts.strategy import World
from dure.contracts.task import Task
from dure.fleet.conditions import Conditions
from dure.parameter_server.gradients import Gradients
from dure.parameter_server.keys import Range, Vector, divide
from dure.parameter_server.layout import Layout
from dure.parameter_server.manager import first_layout
from dure.parameter_server.optimizer import Recipe
from dure.parameter_server.shard import Shard, Terms
from dure.tensors.flat import by_dtype, check_apart, trained_of


@dataclass(frozen=True)
class Plan:
    """How many there are of each, and how they work together.

    groups: the workers of each, by number. staleness, batch_size, period, replicas, slows_stale,
    clip_norm: as in `ParameterServer`.
    """

    servers: int
    groups: tuple[tuple[int, ...], ...]
    batch_size: int | None
    staleness: int | None
    period: int | None
    replicas: int
    slows_stale: bool
    clip_norm: float | None

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
        vectors = by_dtype(trained_of(model))
        return divide(
            [
                Vector(sum(one.numel() for one in parameters), dtype.itemsize)
                for dtype, parameters in vectors.items()
            ],
            self.servers,
        )

    def shards(self, model: nn.Module) -> list[Range]:
        """All ranges, by the number of the shard."""
        return [keys for ranges in self.keys(model) for keys in ranges]

    def layout(self, model: nn.Module) -> Layout:
        """Who owns what at first."""
        owners = [server for server, ranges in enumerate(self.keys(model)) for _ in ranges]
        return first_layout(owners, self.servers, self.groups, self.replicas)

    def terms(self, task: Task, model: nn.Module) -> Terms:
        """On what terms the shards train. Raises ValueError as `Recipe.of` does."""
        schedule: Callable[[int], float] | None = None
        if task.lr_schedule is not None:
            schedule = partial(factor_at, task.lr_schedule)
        return Terms(
            recipe=recipe_of(task, model),
            staleness=self.staleness,
            schedule=schedule,
            slows=self.slows_stale,
        )

    def gradients(self, task: Task, model: nn.Module, seed: int) -> Gradients:
        """What computes gradients with this model."""
        return Gradients(
            task,
            model,
            seed,
            self.batch_size,
            bulk=self.staleness == 0,
            skips=recipe_of(task, model).plain,
            groups=len(self.groups),
            clip_norm=self.clip_norm,
        )


def first_states(
    shards: Sequence[Range], computing: Gradients, terms: Terms
) -> list[Mapping[str, Any]]:
    """The states of shards with the weights of the beginning."""
    vectors = computing.flat.buffers
    return [
        Shard(number, keys, vectors[keys.vector][keys.start : keys.stop].clone(), terms).state()
        for number, keys in enumerate(shards)
    ]


def recipe_of(task: Task, model: nn.Module) -> Recipe:
    """How servers make the task's optimizer. Raises ValueError where they cannot."""
    vectors = list(by_dtype(trained_of(model)).values())
    return Recipe.of(task.optimizer(model.parameters()), vectors)


def check_model(model: nn.Module) -> None:
    """Raises ValueError for a model whose weights cannot lie in vectors of keys."""
    trained = trained_of(model)
    if not trained:
        raise ValueError("the model has no parameter that is trained: servers would hold nothing")
    device = next((p.device for p in trained if p.device.type != "cpu"), None)
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


def check_under(conditions: Conditions) -> None:
    """Raises ValueError for conditions that workers do not have."""
    ideal = Conditions()
    for name in ("availability", "arrival", "drop_out", "attack", "engine", "transfer_budget"):
        if getattr(conditions, name) != getattr(ideal, name):
            raise ValueError(
                f"{name.replace('_', ' ')} is about clients, and a parameter server has workers: "
                f"leave it out"
            )
