"""Gradient computation of a replica in a process: the whole model, or a stage of it.

    weights of the portions, a step  ->  the gradient of that step's batch, by portion

The process of a stage computes together with the processes of the other stages; all of them make
the same steps.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Sequence

import torch
from torch import Tensor, nn

from dure.collectives.group import Group
from dure.contracts.fresh_model import examples_for
from dure.contracts.task import Task
from dure.contracts.world import RankContext
from dure.machine.devices import pinned_like, to_cpu
from dure.parallel.mesh.strategy import ParallelLearner
from dure.parameter_server.downpour_plan import DownpourPlan
from dure.parameter_server.gradients import ComputedGradients, no_gradient
from dure.parameter_server.keys import KeyRange
from dure.parameter_server.messages import worker
from dure.parameter_server.stages import StageKeys
from dure.randomness.seeds import derive
from dure.record.meter import Meter
from dure.tensors.buffers import BufferNames
from dure.tensors.flat import views_of


class WholeModel:
    """Model of worker `number`, which is a replica."""

    def __init__(
        self,
        number: int,
        task: Task,
        model: nn.Module,
        seed: int,
        plan: DownpourPlan,
        meter: Meter,
    ) -> None:
        self.number = number
        self.meter = meter
        self.model = model.train()
        self.keys = plan.shards(model)
        self.computing = plan.gradients(task, model, seed)
        self.part = plan.parts(model, self.computing.examples, seed)[number]
        self._buffers = BufferNames(model)

    def weights(self) -> list[Tensor]:
        """Return the current weights, by portion, in the CPU's memory."""
        buffers = self.computing.flat.buffers
        weights: list[Tensor] = to_cpu(
            [buffers[keys.vector][keys.start : keys.stop] for keys in self.keys]
        )
        return weights

    def compute(self, step: int, weights: Sequence[Tensor]) -> ComputedGradients:
        """Return the gradient of the replica's batch of a step at these weights, by portion.

        Raises LossNotFiniteError.
        """
        for keys, value in zip(self.keys, weights, strict=True):
            self.computing.flat.buffers[keys.vector][keys.start : keys.stop] = value
        place = (step, self.number)
        started = time.perf_counter()
        out = list(map(pinned_like, self.computing.flat.buffers))
        found = self.computing.mean(self.part.at(step), place, worker(self.number), out)
        self.meter.compute("gradient", started, time.perf_counter(), step + 1)
        gradients = [found.gradients[keys.vector][keys.start : keys.stop] for keys in self.keys]
        return dataclasses.replace(found, gradients=gradients)

    def buffers(self) -> list[Tensor]:
        """Return the current buffers."""
        own: list[Tensor] = to_cpu([buffer.detach() for buffer in self._buffers.of(self.model)])
        return own

    def load_buffers(self, buffers: Sequence[Tensor]) -> None:
        """Set the buffers."""
        self._buffers.load(self.model, buffers)


class StageModel:
    """Stage of worker `number`. `group` has the ranks of its replica, by stage."""

    def __init__(
        self,
        number: int,
        task: Task,
        context: RankContext,
        model: nn.Module,
        seed: int,
        *,
        plan: DownpourPlan,
        group: Group,
    ) -> None:
        shards = plan.shards(model)
        self.keys = [shards[shard] for shard, _, _ in plan.portions(number, shards)]
        replica = plan.replica_of(number)
        self.part = plan.parts(model, examples_for(task)[0], seed)[replica]
        self.skips = plan.skips(task, model)
        # Replicas have different random draws; the first has those of a pipeline that trains alone.
        own = seed if replica == 0 else derive(seed, "replica", replica)
        self.learner = ParallelLearner(
            task,
            dataclasses.replace(context, group=group, prepared=lambda: model, check=False),
            own,
            plan.pipeline.parallel,
        )
        self.learner.where = worker(number)
        self.reports = group.rank == plan.stages - 1
        parameters = self.learner.rank_state.parameters
        self.vectors = [
            StageVector(part, [parameters[name] for name in part.names])
            for part in plan.stage_keys
            if part.stage == group.rank
        ]

    def weights(self) -> list[Tensor]:
        """Return the current weights, by portion, in the CPU's memory."""
        weights: list[Tensor] = to_cpu([self._vector_of(keys).at(keys) for keys in self.keys])
        return weights

    def compute(self, step: int, weights: Sequence[Tensor]) -> ComputedGradients:
        """Return the gradient of the replica's batch of a step at these weights, by portion.

        The stages compute together. Raises LossNotFiniteError, and PeerLostError if a stage is
        lost.
        """
        for keys, value in zip(self.keys, weights, strict=True):
            self._vector_of(keys).at(keys).copy_(value)
        learner = self.learner
        learner.group.step = f"step {step + 1}"
        learner.rank_state.step = step
        started = time.perf_counter()
        for vector in self.vectors:
            vector.forget()
        indices = self.part.at(step)
        loss, counted, _ = learner.compute(indices, 0)
        gradient_vectors = [vector.gradient(self.skips).cpu() for vector in self.vectors]
        gradients = []
        for keys in self.keys:
            vector = self._vector_of(keys)
            first = vector.stage_keys.keys.start
            whole = gradient_vectors[self.vectors.index(vector)]
            gradients.append(whole[keys.start - first : keys.stop - first])
        # Only the last stage reports the replica's loss.
        return ComputedGradients(
            gradients=gradients,
            weight=1.0 if len(indices) else 0.0,
            loss=(loss or 0.0) if self.reports else 0.0,
            counted=counted if self.reports else 0.0,
            examples=len(indices) if self.reports else 0,
            seconds=time.perf_counter() - started,
        )

    def _vector_of(self, keys: KeyRange) -> StageVector:
        return next(vector for vector in self.vectors if vector.has(keys))

    def buffers(self) -> list[Tensor]:
        """Return no buffers: a model with buffers is not divided."""
        return []

    def load_buffers(self, buffers: Sequence[Tensor]) -> None:
        """Do nothing: there are no buffers."""


class StageVector:
    """Parameters of a key range of this process's stage, moved into a single vector."""

    def __init__(self, stage_keys: StageKeys, parameters: Sequence[nn.Parameter]) -> None:
        self.stage_keys = stage_keys
        self.parameters = parameters
        self.vector = torch.cat([parameter.detach().reshape(-1) for parameter in parameters])
        for parameter, view in zip(parameters, views_of(self.vector, parameters), strict=True):
            # The parameter objects stay the same, since the stage's program refers to them.
            parameter.data = view

    def has(self, keys: KeyRange) -> bool:
        """Return whether this vector contains the keys."""
        own = self.stage_keys.keys
        return own.vector == keys.vector and own.start <= keys.start < own.stop

    def at(self, keys: KeyRange) -> Tensor:
        """Return a view of the weights of these keys."""
        first = self.stage_keys.keys.start
        return self.vector[keys.start - first : keys.stop - first]

    def forget(self) -> None:
        """Delete the gradients of the parameters."""
        for parameter in self.parameters:
            parameter.grad = None

    def gradient(self, skips: bool) -> Tensor:
        """Return the gradients of the parameters, one after another.

        `skips`: whether servers leave elements with a zero gradient unchanged. If not, raises
        ValueError for a parameter without a gradient.
        """
        parts = []
        for parameter, name in zip(self.parameters, self.stage_keys.names, strict=True):
            if parameter.grad is None and not skips:
                raise ValueError(no_gradient(name))
            gradient = parameter.grad if parameter.grad is not None else torch.zeros_like(parameter)
            parts.append(gradient.reshape(-1))
        return torch.cat(parts)
