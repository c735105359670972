"""Evaluation through a pipeline: forward passes of the test examples, in chunks."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from itertools import groupby
from typing import Any

import torch
from torch import Tensor

from dure.collectives.group import Group
from dure.contracts.task import Task
from dure.data.examples import Examples
from dure.machine.devices import to_device
from dure.parallel.pipeline.builders import forward_only
from dure.parallel.pipeline.cut import CutModel
from dure.parallel.pipeline.rng import RandomStream
from dure.parallel.pipeline.runtime import PipelineEngine
from dure.parallel.pipeline.single_stage import SingleStageModel
from dure.parallel.pipeline.stage import Microbatch, Stage
from dure.tasks.loss_shares import NOTHING, ComputedLoss, LossShare
from dure.tasks.measurement import Measurement

ROUND = 32
"""Number of chunks that are in the pipeline at the same time."""


def chunks_of(share: Tensor, task: Task, stages: int) -> list[Tensor]:
    """Return the indices `share` in chunks that pass through the stages one after the other."""
    # At least two chunks per stage if there are enough examples, so that stages work in parallel.
    longest = max(1, min(task.eval_batch_size, -(-len(share) // (2 * stages))))
    return list(share.split(longest)) if len(share) else []  # type: ignore[no-untyped-call]


@torch.no_grad()
def measure(
    measurement: Measurement,
    examples: Examples,
    chunks: Sequence[Tensor],
    cut: CutModel | SingleStageModel,
    home: Sequence[int],
    group: Group,
) -> None:
    """Add the examples of all chunks to the measurement, on the rank of the last stage.

    The meter does not count the transfers.

    Args:
        measurement: sums of the evaluation; only the last stage's rank changes it.
        examples: the test examples.
        chunks: indices of the examples of each chunk.
        cut: the model in stages.
        home: the rank of each stage.
        group: the ranks of the pipeline.
    """

    # The "loss" of evaluation measures on the last stage and returns a number that is not used.
    def add(outputs: Any, targets: Any, length: int, share: LossShare) -> ComputedLoss:
        measurement.add(outputs, targets, length)
        return ComputedLoss(torch.zeros(()), 0.0)

    device = next((parameter.device for parameter in cut.model.parameters()), torch.device("cpu"))
    # Evaluation draws no random numbers, so any seed will do.
    stream = RandomStream(0, carried=False)
    mine = [stage for stage, rank in enumerate(home) if rank == group.rank]
    # Round by round, so that the values of all test examples are never in memory together.
    for start in range(0, len(chunks), ROUND):
        # Chunks of equal length share a program; only the last chunk may be shorter.
        for length, alike in groupby(chunks[start : start + ROUND], len):
            batches = [
                Microbatch(length, NOTHING, partial(_read, examples, chunk, device))
                for chunk in alike
            ]
            schedule = forward_only(home, len(batches))
            stages = {stage: _stage(stage, cut, stream, add) for stage in mine}
            # unmetered, since an evaluation is part of the measurement
            engine = PipelineEngine(
                group.unmetered(), schedule, stages=stages, stream=stream, device=device
            )
            engine.run(0, batches)


def _read(examples: Examples, indices: Tensor, device: torch.device) -> tuple[Any, Any]:
    content: tuple[Any, Any] = to_device(examples.batch(indices), device)
    return content


def _stage(number: int, cut: CutModel | SingleStageModel, stream: RandomStream, add: Any) -> Stage:
    return Stage(
        number,
        last=number == cut.stages - 1,
        program_for=lambda examples: cut.program(
            number, examples, training=False, stream=stream, gradient_handler=None
        ),
        structure_for=lambda examples: cut.structure(examples, False),
        loss=add,
        stream=stream,
        remaining=None,
        trains=False,
    )
