"""Plan of a run of Downpour SGD: servers, and replicas that train on their own data.

A worker computes gradients, as a rank or simulated. An undivided replica is a single worker, and so
is every replica in a simulation. A replica of p stages is a pipeline of p workers: stage k of
replica r is worker r·p + k. The workers of the same stage form a group of the plan, and a group
exchanges the keys of its stage with the servers.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import ClassVar

from torch import nn

from dure.contracts.lr_schedule import factor_at
from dure.contracts.task import Task
from dure.data.client_part import ClientExamples, divide
from dure.data.examples import Examples
from dure.data.partition import Partition
from dure.parameter_server.adagrad import DownpourAdagrad
from dure.parameter_server.gradients import GradientComputation
from dure.parameter_server.keys import KeyRange
from dure.parameter_server.local_step import LocalStep
from dure.parameter_server.optimizer import OptimizerRecipe
from dure.parameter_server.plan import ParameterServerPlan, recipe_of
from dure.parameter_server.replica import Pace
from dure.parameter_server.shard import Terms
from dure.parameter_server.stages import ReplicaPipeline, StageKeys, cut_at_stages, stage_of
from dure.tasks.batch_norm import needs_two


@dataclass(frozen=True)
class DownpourPlan(ParameterServerPlan):
    """Plan whose workers are replicas, or the stages of replicas.

    Args:
        pace: steps between fetches, and between pushes (n_fetch, n_push).
        stages: pipeline stages of each replica; `Downpour.partitions`.
        microbatches: microbatches of a replica's batch, if a replica has several stages.
        data_partition: division of the training examples over replicas; `Downpour.partition`.
        warm_start: steps that the first replica makes alone, before the others begin.
        gamma: rate of Adagrad at the servers, in place of the task's optimizer; None for the task's
            optimizer.
        alpha: learning rate of the replicas' own steps; None for the task's learning rate.
        stage_keys: key ranges of the stages, each with its stage (`made_for`); empty if replicas
            are undivided.
    """

    pace: Pace
    stages: int
    microbatches: int
    data_partition: Partition
    warm_start: int
    gamma: float | None
    alpha: float | None
    stage_keys: tuple[StageKeys, ...] = ()

    copies_field: ClassVar[str] = "copies"

    def made_for(self, task: Task, model: nn.Module) -> DownpourPlan:
        """Return the plan for a model, with a worker for each stage of each replica."""
        if self.stages == 1:
            return self
        stages = range(self.stages)
        first_workers = range(0, len(self.workers) * self.stages, self.stages)
        return replace(
            self,
            groups=tuple(tuple(first + stage for first in first_workers) for stage in stages),
            stage_keys=self.pipeline.stage_keys(task, model),
        )

    @property
    def pipeline(self) -> ReplicaPipeline:
        """Division of each replica into stages."""
        return ReplicaPipeline(self.stages, self.microbatches, self.batch_size)

    @property
    def workers(self) -> list[int]:
        return sorted(super().workers)

    def replica_of(self, worker: int) -> int:
        """Return the index of a worker's replica."""
        return worker // len(self.groups)

    def workers_of_replica(self, replica: int) -> list[int]:
        """Return the workers of a replica, in the order of stages."""
        stages = len(self.groups)
        return list(range(replica * stages, (replica + 1) * stages))

    def companions(self, worker: int) -> list[int]:
        """Return the workers of the other stages of the worker's replica."""
        return [
            other for other in self.workers_of_replica(self.replica_of(worker)) if other != worker
        ]

    def keys(self, model: nn.Module) -> list[list[KeyRange]]:
        """Return the key ranges of each server; each range belongs to a single stage."""
        ranges = super().keys(model)
        return (
            [cut_at_stages(self.stage_keys, each) for each in ranges] if self.stage_keys else ranges
        )

    def portions(self, worker: int, shards: Sequence[KeyRange]) -> list[tuple[int, int, int]]:
        """Return (shard, first key, last key + 1) of the keys that a worker fetches and pushes.

        The keys are those of the worker's stage. shards: key ranges of all shards, in order.
        """
        stage = worker % len(self.groups)
        return [
            (number, keys.start, keys.stop)
            for number, keys in enumerate(shards)
            if not self.stage_keys or stage_of(self.stage_keys, keys) == stage
        ]

    @property
    def replicas_of_model(self) -> int:
        """Number of replicas."""
        return len(self.groups[0])

    @property
    def shares_data(self) -> bool:
        """Whether workers share batches: no, each replica has its own examples."""
        return False

    @property
    def teams(self) -> list[Sequence[int]]:
        """Workers of each replica, which must have made equally many steps at a graceful stop."""
        return [self.workers_of_replica(replica) for replica in range(self.replicas_of_model)]

    def worker_batches(self, worker: int, batches: int) -> int:
        """Return `batches`, and in addition the steps of the warm start for the first replica."""
        return batches + (self.warm_start if self.replica_of(worker) == 0 else 0)

    def parts(self, model: nn.Module, examples: Examples, seed: int) -> Sequence[ClientExamples]:
        """Return the training examples of each replica, with their batches."""
        return divide(
            self.data_partition,
            self.replicas_of_model,
            examples,
            self.batch_size,
            seed,
            joins=needs_two(model, examples),
        )

    def steps_per_epoch(self, computing: GradientComputation) -> int:
        """Return the batches in a pass over the examples of the replica with the most batches."""
        parts = self.parts(computing.model, computing.examples, computing.seed)
        return max(part.batches.steps_per_epoch for part in parts)

    def terms(self, task: Task, model: nn.Module) -> Terms:
        """Return the terms on which a server applies pushes: optimizer, schedule, decoder.

        Staleness is unbounded. Raises ValueError as `adagrad`.
        """
        schedule: Callable[[int], float] | None = None
        if task.lr_schedule is not None:
            schedule = partial(factor_at, task.lr_schedule)
        recipe = recipe_of(task, model)
        if self.gamma is not None:
            recipe = adagrad(recipe, self.gamma)
        coding = self.coding(model)
        return Terms(recipe=recipe, staleness=None, schedule=schedule, coding=coding)

    def gradients(self, task: Task, model: nn.Module, seed: int) -> GradientComputation:
        """Return the gradient computation of a replica; each batch is a step of its own."""
        return GradientComputation(
            task,
            model,
            seed,
            self.batch_size,
            bulk=False,
            skips=self.skips(task, model),
            accumulate=self.accumulate,
        )

    def skips(self, task: Task, model: nn.Module) -> bool:
        """Return whether the servers leave elements with a zero gradient unchanged.

        Downpour's Adagrad does, and so does SGD without momentum and weight decay.
        """
        return self.gamma is not None or recipe_of(task, model).plain

    def local_step(self, task: Task, model: nn.Module, keys: Sequence[KeyRange]) -> LocalStep:
        """Return the function of the SGD steps that a replica makes on its weights between fetches.

        keys: key ranges of the weights, one for each tensor.
        """
        schedule = None if task.lr_schedule is None else partial(factor_at, task.lr_schedule)
        return LocalStep(recipe_of(task, model), keys, self.alpha, schedule)


def adagrad(recipe: OptimizerRecipe, gamma: float) -> OptimizerRecipe:
    """Return a recipe with Downpour's Adagrad in place of the optimizer of `recipe`.

    The parameter groups stay the same, and each has the learning rate gamma. Raises ValueError for
    settings of the replaced optimizer that Adagrad would ignore.
    """
    for name in ("weight_decay", "maximize"):
        if any(group.get(name) for group in recipe.groups):
            raise ValueError(
                f"gamma replaces the task's {recipe.kind.__name__} by Adagrad, so its {name} "
                f"would be ignored: leave out {name}, or gamma"
            )
    if len({group["lr"] for group in recipe.groups}) > 1:
        raise ValueError(
            "gamma is one learning rate for all parameters, but the task's optimizer has "
            "several: leave out gamma, or give all groups one lr"
        )
    groups = [{"lr": gamma} for _ in recipe.groups]
    return replace(recipe, kind=DownpourAdagrad, groups=groups, arguments={})
