"""Assignment of keys to the pipeline stages of a divided replica of Downpour SGD.

A replica of p partitions is a pipeline of p ranks (`dure.parallel.pipeline`). A parameter belongs
to the stage that computes with it; an unused parameter belongs to the first stage. Ranges of
servers are cut where the stage changes, so that a shard belongs to a single stage: only its rank
fetches the shard and pushes to it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

from torch import nn

from dure.contracts.fresh_model import examples_for
from dure.contracts.task import Task
from dure.parallel.mesh.check import sample
from dure.parallel.mesh.mesh import Mesh
from dure.parallel.mesh.strategy import Parallel
from dure.parallel.pipeline.cut import CutModel
from dure.parameter_server.keys import KeyRange
from dure.tensors.buffers import BufferNames
from dure.tensors.flat import by_dtype, trainable_parameters


class StageKeys(NamedTuple):
    """Range of neighbouring keys of a stage, with the names of their parameters in order."""

    keys: KeyRange
    stage: int
    names: tuple[str, ...]


@dataclass(frozen=True)
class ReplicaPipeline:
    """Division of each replica into stages; equal on all ranks, since nothing is measured."""

    stages: int
    microbatches: int
    batch_size: int | None

    @property
    def parallel(self) -> Parallel:
        """Replica as a mesh with a single axis."""
        return Parallel(
            mesh=Mesh(pipeline=self.stages),
            batch_size=self.batch_size,
            microbatches=self.microbatches,
        )

    def check(self, task: Task, model: nn.Module) -> None:
        """Check that the model can be divided; raises ValueError if not. The model is unchanged."""
        buffers = BufferNames(model).names
        if buffers:
            raise ValueError(
                f"partitions is {self.stages}, but the model has buffers, such as "
                f"{buffers[0]}, which servers do not hold and each stage might change: use "
                "partitions=1"
            )
        cut = self.parallel.checked(task, model)
        assert isinstance(cut, CutModel)
        stage_keys_of(model, cut.holders)

    def stage_keys(self, task: Task, model: nn.Module) -> tuple[StageKeys, ...]:
        """Return the key ranges of all stages, in ascending order of keys.

        Raises ValueError for a parameter that several stages use.
        """
        train, _ = examples_for(task)
        cut = CutModel(
            model,
            sample=partial(sample, train),
            stages=self.stages,
            examples=self.parallel.examples(len(train)),
        )
        cut.decide(cut.choose(None, "estimated"))
        return stage_keys_of(model, cut.holders)


def stage_keys_of(model: nn.Module, holders: Mapping[str, Sequence[int]]) -> tuple[StageKeys, ...]:
    """Return a model's key ranges with their stages, in ascending order of keys.

    `holders` are the stages that use each parameter.
    """
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    found: list[StageKeys] = []
    for vector, parameters in enumerate(by_dtype(trainable_parameters(model)).values()):
        start = 0
        for parameter in parameters:
            name = names[id(parameter)]
            stages = holders.get(name, [0])
            if len(stages) > 1:
                raise ValueError(
                    f"{name} is used by stages {', '.join(map(str, stages))} of a replica, but "
                    "one stage pushes it: use fewer partitions"
                )
            keys = KeyRange(vector, start, start + parameter.numel())
            start = keys.stop
            last = found[-1] if found else None
            if last is not None and (last.keys.vector, last.stage) == (vector, stages[0]):
                joined = KeyRange(vector, last.keys.start, keys.stop)
                found[-1] = StageKeys(joined, stages[0], (*last.names, name))
            else:
                found.append(StageKeys(keys, stages[0], (name,)))
    return tuple(found)


def cut_at_stages(stage_keys: Sequence[StageKeys], ranges: Sequence[KeyRange]) -> list[KeyRange]:
    """Return the ranges, cut where the stage changes."""
    return [
        KeyRange(keys.vector, max(keys.start, part.keys.start), min(keys.stop, part.keys.stop))
        for keys in ranges
        for part in stage_keys
        if part.keys.vector == keys.vector
        and max(keys.start, part.keys.start) < min(keys.stop, part.keys.stop)
    ]


def stage_of(stage_keys: Sequence[StageKeys], keys: KeyRange) -> int:
    """Return the stage of keys that belong to a single stage."""
    return next(
        part.stage
        for part in stage_keys
        if part.keys.vector == keys.vector and part.keys.start <= keys.start < part.keys.stop
    )
