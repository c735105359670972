"""Measuring a model on the test data, every rank its share.

Each rank evaluates a contiguous share of the examples and the sums are added in order of rank, so
all ranks know the same numbers and nobody waits for rank 0.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn

from dure.collectives.group import Group
from dure.contracts.task import Task
from dure.data.examples import Examples
from dure.machine.devices import to_device
from dure.tasks.loss_shares import loss_and_count


@torch.no_grad()
def evaluate(
    task: Task,
    model: nn.Module,
    examples: Examples | None,
    group: Group,
    step: int,
    idle: Callable[[], None] = lambda: None,
) -> dict[str, float]:
    """test_loss and test_<metric> for each of the task's metrics; empty if `examples` is None.

    model: the same on every rank; its training mode is restored. examples: in the model's dtype.
    idle: called for each batch that other ranks have and this one has not, for models that ranks
        run together.
    """
    if examples is None:
        return {}
    started = time.perf_counter()
    # One list for sums and one for counts, in this order, so that ranks need tell only numbers.
    names = ["loss", *task.measures]
    totals = [0.0] * len(names)
    counts = [0.0] * len(names)
    shares = torch.arange(len(examples)).tensor_split(group.size)
    share = shares[group.rank]
    # A model without parameters computes on the CPU.
    device = next((parameter.device for parameter in model.parameters()), torch.device("cpu"))
    was_training = model.training
    model.eval()
    # With more ranks than examples some have an empty share, of which torch.split makes one piece.
    for indices in torch.split(share, task.eval_batch_size):
        if len(indices) == 0:
            continue
        inputs, targets = to_device(examples.batch(indices), device)
        outputs = model(inputs)
        for position, (total, count) in enumerate(measured(task, outputs, targets, len(indices))):
            totals[position] += total
            counts[position] += count
    # The first share is the largest: no rank has more batches than rank 0.
    most = -(-len(shares[0]) // task.eval_batch_size)
    mine = -(-len(share) // task.eval_batch_size)
    # In a model that ranks run together, all have to make the same calls, or some would wait.
    for _ in range(most - mine):
        idle()
    model.train(was_training)
    # Sums and counts travel, not means: shares differ in size, and targets may be ignored.
    parts = group.all_gather_values(totals + counts)
    sums = [sum(column) for column in zip(*parts, strict=True)]
    group.meter.mark("evaluation", "evaluation", started, time.perf_counter(), step)
    return {
        f"test_{name}": ratio(sums[position], sums[len(names) + position])
        for position, name in enumerate(names)
    }


def measured(
    task: Task, outputs: Any, targets: Any, examples: int
) -> Iterator[tuple[float, float]]:
    """(sum, count) of the loss over a batch, then of each metric."""
    yield loss_and_count(task.loss, outputs, targets, examples)
    for metric in task.measures.values():
        yield _sum_and_count(metric(outputs, targets), examples)


def _sum_and_count(value: Tensor | tuple[Tensor, Tensor], examples: int) -> tuple[float, float]:
    """A metric gives the batch's mean, or a pair (sum, count)."""
    if isinstance(value, tuple):
        return float(value[0]), float(value[1])
    return float(value) * examples, float(examples)


def ratio(total: float, count: float) -> float:
    """NaN where there was nothing to count, such as of targets that are all ignored."""
    return total / count if count else float("nan")
