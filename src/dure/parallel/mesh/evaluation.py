"""Evaluation on a mesh: each data group takes its share of the test examples, and all sum up."""

from __future__ import annotations

import time
from collections.abc import Sequence
from contextlib import nullcontext

import torch
from torch import Tensor

from dure.contracts.task import Task
from dure.data.examples import Examples
from dure.parallel.mesh.held import Held
from dure.parallel.pipeline.evaluation import chunks_of, measure
from dure.tasks.measurement import Measurement
from dure.tasks.modes import in_mode


@torch.no_grad()
def evaluate(held: Held, task: Task, examples: Examples) -> dict[str, float]:
    """test_loss and test_<metric>, the same on every rank; all ranks call it.

    Of a validation set that comes with them likewise, by its own name.
    """
    found: dict[str, float] = {}
    for which, some in examples.sets().items():
        values = _of_one(held, task, some)
        found.update({f"{which}_{name}": value for name, value in values.items()})
    return found


def _of_one(held: Held, task: Task, examples: Examples) -> dict[str, float]:
    """The loss and every metric over one set of examples."""
    started = time.perf_counter()
    # Every rank knows all shares, so that it knows how many chunks the others have.
    shares = torch.arange(len(examples)).tensor_split(held.mesh.data)
    share = shares[held.at.data]
    chunks = [chunks_of(share, task, held.cut.stages) for share in shares]
    # Tensor neighbours compute the same examples; the first one's count.
    measurement = Measurement(task, len(examples), len(share), counts=held.at.tensor == 0)
    # Neither what divided layers exchange is counted, nor what ZeRO gathers.
    gathering = held.zero.uncounted() if held.zero is not None else nullcontext()
    with in_mode(held.model, training=False), gathering, held.groups.tensor.uncounted():
        _measure(held, examples, chunks[held.at.data], measurement)
        if held.zero is not None and held.zero.stage > 1:
            # Forward gathers units, in which the whole data group takes part: a rank with fewer
            # chunks computes an example again, which nobody counts.
            missing = max(map(len, chunks)) - len(chunks[held.at.data])
            nothing = Measurement(task, len(examples), 0, counts=False)
            _measure(held, examples, [shares[0][:1]] * missing, nothing)
    values = measurement.values(held.group)
    held.group.meter.mark(
        "evaluation", "evaluation", start=started, end=time.perf_counter(), step=held.step
    )
    return values


def _measure(
    held: Held, examples: Examples, chunks: Sequence[Tensor], measurement: Measurement
) -> None:
    measure(
        measurement,
        examples,
        chunks,
        cut=held.cut,
        home=held.schedule.home,
        group=held.groups.pipeline,
    )
