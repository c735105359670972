"""Plan of a run of Downpour SGD: servers, and replicas that train on their own data."""

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
        pace: intervals of fetches and pushes.
        partitions: as in `Downpour`.
        microbatches: as in `Downpour`.
        partition: as in `Downpour`.
        warm_start: as in `Downpour`.
        gamma: as in `Downpour`.
        alpha: as in `Downpour`.
        runs: keys of each stage if each stage has a worker (`made_for`); the workers of a stage
            then
            form a group, and stage k of replica r is worker r·p + k. Empty for undivided replicas.
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
        # Each stage of each divided replica has a worker.
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
        """Return the number of a worker's replica."""
        return worker // len(self.groups)

    def workers_of_replica(self, replica: int) -> list[int]:
        """Return the workers of a replica, by stage."""
        stages = len(self.groups)
        return list(range(replica * stages, (replica + 1) * stages))

    def companions(self, worker: int) -> list[int]:
        return [
            other for other in self.workers_of_replica(self.replica_of(worker)) if other != worker
        ]

    def keys(self, model: nn.Module) -> list[list[KeyRange]]:
        ranges = super().keys(model)
        return (
            [cut_at_stages(self.stage_keys, each) for each in ranges] if self.stage_keys else ranges
        )

    def portions(self, worker: int, shards: Sequence[KeyRange]) -> list[tuple[int, int, int]]:
        """Return the portions that a worker fetches and pushes.

        (shard, first key, last key + 1).
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
        return False

    @property
    def teams(self) -> list[Sequence[int]]:
        return [self.workers_of_replica(replica) for replica in range(self.replicas_of_model)]

    def worker_batches(self, worker: int, batches: int) -> int:
        # The first replica makes the steps of the warm start in addition.
        return batches + (self.warm_start if self.replica_of(worker) == 0 else 0)

    def parts(self, model: nn.Module, examples: Examples, seed: int) -> Sequence[ClientExamples]:
        """Return the data of each replica."""
        return divide(
            self.data_partition,
            self.replicas_of_model,
            examples,
            self.batch_size,
            seed,
            joins=needs_two(model, examples),
        )

    def steps_per_epoch(self, computing: GradientComputation) -> int:
        parts = self.parts(computing.model, computing.examples, computing.seed)
        return max(part.batches.steps_per_epoch for part in parts)

    def terms(self, task: Task, model: nn.Module) -> Terms:
        schedule: Callable[[int], float] | None = None
        if task.lr_schedule is not None:
            schedule = partial(factor_at, task.lr_schedule)
        recipe = recipe_of(task, model)
        if self.gamma is not None:
            recipe = adagrad(recipe, self.gamma)
        coding = self.coding(model)
        return Terms(recipe=recipe, staleness=None, schedule=schedule, coding=coding)

    def gradients(self, task: Task, model: nn.Module, seed: int) -> GradientComputation:
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
        """Return the function for a replica's own steps on weights of these keys."""
        schedule = None if task.lr_schedule is None else partial(factor_at, task.lr_schedule)
        return LocalStep(recipe_of(task, model), keys, self.alpha, schedule)


def adagrad(recipe: OptimizerRecipe, gamma: float) -> OptimizerRecipe:
    """Return the recipe of Downpour's Adagrad over the keys of another optimizer's recipe.

    Raises ValueError for settings of that optimizer that Adagrad would ignore.
    """
    for name in ("weight_decay", "maximize"):
        if any(group.get(name) for group in recipe.groups):
            raise ValueError(
                f"gamma puts Adagrad in the place of the task's {recipe.kind.__name__}, and its "
                f"{name} would be lost: leave out {name}, or gamma"
            )
    if len({group["lr"] for group in recipe.groups}) > 1:
        raise ValueError(
            "gamma is one rate for all, and the task's optimizer has several: leave out gamma, or "
            "give all groups one lr"
        )
    groups = [{"lr": gamma} for _ in recipe.groups]
    return replace(recipe, kind=DownpourAdagrad, groups=groups, arguments={})
