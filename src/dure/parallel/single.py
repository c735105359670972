"""One worker: stochastic gradient descent, and with a full batch gradient descent. The baseline of all systems.

w <- w - step(mean gradient over the batch), by the task's optimizer. Nothing travels.

Source: Robbins and Monro 1951 (SGD); Cauchy 1847 (gradient descent).
"""

from __future__ import annotations

import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from torch import Tensor

from dure.data.batches import Batches, check_batch_size
from dure.data.partition import Description
from dure.errors import LossNotFiniteError
from dure.evaluation import evaluate
from dure.randomness import seed_generators
from dure.record.meter import Meter
from dure.strategy import (
    Kind,
    Learner,
    Place,
    Progress,
    examples_for,
    load_passing_buffers,
    passing_buffers,
    seeded_model,
)
from dure.task import Task
from dure.threads import flops_per_step


@dataclass(frozen=True)
class SingleWorker:
    """One worker trains alone.

    Args:
        batch_size: examples of a step; None is all the data in every step (gradient descent).
    """

    batch_size: int | None = 64

    name: ClassVar[str] = "single-worker"
    kind: ClassVar[Kind] = "ranks"
    unit: ClassVar[str] = "step"

    @property
    def label(self) -> str:
        return "gradient descent" if self.batch_size is None else "single worker"

    def check(self, task: Task, workers: int | None) -> None:
        check_batch_size(self.batch_size)
        if workers != 1:
            raise ValueError(f"SingleWorker is one worker, but the world has {workers}; choose Processes(1)")

    def division(self, task: Task, seed: int) -> Description | None:
        return None

    def learner(self, task: Task, place: Place, seed: int) -> Learner:
        return SingleLearner(task, place, seed, self.batch_size)


class SingleLearner:
    """SGD at work. Ranks that share its loop (`dure.parallel.data`) replace how a step's gradient is made."""

    unit = "step"

    def __init__(self, task: Task, place: Place, seed: int, batch_size: int | None) -> None:
        self.task, self.group, self.seed = task, place.group, seed
        self.model = seeded_model(task, seed).train()
        self.optimizer = task.optimizer(self.model.parameters())
        self.train_examples, self.test_examples = examples_for(self.model, task)
        self.batches = Batches(len(self.train_examples), batch_size, seed)
        self.units_per_epoch = self.batches.steps_per_epoch
        self.where = f"rank {self.group.rank}"
        self.step = 0

    def flops_per_step(self) -> float:
        return flops_per_step(self.model, self.train_examples, -(-self.batches.batch_size // self.group.size))

    def advance(self, wish: int) -> Progress:
        """One step of the optimizer on the next joint batch."""
        seed_generators(self.seed, "step", self.step, self.group.rank, everything=self.train_examples.draws)
        indices = self.batches.at(self.step)
        progress = self.gradients(indices, wish)
        started = time.perf_counter()
        self.optimizer.step()
        self.group.meter.compute("update", started, time.perf_counter(), self.step + 1)
        self.step += 1
        return progress

    def gradients(self, indices: Tensor, wish: int) -> Progress:
        """Leaves the mean gradient over the joint batch `indices` in the parameters."""
        loss = self.backward(indices, share=1.0)
        if not math.isfinite(loss):
            raise LossNotFiniteError(loss, self.where, f"step {self.step + 1}")
        return Progress(loss, len(indices), wish)

    def backward(self, indices: Tensor, share: float) -> float:
        """Forward and backward over `indices`; gradients are those of share x mean loss. Returns the mean loss."""
        started = time.perf_counter()
        inputs, targets = self.train_examples.batch(indices)
        self.optimizer.zero_grad(set_to_none=True)
        loss = self.task.loss(self.model(inputs), targets)
        value = float(loss.item())
        forwarded = time.perf_counter()
        (loss if share == 1.0 else loss * share).backward()  # type: ignore[no-untyped-call]
        meter = self.group.meter
        meter.compute("forward", started, forwarded, self.step + 1)
        meter.compute("backward", forwarded, time.perf_counter(), self.step + 1)
        return value

    def evaluate(self) -> dict[str, float]:
        return evaluate(self.task, self.model, self.test_examples, self.group, self.step)

    def weights(self) -> dict[str, Tensor]:
        return dict(self.model.state_dict())

    def state(self) -> dict[str, Any]:
        return {
            "step": self.step,
            "optimizer": self.optimizer.state_dict(),
            "buffers": passing_buffers(self.model),
        }

    def restore(self, weights: Mapping[str, Tensor], state: Mapping[str, Any]) -> None:
        self.model.load_state_dict(weights)
        load_passing_buffers(self.model, state["buffers"])
        self.optimizer.load_state_dict(dict(state["optimizer"]))
        self.step = state["step"]

    def meters(self) -> Sequence[Meter]:
        return [self.group.meter]
