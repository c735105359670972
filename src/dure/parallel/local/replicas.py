"""Data parallel in one process: a master divides each batch over replicas in worker threads.

In a step the master

    scatters  the inputs, examples b_1 … b_N of the joint batch, to N workers, whose replicas run
              forward at once;
    gathers   the outputs, and computes the loss of the whole batch and its gradient with respect to
              the outputs;
    scatters  these gradients to the workers, whose replicas run backward at once;
    reduces   the gradients of the weights, g = g_1 + … + g_N in this order, and updates.

Since the loss is the master's, it may be any function of the whole batch, and N workers walk the
path of one. While the master works the workers wait: that is its extra load, which
`dure.parallel.data.strategy`, where all ranks do the same, does not have.

Replicas on the master's device use the weights in its memory; there a gradient for each worker is
all they add. Replicas on other devices get a copy of the weights in every step. Batch norm sees a
worker's own part, and the buffers of worker 0, which works on the model itself, are those that
stay; the others begin each step with a copy. Dropout is drawn from (seed, step, worker), as by
ranks.

What is handed over is counted as if memory were not shared, for each worker: its inputs, and the
gradients of its outputs, from the master; its outputs, and d gradients, to the master
(`handed_over`). So are the buffers, for all but worker 0, and the weights, for workers on other
devices.

Source: the data-parallel scheme of torch.nn.DataParallel; Krizhevsky 2014, "One weird trick for
parallelizing convolutional neural networks" (its section on data parallelism).
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor, nn

from dure.contracts.strategy import Place, Progress, another
from dure.contracts.task import Task
from dure.errors import LossNotFiniteError
from dure.machine.devices import to_device
from dure.parallel.alike import Still
from dure.parallel.local import parts
from dure.parallel.local.chain import copied
from dure.parallel.local.draws import Draws
from dure.parallel.local.single import SingleLearner
from dure.parallel.local.team import TimeSheet, team_at
from dure.randomness.seeds import derive
from dure.record.meter import Meter
from dure.tasks.flops import flops_per_step
from dure.tasks.loss_shares import Computed
from dure.tensors.buffers import common

COMPILES_ALONE = "torch's compiler works for one thread of a process, and here several compute"
"""Why systems of threads compile nothing."""


def handed_over(inputs: int, outputs: int, parameters: int, workers: int) -> tuple[int, int]:
    """Elements that the master hands to all workers in a step, and that it gets from them.

    inputs, outputs: elements of the joint batch; the outputs all have a gradient. For models
    without buffers, on one device.
    """
    return inputs + outputs, outputs + workers * parameters


class Worker:
    """A worker as its master sees it: the replica, what it was handed, and what it did."""

    def __init__(self, model: nn.Module, device: torch.device, meter: Meter) -> None:
        self.model = model
        self.device = device
        self.meter = meter
        self.sheet = TimeSheet(meter, "the master")
        self.inputs: Any = None
        self.outputs: Any = None
        self.leaves: Any = None

    def forward(self) -> None:
        """From `inputs` to `outputs` and their values `leaves`: the master's graph begins there."""
        # A model may write into its inputs, which are views of the batch.
        self.outputs = self.model(copied(self.inputs))
        self.leaves = parts.detached(self.outputs)

    def backward(self) -> None:
        """From the gradients of `leaves` to those of the replica's weights."""
        parts.backward(self.outputs, parts.gradients(self.leaves))
        # lets go of the graph
        self.inputs = self.outputs = self.leaves = None


class ReplicasLearner(SingleLearner):
    """SGD whose gradient is made by replicas in worker threads."""

    def __init__(
        self,
        task: Task,
        place: Place,
        seed: int,
        batch_size: int | None,
    ) -> None:
        super().__init__(task, place, seed, batch_size)
        self.where = "master"
        # the most examples that one worker gets
        self.share = -(-self.batches.batch_size // len(place.devices))
        self.team = team_at(place, self.flops_per_step())
        self.workers: list[Worker] = []
        for number, device in enumerate(place.devices):
            # Worker 0 computes on the model itself: no copy, and its gradients are in place.
            own = self.model
            if number > 0:
                own = replica(self.model, another(self.model, task, seed), device)
            meter = Meter(f"worker {number}", place.trace)
            self.workers.append(Worker(own, device, meter))
        self.draws = Draws(place.devices, [worker.model for worker in self.workers])
        # One worker alone may change its weights.
        models = [worker.model for worker in self.workers] if len(self.workers) > 1 else []
        self.still = Still(named for model in models for named in model.named_parameters())

    def flops_per_step(self) -> float:
        return flops_per_step(self.model, self.train_examples, self.share)

    def advance(self, wish: int) -> Progress:
        started = time.perf_counter()
        for worker in self.workers:
            worker.sheet.begin(started)
        progress = super().advance(wish)
        ended = time.perf_counter()
        for worker in self.workers:
            worker.sheet.end(ended, self.step)
        return progress

    def gradients(self, indices: Tensor, wish: int) -> Progress:
        """Leaves the joint batch's gradient in the model's parameters, which are worker 0's."""
        inputs, targets = self.read(indices)
        sizes = [len(part) for part in indices.tensor_split(len(self.workers)) if len(part)]
        busy = self._scatter(inputs, sizes)
        self.still.begin()
        # around forward and loss, as autograd follows what they did; workers take it over
        # (`Team.each`)
        with self.computing():
            # Forward may be done twice, if it shows that the model draws; backward comes after it.
            self.draws.run(lambda own: self._forward_all(busy, own))
            self.still.end()
            found = self._loss(busy, sizes, targets)
        self._begin_backward(found.loss, busy)
        self._at_once("backward", busy, lambda worker: self.workers[worker].backward())
        self._reduce(busy)
        return Progress(float(found.loss.item()) if found.counted else None, len(indices), wish)

    def _scatter(self, inputs: Any, sizes: list[int]) -> list[Worker]:
        """Hands each worker its inputs and the weights; the workers that got some."""
        started = time.perf_counter()
        # A small batch leaves the last workers without examples.
        busy = self.workers[: len(sizes)]
        for worker, mine in zip(busy, parts.divided(inputs, sizes), strict=True):
            worker.inputs = to_device(mine, worker.device)
            self._to(worker, refresh(worker.model, self.model) + parts.nbytes(mine))
        self._moved("scatter", started)
        return busy

    def _forward_all(
        self, busy: list[Worker], own: Callable[[int], AbstractContextManager[Any]]
    ) -> None:
        self._at_once("forward", busy, lambda number: self._forward(number, own))

    def _forward(self, number: int, own: Callable[[int], AbstractContextManager[Any]]) -> None:
        # as rank `number` of data parallel would draw
        with own(derive(self.seed, "step", self.step, number)):
            self.workers[number].forward()

    def _at_once(self, name: str, busy: list[Worker], work: Callable[[int], None]) -> None:
        """Has the workers do `work` at the same time; the master waits."""
        started = time.perf_counter()
        done = self.team.each(work, self.group.step, range(len(busy)))
        self.group.meter.idle("wait for the workers", started, time.perf_counter(), self.step + 1)
        for worker, one in zip(busy, done, strict=True):
            worker.sheet.did(name, one.start, one.end, self.step + 1)

    def _loss(self, busy: list[Worker], sizes: list[int], targets: Any) -> Computed:
        """Gathers the outputs; the loss of the batch."""
        started = time.perf_counter()
        for worker in busy:
            self._from(worker, parts.nbytes(worker.leaves))
        # The loss sees the batch as one, in the order of its examples.
        outputs = parts.joined([to_device(worker.leaves, self.device) for worker in busy], sizes)
        gathered = self._moved("gather", started)
        found = self.losses.mean(outputs, targets, sum(sizes))
        value = float(found.loss.item())
        if not math.isfinite(value):
            raise LossNotFiniteError(value, self.where, f"step {self.step + 1}")
        self.group.meter.compute("loss", gathered, time.perf_counter(), self.step + 1)
        return found

    def _begin_backward(self, loss: Tensor, busy: list[Worker]) -> None:
        """Leaves the gradients of the outputs in the workers' `leaves`."""
        started = time.perf_counter()
        loss.backward()  # type: ignore[no-untyped-call]
        self.group.meter.compute("loss", started, time.perf_counter(), self.step + 1)
        for worker in busy:
            self._to(worker, parts.nbytes(parts.gradients(worker.leaves)))

    @torch.no_grad()
    def _reduce(self, busy: list[Worker]) -> None:
        """Adds the replicas' gradients to those of the model, in order of worker."""
        started = time.perf_counter()
        for worker in busy:
            self._from(worker, parts.nbytes([weight.grad for weight in worker.model.parameters()]))
        # Worker 0 works on the model itself, whose gradients are there.
        for worker in busy[1:]:
            weights = zip(self.model.parameters(), worker.model.parameters(), strict=True)
            for weight, mine in weights:
                if mine.grad is not None:
                    add_gradient(weight, mine.grad.to(weight.device))
                    # dropped at once: by the next step it would only hold memory
                    mine.grad = None
        self._moved("reduce", started)

    def _to(self, worker: Worker, nbytes: int) -> None:
        self.group.meter.sent(nbytes)
        worker.meter.received(nbytes)

    def _from(self, worker: Worker, nbytes: int) -> None:
        worker.meter.sent(nbytes)
        self.group.meter.received(nbytes)

    def _moved(self, name: str, started: float) -> float:
        """Puts down what the master has done since `started` to move data; returns the time."""
        now = time.perf_counter()
        self.group.meter.communication(name, started, now, self.step + 1)
        return now

    def meters(self) -> Sequence[Meter]:
        return [self.group.meter, *(worker.meter for worker in self.workers)]


def replica(model: nn.Module, fresh: nn.Module, device: torch.device) -> nn.Module:
    """`fresh` as a replica of `model` on `device`.

    Raises ValueError if they have a parameter in common.
    """
    known = {id(weight) for weight in model.parameters()}
    if any(id(weight) in known for weight in fresh.parameters()):
        raise ValueError(
            "the task's model function returned the same parameters twice: it has to make fresh "
            "ones"
        )
    refresh(fresh.to(device), model)
    return fresh.train()


@torch.no_grad()
def refresh(replica: nn.Module, model: nn.Module) -> int:
    """Gives a replica the weights and buffers of its model, and no gradients.

    Returns how many bytes it was given. On the model's device the replica uses the weights where
    they are, also those that an optimizer has put elsewhere.
    """
    given = 0
    for mine, weight in zip(replica.parameters(), model.parameters(), strict=True):
        mine.grad = None
        if mine.device != weight.device:
            mine.copy_(weight)
            given += weight.nbytes
        elif mine.data_ptr() != weight.data_ptr():
            mine.data = weight.data
    for own, buffer in common(replica, model):
        if own is buffer:
            continue
        given += buffer.nbytes
        # A buffer that is expanded could not be written; nothing changes it, so it is equal.
        if own.device != buffer.device or not torch.equal(own, buffer):
            own.copy_(buffer)
    return given


def add_gradient(weight: Tensor, gradient: Tensor) -> None:
    """Adds to a weight's gradient; those of embeddings may be sparse."""
    if weight.grad is None:
        weight.grad = gradient
    elif weight.grad.is_sparse:
        # a sparse tensor cannot take a dense one in place
        weight.grad = weight.grad + gradient
    else:
        weight.grad.add_(gradient)
