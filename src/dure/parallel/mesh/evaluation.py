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
from dure.parallel.pipeline.evaluation import chunks_of, totals_of
from dure.tasks.evaluation import ratio


def evaluate(held: Held, task: Task, examples: Examples) -> dict[str, float]:
    """test_loss and test_<metric>, the same on every rank; all ranks call it."""
    started = time.perf_counter()
    # Every rank knows all shares, so that it knows how many chunks the others have.
    shares = torch.arange(len(examples)).tensor_split(held.mesh.data)
    chunks = [chunks_of(share, task, held.cut.stages) for share in shares]
    mine = chunks[held.at.data]
    held.model.eval()
    # Neither what divided layers exchange is counted, nor what ZeRO gathers.
    gathering = held.zero.uncounted() if held.zero is not None else nullcontext()
    with gathering, held.groups.tensor.uncounted():
        totals = _totals(held, task, examples, mine)
        if held.zero is not None and held.zero.stage > 1:
            # Forward gathers units, in which the whole data group takes part: a rank with fewer
            # chunks computes an example again, whose totals nobody counts.
            missing = max(map(len, chunks)) - len(mine)
            _totals(held, task, examples, [shares[0][:1]] * missing)
    held.model.train()
    if held.at.tensor > 0:
        # Tensor neighbours have computed the same examples; the first one's totals count.
        totals = [0.0] * len(totals)
    rows = held.group.all_gather_values(totals)
    sums = [sum(column) for column in zip(*rows, strict=True)]
    held.group.meter.mark(
        "evaluation", "evaluation", start=started, end=time.perf_counter(), step=held.step
    )
    names = ["loss", *task.measures]
    # The first half of the sums are totals, the second half their counts.
    return {f"test_{name}": ratio(sums[i], sums[len(names) + i]) for i, name in enumerate(names)}


def _totals(held: Held, task: Task, examples: Examples, chunks: Sequence[Tensor]) -> list[float]:
    return totals_of(
        task,
        examples,
        chunks,
        cut=held.cut,
        home=held.schedule.home,
        group=held.groups.pipeline,
    )
