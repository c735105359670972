"""Strategies that are a mesh with a single axis: their checks are those of the mesh."""

from __future__ import annotations

from torch import nn

from dure.contracts.learner import Learner, Proof
from dure.contracts.strategy import Feature, Strategy
from dure.contracts.task import Task
from dure.contracts.world import Kind, RankContext, World
from dure.memory.formula import MemoryShares
from dure.parallel.mesh.strategy import Parallel, ParallelLearner, cannot


class SingleAxisMesh(Strategy):
    """Strategy that divides the model on one axis over all ranks. A subclass defines `on`."""

    def on(self, workers: int | None) -> Parallel:
        """Return this strategy on a mesh of `workers` ranks; None: one rank."""
        raise NotImplementedError(f"{type(self).__name__} has no method on")

    def cannot(self, feature: Feature, kind: Kind) -> str | None:
        return cannot(feature)

    def holds_parts(self, workers: int | None) -> bool:
        return self.on(workers).holds_parts(workers)

    def shares(self, workers: int | None) -> MemoryShares | None:
        return self.on(workers).shares(workers)

    def check(self, task: Task, world: World) -> None:
        self.on(world.workers).check(task, world)

    def check_model(self, task: Task, model: nn.Module, world: World) -> None:
        self.on(world.workers).check_model(task, model, world)

    def prove(self, task: Task, model: nn.Module, world: World) -> Proof | None:
        return self.on(world.workers).prove(task, model, world)

    def learner(self, task: Task, context: RankContext, seed: int) -> Learner:
        return ParallelLearner(task, context, seed, self.on(context.group.size))
