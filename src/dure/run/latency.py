"""How long a model takes for one prediction here, and how many bytes a call of it has."""

from __future__ import annotations

import statistics
import time
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from dure.contracts.strategy import examples_for
from dure.contracts.task import Task
from dure.fleet.latency import Call
from dure.machine.devices import home_of, to_device
from dure.tasks.modes import in_mode

TIMES = 21
"""Forward passes of which the median counts, after one that does not."""


class Measured(NamedTuple):
    """seconds: of a forward pass of one example on this machine, the median."""

    call: Call
    seconds: float


def measured(task: Task, model: nn.Module, times: int = TIMES) -> Measured:
    """The forward pass of one of the task's examples, in evaluation mode, without gradients."""
    if times < 1:
        raise ValueError(f"times is {times}, but something has to be measured: 1 or more")
    train, _ = examples_for(task)
    home = home_of(model)
    inputs = to_device(train.batch(torch.tensor([train.first]))[0], home)
    seconds = []
    with in_mode(model, training=False), torch.no_grad():
        answer = model(inputs)
        for _ in range(times):
            began = time.perf_counter()
            answer = model(inputs)
            if home.type == "cuda":
                torch.cuda.synchronize(home)
            seconds.append(time.perf_counter() - began)
    return Measured(Call(_nbytes(inputs), _nbytes(answer)), statistics.median(seconds))


def _nbytes(value: object) -> int:
    return sum(leaf.nbytes for leaf in tree_leaves(value) if isinstance(leaf, Tensor))
