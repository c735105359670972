"""Measure the time of one prediction on this machine, and the bytes of its input and output."""

from __future__ import annotations

import statistics
import time
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from dure.contracts.fresh_model import examples_for
from dure.contracts.task import Task
from dure.fleet.latency import PredictionCall
from dure.machine.devices import device_of_model, synchronize, to_device
from dure.tasks.modes import in_mode

TIMES = 21
"""Timed forward passes, of which the median counts; one warm-up pass precedes them."""


class LatencyMeasurement(NamedTuple):
    """Cost of one call of the model.

    call: bytes of the input and of the output. seconds: median time of a forward pass of one
    example on this machine.
    """

    call: PredictionCall
    seconds: float


def measure_latency(task: Task, model: nn.Module, times: int = TIMES) -> LatencyMeasurement:
    """Measure the forward pass of one example of the task, in evaluation mode, without gradients.

    times: timed passes. Raises ValueError if times is below 1.
    """
    if times < 1:
        raise ValueError(f"times is {times}, but it has to be 1 or more")
    train, _ = examples_for(task)
    home = device_of_model(model)
    inputs = to_device(train.batch(torch.tensor([train.first]))[0], home)
    seconds = []
    with in_mode(model, training=False), torch.no_grad():
        answer = model(inputs)
        for _ in range(times):
            began = time.perf_counter()
            answer = model(inputs)
            synchronize(home)
            seconds.append(time.perf_counter() - began)
    return LatencyMeasurement(
        PredictionCall(_nbytes(inputs), _nbytes(answer)), statistics.median(seconds)
    )


def _nbytes(value: object) -> int:
    return sum(leaf.nbytes for leaf in tree_leaves(value) if isinstance(leaf, Tensor))
