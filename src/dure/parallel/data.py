"""Data parallel: every rank holds the model, the joint batch is divided, gradients are averaged before each update.

Rank r of N computes the gradient g_r of the mean loss over its b_r of the B examples; all apply the sum of
(b_r/B)·g_r, which is the gradient of the joint batch, so N ranks walk the same path as one worker.

One message a step, of d gradients and a short tail, goes through an all-reduce of choice: `elements_in_message`.
The tail carries what all ranks have to agree on anyway: rank 0's wishes, the loss of every rank, the time at which
each rank arrived (from which idle time is known: the wait for the last one), and which parameters were used and
which buffers changed.

Buffers such as batch-norm statistics are rank 0's, as in torch's DistributedDataParallel: those that rank 0's forward
has changed, which the tail tells, are broadcast after the step. Batch norm sees the rank's own part of the batch.

Source: Li et al. 2020, "PyTorch Distributed: Experiences on Accelerating Data Parallel Training".
"""

from __future__ import annotations

import math
import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from dure.collectives.all_reduce import ALGORITHMS, Algorithm, all_reduce
from dure.data.batches import check_batch_size
from dure.data.partition import Description
from dure.errors import LossNotFiniteError
from dure.flat import by_dtype, views_of
from dure.parallel.replicas import ReplicasLearner
from dure.parallel.single import SingleLearner
from dure.strategy import Kind, Learner, Place, Progress
from dure.task import Task


@dataclass(frozen=True)
class DataParallel:
    """Every rank trains the same model on its part of each batch.

    Args:
        batch_size: examples of a step over all workers together; None is all the data.
        all_reduce: how gradients are summed: ring, master (through rank 0), one_shot, tree, halving_doubling,
            hierarchical, native (the backend's own), or auto, which chooses by size, ranks and hosts. In a world of
            threads the master adds them (`dure.parallel.replicas`).
    """

    batch_size: int | None = 64
    all_reduce: Algorithm = "ring"

    name: ClassVar[str] = "data-parallel"
    kind: ClassVar[Kind] = "ranks"
    also: ClassVar[Mapping[Kind, str]] = {"threads": "data parallel in threads"}
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
        if place.kind == "threads":
            return ReplicasLearner(task, place, seed, self.batch_size)
        return DataParallelLearner(task, place, seed, self)


def elements_in_message(parameters: int, trainable_tensors: int, ranks: int, buffers: int = 0) -> int:
    """Elements of a step's message: the gradients, and a tail of 1 + 3N + a flag a parameter tensor and a buffer."""
    return parameters + 1 + 3 * ranks + trainable_tensors + buffers


class DataParallelLearner(SingleLearner):
    """SGD whose gradient is summed over the ranks of a group."""

    def __init__(self, task: Task, place: Place, seed: int, strategy: DataParallel) -> None:
        super().__init__(task, place, seed, strategy.batch_size)
        self.algorithm = strategy.all_reduce
        # for models whose first weights do not follow from the seed alone, such as those read from a file
        self.group.broadcast_values([*self.model.parameters(), *self.model.buffers()], counted=False)
        self._seen = [buffer.clone() for buffer in self.model.buffers()]
        trained = [parameter for parameter in self.model.parameters() if parameter.requires_grad]
        self.message = GradientMessage(trained, self.group.size, len(self._seen))
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
        self.message.fill(self.group.rank, loss, wish, self._now() - self.started, self._changed_buffers())
        packed = time.perf_counter()
        for buffer in self.message.buffers:
            all_reduce(buffer, self.group, self.algorithm)
        left = time.perf_counter()
        losses, wish, last_arrival, changed = self.message.read()
        meter = self.group.meter
        meter.compute("pack", entered, packed, self.step + 1)
        arrival = last_arrival + self.started - self.clock_offset
        meter.communication(f"{self.algorithm} all-reduce", packed, left, self.step + 1, arrival)
        for rank, value in enumerate(losses):
            if not math.isfinite(value):
                raise LossNotFiniteError(value, f"rank {rank}", f"step {self.step + 1}")
        if any(changed):
            self._take_buffers_of_rank_0(changed)
        return Progress(sum(losses), len(indices), wish)

    def _changed_buffers(self) -> list[bool]:
        """Which buffers have changed in this step; only rank 0's are taken."""
        if not self._seen or self.group.rank != 0:
            return [False] * len(self._seen)
        changed = []
        for position, (now, seen) in enumerate(zip(self.model.buffers(), self._seen, strict=False)):
            changed.append(not torch.equal(now, seen))  # batch norm writes without telling autograd's version
            if changed[-1]:
                self._seen[position] = now.clone()
        return changed

    def _take_buffers_of_rank_0(self, changed: list[bool]) -> None:
        started = time.perf_counter()
        self.group.broadcast_values([b for b, one in zip(self.model.buffers(), changed, strict=False) if one])
        ended = time.perf_counter()
        self.group.meter.communication("broadcast of buffers", started, ended, self.step + 1)


def _dense(parameter: Tensor) -> Tensor:
    """The gradient, zeros where there is none; sparse ones of embeddings are filled up."""
    if parameter.grad is None:
        return torch.zeros_like(parameter)
    return parameter.grad.to_dense() if parameter.grad.is_sparse else parameter.grad


class GradientMessage:
    """A step's message: one flat buffer a dtype, the tail behind the gradients of the first that can carry it.

    Numbers of the tail are summed like gradients, each written by one rank and zero elsewhere, so the sum is what
    was written. A time is split into whole seconds and the rest, which float32 holds to less than a microsecond.
    """

    def __init__(self, parameters: list[torch.nn.Parameter], size: int, buffers: int) -> None:
        self.size = size
        self.groups = by_dtype(parameters)
        self.parameters = [parameter for group in self.groups.values() for parameter in group]
        tail = 1 + 3 * size + len(self.parameters) + buffers
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

    def fill(self, rank: int, loss: float, wish: int, arrival: float, changed: list[bool]) -> None:
        """Packs this rank's gradients, and the tail. changed: a flag a buffer, from rank 0."""
        for body, group in zip(self.bodies, self.groups.values(), strict=True):
            torch.cat([_dense(p).reshape(-1) for p in group], out=body)
        used = [float(parameter.grad is not None) for parameter in self.parameters]
        numbers = [0.0] * (1 + 3 * self.size) + used + list(map(float, changed))
        numbers[0] = float(wish)
        whole, rest = divmod(arrival, 1.0)
        numbers[1 + 3 * rank : 4 + 3 * rank] = loss, whole, rest
        self.tail.copy_(torch.tensor(numbers, dtype=self.tail.dtype))

    def read(self) -> tuple[list[float], int, float, list[bool]]:
        """Gives the summed gradients to the parameters; returns (loss of each rank, wish, last arrival, changed)."""
        numbers = self.tail.tolist()
        flags = numbers[1 + 3 * self.size :]
        used, changed = flags[: len(self.parameters)], [bool(flag) for flag in flags[len(self.parameters) :]]
        for parameter, view, count in zip(self.parameters, self.views, used, strict=True):
            parameter.grad = view if count else None
        per_rank = [numbers[1 + 3 * rank : 4 + 3 * rank] for rank in range(self.size)]
        losses = [loss for loss, _, _ in per_rank]
        return losses, int(numbers[0]), max(whole + rest for _, whole, rest in per_rank), changed
