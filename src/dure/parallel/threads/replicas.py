"""Data parallelism in one process: a master divides each batch over replicas in worker threads.

In a step the master

    scatters  the inputs, examples b_1 … b_N of the joint batch, to N workers, whose replicas run
              forward at the same time;
    gathers   the outputs, and computes the loss of the whole batch and its gradient with respect to
              the outputs;
    scatters  these gradients to the workers, whose replicas run backward at the same time;
    reduces   the gradients of the weights, g = g_1 + … + g_N in this order, and updates.

The master computes the loss, which may therefore be any function of the whole batch, and N workers
compute the same weights as a single worker. Workers are idle while the master works: this is its
extra load, which `dure.parallel.data.strategy`, where all ranks do the same work, does not have.

Replicas on the master's device share the weights in its memory; there each worker adds only memory
for a gradient. Replicas on other devices get a copy of the weights in every step. Batch norm sees a
worker's own part. The buffers of worker 0, which uses the model itself, are saved; the others begin
each step with a copy. Dropout is drawn from (seed, step, worker), as by ranks.

Transfers are counted as if memory were not shared, for each worker: its inputs, and the gradients
of its outputs, from the master; its outputs, and d gradients, to the master
(`elements_with_master`). The buffers are counted for all workers except worker 0, and the weights
for workers on other devices.

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

from dure.contracts.fresh_model import unused_copy
from dure.contracts.learner import StepResult
from dure.contracts.task import Task
from dure.contracts.world import RankContext
from dure.errors import LossNotFiniteError
from dure.machine.devices import to_device
from dure.parallel.replica_consistency import MutationGuard
from dure.parallel.single_worker import SingleLearner
from dure.parallel.threads import batch_trees
from dure.parallel.threads.chain import copied
from dure.parallel.threads.thread_rng import ThreadDraws
from dure.parallel.threads.worker_threads import WorkerTimeline, worker_threads_at
from dure.randomness.seeds import derive
from dure.record.meter import Meter
from dure.tasks.flops import flops_per_step
from dure.tasks.loss_shares import ComputedLoss
from dure.tensors.buffers import common_buffers

COMPILES_ALONE = "torch's compiler supports one thread per process, and here several compute"
"""Reason why systems of threads do not compile."""


def elements_with_master(
    inputs: int, outputs: int, parameters: int, workers: int
) -> tuple[int, int]:
    """Return the elements that the master sends to all workers in a step, and receives from them.

    inputs, outputs: elements of the joint batch; all outputs have a gradient. For models without
    buffers, on one device.
    """
    return inputs + outputs, outputs + workers * parameters


class ReplicaWorker:
    """A worker's replica, its inputs and outputs, and its times, as used by the master."""

    def __init__(self, model: nn.Module, device: torch.device, meter: Meter) -> None:
        self.model = model
        self.device = device
        self.meter = meter
        self.sheet = WorkerTimeline(meter, "the master")
        self.inputs: Any = None
        self.outputs: Any = None
        self.leaves: Any = None

    def forward(self) -> None:
        """Compute `outputs` from `inputs`.

        Detach them as `leaves`, the start of the master's graph.
        """
        # A model may write into its inputs, which are views of the batch.
        self.outputs = self.model(copied(self.inputs))
        self.leaves = batch_trees.detached(self.outputs)

    def backward(self) -> None:
        """Compute the gradients of the replica's weights from the gradients of `leaves`."""
        batch_trees.backward(self.outputs, batch_trees.gradients(self.leaves))
        # releases the graph
        self.inputs = self.outputs = self.leaves = None


class ReplicasLearner(SingleLearner):
    """SGD whose gradient is computed by replicas in worker threads."""

    def __init__(
        self,
        task: Task,
        context: RankContext,
        seed: int,
        batch_size: int | None,
    ) -> None:
        super().__init__(task, context, seed, batch_size)
        self.where = "master"
        # the largest number of examples of a worker
        self.share = -(-self.batches.batch_size // len(context.devices))
        self.team = worker_threads_at(context, self.flops_per_step())
        self.workers: list[ReplicaWorker] = []
        for number, device in enumerate(context.devices):
            # Worker 0 uses the model itself: no copy, and its gradients are in place.
            own = self.model
            if number > 0:
                own = replica(self.model, unused_copy(self.model, task, seed), device)
            meter = Meter(f"worker {number}", context.trace)
            self.workers.append(ReplicaWorker(own, device, meter))
        self.draws = ThreadDraws(context.devices, [worker.model for worker in self.workers])
        # A single worker may change its weights in forward.
        models = [worker.model for worker in self.workers] if len(self.workers) > 1 else []
        self.mutation_guard = MutationGuard(
            named for model in models for named in model.named_parameters()
        )

    def flops_per_step(self) -> float:
        return flops_per_step(self.model, self.train_examples, self.share)

    def advance(self, control_flags: int) -> StepResult:
        started = time.perf_counter()
        for worker in self.workers:
            worker.sheet.begin(started)
        progress = super().advance(control_flags)
        ended = time.perf_counter()
        for worker in self.workers:
            worker.sheet.end(ended, self.step)
        return progress

    def gradients(self, indices: Tensor, control_flags: int) -> StepResult:
        """Compute the joint batch's gradient and store it in the model's parameters."""
        inputs, targets = self.read(indices)
        sizes = [len(part) for part in indices.tensor_split(len(self.workers)) if len(part)]
        busy = self._scatter(inputs, sizes)
        self.mutation_guard.begin()
        # around forward and loss only: backward uses the dtypes of forward; workers inherit the
        # mode (`WorkerThreads.each`)
        with self.computing():
            # Forward may run twice, if it shows that the model draws; backward comes after it.
            self.draws.run(lambda own: self._forward_all(busy, own))
            self.mutation_guard.end()
            found = self._loss(busy, sizes, targets)
        self._begin_backward(found.loss, busy)
        self._at_once("backward", busy, lambda worker: self.workers[worker].backward())
        self._reduce(busy)
        return StepResult(
            float(found.loss.item()) if found.counted else None, len(indices), control_flags
        )

    def _scatter(self, inputs: Any, sizes: list[int]) -> list[ReplicaWorker]:
        """Send each worker its inputs and the weights; return the workers that got inputs."""
        started = time.perf_counter()
        # A small batch leaves the last workers without examples.
        busy = self.workers[: len(sizes)]
        for worker, mine in zip(busy, batch_trees.split_examples(inputs, sizes), strict=True):
            worker.inputs = to_device(mine, worker.device)
            self._to(worker, refresh(worker.model, self.model) + batch_trees.nbytes(mine))
        self._moved("scatter", started)
        return busy

    def _forward_all(
        self, busy: list[ReplicaWorker], own: Callable[[int], AbstractContextManager[Any]]
    ) -> None:
        self._at_once("forward", busy, lambda number: self._forward(number, own))

    def _forward(self, number: int, own: Callable[[int], AbstractContextManager[Any]]) -> None:
        # as rank `number` of data parallel would draw
        with own(derive(self.seed, "step", self.step, number)):
            self.workers[number].forward()

    def _at_once(self, name: str, busy: list[ReplicaWorker], work: Callable[[int], None]) -> None:
        """Run `work` in the workers at the same time; the master waits."""
        started = time.perf_counter()
        done = self.team.each(work, self.group.step, range(len(busy)))
        self.group.meter.idle("wait for the workers", started, time.perf_counter(), self.step + 1)
        for worker, one in zip(busy, done, strict=True):
            worker.sheet.did(name, one.start, one.end, self.step + 1)

    def _loss(self, busy: list[ReplicaWorker], sizes: list[int], targets: Any) -> ComputedLoss:
        """Gather the outputs, and return the loss of the batch."""
        started = time.perf_counter()
        for worker in busy:
            self._from(worker, batch_trees.nbytes(worker.leaves))
        # The loss sees the whole batch, in the order of its examples.
        outputs = batch_trees.join_examples(
            [to_device(worker.leaves, self.device) for worker in busy], sizes
        )
        gathered = self._moved("gather", started)
        found = self.losses.mean(outputs, targets, sum(sizes))
        value = float(found.loss.item())
        if not math.isfinite(value):
            raise LossNotFiniteError(value, self.where, f"step {self.step + 1}")
        self.group.meter.compute("loss", gathered, time.perf_counter(), self.step + 1)
        return found

    def _begin_backward(self, loss: Tensor, busy: list[ReplicaWorker]) -> None:
        """Compute the gradients of the outputs and store them in the workers' `leaves`."""
        started = time.perf_counter()
        self.scaling.scaled(loss).backward()  # type: ignore[no-untyped-call]
        self.group.meter.compute("loss", started, time.perf_counter(), self.step + 1)
        for worker in busy:
            self._to(worker, batch_trees.nbytes(batch_trees.gradients(worker.leaves)))

    @torch.no_grad()
    def _reduce(self, busy: list[ReplicaWorker]) -> None:
        """Add the replicas' gradients to the gradients of the model, in order of worker."""
        started = time.perf_counter()
        for worker in busy:
            self._from(
                worker, batch_trees.nbytes([weight.grad for weight in worker.model.parameters()])
            )
        # Worker 0 uses the model itself, whose gradients are in place.
        for worker in busy[1:]:
            weights = zip(self.model.parameters(), worker.model.parameters(), strict=True)
            for weight, mine in weights:
                if mine.grad is not None:
                    add_gradient(weight, mine.grad.to(weight.device))
                    # dropped at once: it would only occupy memory until the next step
                    mine.grad = None
        self._moved("reduce", started)

    def _to(self, worker: ReplicaWorker, nbytes: int) -> None:
        self.group.meter.sent(nbytes)
        worker.meter.received(nbytes)

    def _from(self, worker: ReplicaWorker, nbytes: int) -> None:
        worker.meter.sent(nbytes)
        self.group.meter.received(nbytes)

    def _moved(self, name: str, started: float) -> float:
        """Record the time since `started` as communication of the master; return the time."""
        now = time.perf_counter()
        self.group.meter.communication(name, started, now, self.step + 1)
        return now

    def meters(self) -> Sequence[Meter]:
        return [self.group.meter, *(worker.meter for worker in self.workers)]


def replica(model: nn.Module, fresh: nn.Module, device: torch.device) -> nn.Module:
    """Prepare `fresh` as a replica of `model` on `device`, and return it.

    Raises ValueError if they have a parameter in common.
    """
    known = {id(weight) for weight in model.parameters()}
    if any(id(weight) in known for weight in fresh.parameters()):
        raise ValueError(
            "the task's model function returned the same parameters twice: it has to return new "
            "ones"
        )
    refresh(fresh.to(device), model)
    return fresh.train()


@torch.no_grad()
def refresh(replica: nn.Module, model: nn.Module) -> int:
    """Give a replica the weights and buffers of its model, and clear its gradients.

    Returns the number of bytes copied. On the model's device the replica shares the weights, also
    weights that an optimizer has moved to other memory.
    """
    given = 0
    for mine, weight in zip(replica.parameters(), model.parameters(), strict=True):
        mine.grad = None
        if mine.device != weight.device:
            mine.copy_(weight)
            given += weight.nbytes
        elif mine.data_ptr() != weight.data_ptr():
            mine.data = weight.data
    for own, buffer in common_buffers(replica, model):
        if own is buffer:
            continue
        given += buffer.nbytes
        # An expanded buffer could not be written; no forward pass changes it, so it is equal.
        if own.device != buffer.device or not torch.equal(own, buffer):
            own.copy_(buffer)
    return given


def add_gradient(weight: Tensor, gradient: Tensor) -> None:
    """Add a gradient to a weight's gradient; gradients of embeddings may be sparse."""
    if weight.grad is None:
        weight.grad = gradient
    elif weight.grad.is_sparse:
        # a dense tensor cannot be added in place to a sparse tensor
        weight.grad = weight.grad + gradient
    else:
        weight.grad.add_(gradient)
