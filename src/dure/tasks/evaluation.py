"""Measure a model on the test data, every rank its share.

Each rank evaluates a contiguous share of the examples. The shares are combined into a single
measurement (`dure.tasks.measurement`), whose numbers all ranks get.
"""

from __future__ import annotations

import time
from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from dure.collectives.group import Group
from dure.contracts.task import Task
from dure.data.examples import Examples
from dure.machine.devices import device_of_model, to_device
from dure.tasks.measurement import Measurement
from dure.tasks.modes import in_mode


@torch.no_grad()
def evaluate(
    task: Task,
    model: nn.Module,
    examples: Examples | None,
    group: Group,
    step: int,
    idle: Callable[[], None] = lambda: None,
) -> dict[str, float]:
    """Return test_loss and test_<metric> for each of the task's metrics; {} without examples.

    A validation set is measured in the same way, with its own name as the prefix. Collective.

    Args:
        task: loss and metrics.
        model: the same on every rank; each of its modules keeps its training mode.
        examples: test examples, perhaps with a validation set; None without any.
        group: the ranks.
        step: current step, for the timeline.
        idle: called for each batch that other ranks have and this rank has not, for models that
            ranks execute together.

    Raises:
        ValueError: for a metric that fails or gives no number, or that needs more memory than the
            task permits.
    """
    found: dict[str, float] = {}
    for which, some in ({} if examples is None else examples.sets()).items():
        values = _measured(task, model, some, group, step, idle)
        found.update({f"{which}_{name}": value for name, value in values.items()})
    return found


def _measured(
    task: Task,
    model: nn.Module,
    examples: Examples,
    group: Group,
    step: int,
    idle: Callable[[], None],
) -> dict[str, float]:
    """Return the loss and every metric over one set of examples."""
    started = time.perf_counter()
    shares = torch.arange(len(examples)).tensor_split(group.size)
    share = shares[group.rank]
    measurement = Measurement(task, examples=len(examples), share=len(share))
    device = device_of_model(model)
    with in_mode(model, training=False):
        # With more ranks than examples some have an empty share, which torch.split returns as one
        # piece.
        for indices in torch.split(share, task.eval_batch_size):
            if len(indices):
                inputs, targets = to_device(examples.batch(indices), device)
                outputs = model(inputs)
                # A model with stages on several devices has outputs on another device than its
                # inputs.
                ends = next(
                    (x.device for x in tree_leaves(outputs) if isinstance(x, Tensor)), device
                )
                measurement.add(outputs, to_device(targets, ends), len(indices))
        # The first share is the largest: no rank has more batches than rank 0.
        most = -(-len(shares[0]) // task.eval_batch_size)
        mine = -(-len(share) // task.eval_batch_size)
        # For a model that ranks execute together, all must make the same calls, or some would
        # block.
        for _ in range(most - mine):
            idle()
    values = measurement.values(group)
    group.meter.mark("evaluation", "evaluation", started, time.perf_counter(), step)
    return values
