"""Evaluation on a mesh: each data group evaluates a share of the examples; all results add up."""

from __future__ import annotations

import time
from collections.abc import Sequence
from contextlib import nullcontext

import torch
from torch import Tensor

from dure.contracts.task import Task
from dure.data.examples import Examples
from dure.parallel.mesh.rank_state import RankState
from dure.parallel.pipeline.evaluation import chunks_of, measure
from dure.tasks.measurement import Measurement
from dure.tasks.modes import in_mode


@torch.no_grad()
def evaluate(rank_state: RankState, task: Task, examples: Examples) -> dict[str, float]:
    """Return test_loss and test_<metric>, equal on every rank; all ranks call it together.

    The examples of a validation set are evaluated likewise, under that set's name.
    """
    found: dict[str, float] = {}
    for which, some in examples.sets().items():
        values = _of_one(rank_state, task, some)
        found.update({f"{which}_{name}": value for name, value in values.items()})
    return found


def _of_one(rank_state: RankState, task: Task, examples: Examples) -> dict[str, float]:
    """Return the loss and every metric over a single set of examples."""
    started = time.perf_counter()
    # Every rank computes all shares, so that it knows the other ranks' numbers of chunks.
    shares = torch.arange(len(examples)).tensor_split(rank_state.mesh.data)
    share = shares[rank_state.at.data]
    chunks = [chunks_of(share, task, rank_state.cut.stages) for share in shares]
    # Tensor neighbours compute the same examples; only the first neighbour's results count.
    measurement = Measurement(task, len(examples), len(share), counts=rank_state.at.tensor == 0)
    # The meter counts neither the messages of divided layers nor the gathers of ZeRO.
    gathering = rank_state.zero.uncounted() if rank_state.zero is not None else nullcontext()
    with in_mode(rank_state.model, training=False), gathering, rank_state.groups.tensor.uncounted():
        _measure(rank_state, examples, chunks[rank_state.at.data], measurement)
        if rank_state.zero is not None and rank_state.zero.stage > 1:
            # Forward gathers units, and the whole data group must take part: a rank with fewer
            # chunks repeats an example, whose result does not count.
            missing = max(map(len, chunks)) - len(chunks[rank_state.at.data])
            nothing = Measurement(task, len(examples), 0, counts=False)
            _measure(rank_state, examples, [shares[0][:1]] * missing, nothing)
    values = measurement.values(rank_state.group)
    rank_state.group.meter.mark(
        "evaluation", "evaluation", start=started, end=time.perf_counter(), step=rank_state.step
    )
    return values


def _measure(
    rank_state: RankState, examples: Examples, chunks: Sequence[Tensor], measurement: Measurement
) -> None:
    measure(
        measurement,
        examples,
        chunks,
        cut=rank_state.cut,
        home=rank_state.schedule.home,
        group=rank_state.groups.pipeline,
    )
