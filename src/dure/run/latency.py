"""Latency of a prediction: measured on this machine, and compared between device and server."""

from __future__ import annotations

import math
import statistics
import time
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from dure.contracts.fresh_model import examples_for
from dure.contracts.task import Task
from dure.fleet.devices import BYTES_PER_MBIT
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


class PredictionCall(NamedTuple):
    """Bytes of an example's inputs, and of the model's answer."""

    example_bytes: float
    answer_bytes: float


class Latency(NamedTuple):
    """Seconds until the answer is available, on the device and on the server."""

    local: float
    remote: float


def latency(
    call: PredictionCall,
    *,
    device_seconds: float,
    server_seconds: float,
    up_mbit: float,
    down_mbit: float,
    delay: float = 0.0,
) -> Latency:
    """Return the latency of a prediction on the device, and on the server.

    Args:
        call: bytes of a prediction.
        device_seconds: forward pass on the device.
        server_seconds: forward pass on the server.
        up_mbit: speed of the link to the server, in megabits per second.
        down_mbit: speed of the link from the server, in megabits per second.
        delay: one-way delay of the link, in seconds.

    Raises:
        ValueError: a time or size is below 0 or infinite, or a link has no speed.
    """
    if not all(0 <= one < math.inf for one in (device_seconds, server_seconds, delay, *call)):
        raise ValueError("seconds and bytes of a prediction have to be 0 or more")
    if not (up_mbit > 0 and down_mbit > 0):
        raise ValueError(
            f"the speeds of a link have to be greater than 0, not {up_mbit} up and {down_mbit} down"
        )
    sent = call.example_bytes / (up_mbit * BYTES_PER_MBIT)
    told = call.answer_bytes / (down_mbit * BYTES_PER_MBIT)
    return Latency(device_seconds, 2 * delay + sent + server_seconds + told)
