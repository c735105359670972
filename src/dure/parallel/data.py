"""Data parallel: every rank holds the model, the joint batch is divided, gradients are averaged before each update.

Rank r of N computes the gradient g_r of the mean loss over its b_r of the B examples; all apply the sum of
(b_r/B)·g_r, which is the gradient of the joint batch, so N ranks walk the same path as one worker.

One message a step, of d gradients and a short tail, goes through an all-reduce of choice: `elements_in_message`.
The tail carries what all ranks have to agree on anyway: rank 0's wishes, the loss of every rank, the time at which
each rank arrived (from which idle time is known: the wait for the last one), and which parameters were used.

Buffers such as batch-norm statistics stay local in training and are rank 0's in every evaluation, checkpoint and
result, as in torch's DistributedDataParallel. Batch norm sees the rank's own part of the batch.

Source: Li et al. 2020, "PyTorch Distributed: Experiences on Accelerating Data Parallel Training".
"""

from __future__ import annotations

import math
import time
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from dure.collectives.all_reduce import ALGORITHMS, Algorithm, all_reduce
from dure.data.batches import check_batch_size
from dure.data.partition import Description
from dure.errors import LossNotFiniteError
from dure.flat import by_dtype, views_of
from dure.parallel.single import SingleLearner
from dure.strategy import Kind, Learner, Place, Progress
from dure.task import Task


@dataclass(frozen=True)
class DataParallel:
    """Every rank trains the same model on its part of each batch.

    Args:
        batch_size: examples of a step over all workers together; None is all the data.
        all_reduce: how gradients are summed: ring, master (through rank 0) or native (the backend's own).
    """

    batch_size: int | None = 64
    all_reduce: Algorithm = "ring"

    name: ClassVar[str] = "data-parallel"
    kind: ClassVar[Kind] = "ranks"
    unit: ClassVar[str] = "step"

    @property
    def label(self) -> str:
        return f"data parallel {self.all_reduce}"

    def check(self, task: Task, workers: int | None) -> None:
        check_batch_size(self.batch_size)
        if self.all_reduce not in ALGORITHMS:
            raise ValueError(f"there is no all-reduce {self.all_reduce!r}; choose one of {', '.join(ALGORITHMS)}")
        examples = len(task.train)
        if workers is not None and workers > examples:
            raise ValueError(f"{workers} workers are more than the {examples} training examples")
        if workers is not None and self.batch_size is not None and workers > self.batch_size:
            raise ValueError(f"a joint batch of {self.batch_size} cannot be divided over {workers} workers")

    def division(self, task: Task, seed: int) -> Description | None:
        return None

    def learner(self, task: Task, place: Place, seed: int) -> Learner:
        return DataParallelLearner(task, place, seed, self)


def elements_in_message(parameters: int, trainable_tensors: int, ranks: int) -> int:
    """Elements of a step's message: the gradients, and a tail of 1 + 3N + (number of parameter tensors)."""
    return parameters + 1 + 3 * ranks + trainable_tensors


class DataParallelLearner(SingleLearner):
    """SGD whose gradient is summed over the ranks of a group."""

    def __init__(self, task: Task, place: Place, seed: int, strategy: DataParallel) -> None:
        super().__init__(task, place, seed, strategy.batch_size)
        self.algorithm = strategy.all_reduce
        self._take_weights_of_rank_0()
        self.message = GradientMessage([p for p in self.model.parameters() if p.requires_grad], self.group.size)
        self.clock_offset = place.clock_offset
        self.started = self.group.all_gather_values([self._now()])[0][0]

    def _now(self) -> float:
        """Seconds on rank 0's clock."""
        return time.perf_counter() + self.clock_offset

    def gradients(self, indices: Tensor, wish: int) -> Progress:
        part = indices.tensor_split(self.group.size)[self.group.rank]
        share = len(part) / len(indices)
        self.optimizer.zero_grad(set_to_none=True)
        loss = share * self.backward(part, share) if len(part) else 0.0
        entered = time.perf_counter()
        self.message.fill(self.group.rank, loss, wish, self._now() - self.started)
        packed = time.perf_counter()
        for buffer in self.message.buffers:
            all_reduce(buffer, self.group, self.algorithm)
        left = time.perf_counter()
        losses, wish, last_arrival = self.message.read()
        meter = self.group.meter
        meter.compute("pack", entered, packed, self.step + 1)
        arrival = last_arrival + self.started - self.clock_offset
        meter.communication(f"{self.algorithm} all-reduce", packed, left, self.step + 1, arrival)
        for rank, value in enumerate(losses):
            if not math.isfinite(value):
                raise LossNotFiniteError(value, f"rank {rank}", f"step {self.step + 1}")
        return Progress(sum(losses), len(indices), wish)

    def _take_weights_of_rank_0(self) -> None:
        """For models whose first weights do not follow from the seed alone, such as those read from a file."""
        for parameter in self.model.parameters():
            self.group.broadcast_value(parameter.data)
        self._take_buffers_of_rank_0()

    def evaluate(self) -> dict[str, float]:
        self._take_buffers_of_rank_0()
        return super().evaluate()

    def _take_buffers_of_rank_0(self) -> None:
        for buffer in self.model.buffers():
            self.group.broadcast_value(buffer)


class GradientMessage:
    """A step's message: one flat buffer a dtype, the tail behind the gradients of the first that can carry it.

    Numbers of the tail are summed like gradients, each written by one rank and zero elsewhere, so the sum is what
    was written. A time is split into whole seconds and the rest, which float32 holds to less than a microsecond.
    """

    def __init__(self, parameters: list[torch.nn.Parameter], size: int) -> None:
        self.size = size
        self.groups = by_dtype(parameters)
        self.parameters = [parameter for group in self.groups.values() for parameter in group]
        tail = 1 + 3 * size + len(self.parameters)
        carrier = next((dtype for dtype in self.groups if dtype in (torch.float32, torch.float64)), None)
        self.buffers: list[Tensor] = []
        self.bodies: list[Tensor] = []
        self.views: list[Tensor] = []
        for dtype, group in self.groups.items():
            length = sum(parameter.numel() for parameter in group)
            buffer = torch.zeros(length + (tail if dtype is carrier else 0), dtype=dtype)
            self.buffers.append(buffer)
            self.bodies.append(buffer[:length])
            self.views.extend(views_of(buffer, group))
            if dtype is carrier:
                self.tail = buffer[length:]
        if carrier is None:
            self.tail = torch.zeros(tail)
            self.buffers.append(self.tail)

    def fill(self, rank: int, loss: float, wish: int, arrival: float) -> None:
        """Packs this rank's gradients, and the tail."""
        for body, group in zip(self.bodies, self.groups.values(), strict=True):
            torch.cat([(p.grad if p.grad is not None else torch.zeros_like(p)).reshape(-1) for p in group], out=body)
        numbers = [0.0] * (1 + 3 * self.size) + [float(p.grad is not None) for p in self.parameters]
        numbers[0] = float(wish)
        whole, rest = divmod(arrival, 1.0)
        numbers[1 + 3 * rank : 4 + 3 * rank] = loss, whole, rest
        self.tail.copy_(torch.tensor(numbers, dtype=self.tail.dtype))

    def read(self) -> tuple[list[float], int, float]:
        """Gives the summed gradients to the parameters; returns (loss of each rank, wish, last arrival)."""
        numbers = self.tail.tolist()
        used = numbers[1 + 3 * self.size :]
        for parameter, view, count in zip(self.parameters, self.views, used, strict=True):
            parameter.grad = view if count else None
        per_rank = [numbers[1 + 3 * rank : 4 + 3 * rank] for rank in range(self.size)]
        losses = [loss for loss, _, _ in per_rank]
        return losses, int(numbers[0]), max(whole + rest for _, whole, rest in per_rank)
