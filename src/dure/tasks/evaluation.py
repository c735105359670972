"""Measuring a model on the test data, every rank its share.

Each rank evaluates a contiguous share of the examples. What comes of them is one measurement
(`dure.tasks.measurement`), whose numbers all ranks know.
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
from dure.machine.devices import home_of, to_device
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
    """test_loss and test_<metric> for each of the task's metrics; empty if `examples` is None.

    Of a validation set that comes with them likewise, by its own name.

    model: the same on every rank; each of its modules keeps its training mode.
    idle: called for each batch that other ranks have and this one has not, for models that ranks
        run together.

    Raises ValueError for a metric that fails or gives no number, and for one that needs more memory
    than the task allows.
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
    """The loss and every metric over one set of examples."""
    started = time.perf_counter()
    shares = torch.arange(len(examples)).tensor_split(group.size)
    share = shares[group.rank]
    measurement = Measurement(task, examples=len(examples), share=len(share))
    device = home_of(model)
    with in_mode(model, training=False):
        # With more ranks than examples some have an empty share, of which torch.split makes one
        # piece.
        for indices in torch.split(share, task.eval_batch_size):
            if len(indices):
                inputs, targets = to_device(examples.batch(indices), device)
                outputs = model(inputs)
                # A model of stages on several devices ends on another one than it begins.
                ends = next(
                    (x.device for x in tree_leaves(outputs) if isinstance(x, Tensor)), device
                )
                measurement.add(outputs, to_device(targets, ends), len(indices))
        # The first share is the largest: no rank has more batches than rank 0.
        most = -(-len(shares[0]) // task.eval_batch_size)
        mine = -(-len(share) // task.eval_batch_size)
        # In a model that ranks run together, all have to make the same calls, or some would wait.
        for _ in range(most - mine):
            idle()
    values = measurement.values(group)
    group.meter.mark("evaluation", "evaluation", started, time.perf_counter(), step)
    return values
