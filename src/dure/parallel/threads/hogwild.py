"""Hogwild: workers update the same weights without locks and without waiting for each other.

Every worker repeatedly takes its next batch, computes the gradient g of its mean loss at the
present weights, which other workers may change at the same time, and steps: w <- w - lr · g for
SGD, element by element in the shared memory. Updates may get lost, and a gradient may belong to a
mixture of old and new weights. With sparse gradients that is rare; otherwise the effect is similar
to a little noise.

    round:  steps s_0 … s_0 + period - 1; worker i of N makes the steps s_0 + i, s_0 + i + N, …;
    then all workers synchronise

Workers synchronise only to evaluate, save or end a run, so a run counts rounds. The optimizer's
state, such as momentum, is separate for each worker. The buffers of worker 0 are saved and
evaluated.

Nothing is sent between threads. Processes map the weights into shared memory, and send only
buffers. With one worker this is SGD, bit for bit; with several workers no run repeats another,
because the order of updates depends on the machine: the config of a run has "deterministic": false.

Source: Recht, Ré, Wright, Niu 2011, "Hogwild!: A Lock-Free Approach to Parallelizing Stochastic
Gradient Descent".
"""

from __future__ import annotations

import math
import operator
import os
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor, nn

from dure.arguments import at_least, check_ranges
from dure.collectives.group import Group
from dure.contracts.fresh_model import unused_copy
from dure.contracts.learner import Learner, StepResult
from dure.contracts.lr_schedule import ScheduledRates
from dure.contracts.strategy import Feature, RunTraits, Strategy, Traits
from dure.contracts.task import Task
from dure.contracts.training_options import ALL
from dure.contracts.world import Kind, RankContext, World
from dure.data.batches import Batches, check_batch_size
from dure.errors import DureError, LossNotFiniteError, WorkerFailedError, described, traceback_of
from dure.machine.devices import to_cpu, to_device
from dure.parallel.single_worker import SingleLearner
from dure.parallel.threads.replicas import COMPILES_ALONE, refresh, replica
from dure.parallel.threads.worker_threads import WorkerThreads, worker_threads_at
from dure.randomness.seeds import seed_generators
from dure.record.meter import Meter
from dure.tasks.batch_norm import check_pieces
from dure.tasks.evaluation import evaluate
from dure.tasks.flops import flops_per_step
from dure.tasks.gradient_accumulation import accumulate_gradient
from dure.tasks.gradient_transforms import GradientTransforms
from dure.tasks.loss_scaling import loss_scaling_of
from dure.tensors.buffers import (
    BufferNames,
    load_non_persistent_buffers,
    load_weights,
    non_persistent_buffers_of,
)
from dure.tensors.optimizer_state import load_optimizer

_LINE = 64
"""Bytes of a cache line: no two tensors share a line."""


@dataclass(frozen=True)
class Hogwild(Strategy):
    """Workers update the same weights without locks.

    Args:
        batch_size: examples of a worker's step; None is all the data in every step.
        period: steps, of all workers together, between synchronisations for evaluation and saving;
            None is an epoch.
        accumulate: number of micro-batches in which a worker computes a batch.
    """

    batch_size: int | None = 64
    period: int | None = field(default=None, metadata=at_least(1))
    accumulate: int = field(default=1, metadata=at_least(1))

    name: ClassVar[str] = "hogwild"
    traits: ClassVar[Traits] = Traits(
        kind="threads",
        unit="round",
        additional_worlds={"ranks": "Hogwild in processes"},
        trains_with=ALL,
    )

    @property
    def run_traits(self) -> RunTraits:
        return RunTraits(deterministic=False)

    @property
    def label(self) -> str:
        return "Hogwild"

    def check(self, task: Task, world: World) -> None:
        check_batch_size(self.batch_size)
        check_ranges(self)
        if world.kind == "ranks" and set(world.computes_on) - {"cpu"}:
            raise ValueError(
                "hogwild's processes share the weights in the CPU's memory, but these compute on "
                f"{world.computes_on[0]}: use worker threads, which share a device's memory "
                "(--world threads --devices)"
            )
        if len(set(world.computes_on)) > 1:
            raise ValueError(
                "Hogwild's workers share the weights, so they compute on one device: give only one"
            )

    def check_model(self, task: Task, model: nn.Module, world: World) -> None:
        """Check that the model can train on batches of this size. Raises ValueError otherwise."""
        check_pieces(task, model, self.batch_size, 1, self.accumulate)

    def cannot(self, feature: Feature, kind: Kind) -> str | None:
        if feature == "compile" and kind == "threads":
            return COMPILES_ALONE
        if feature == "ema" and kind == "ranks":
            return (
                "its processes share the weights in memory, and each would write its own average "
                "there: use threads"
            )
        return super().cannot(feature, kind)

    def learner(self, task: Task, context: RankContext, seed: int) -> Learner:
        return HogwildLearner(task, context, seed, self)


class HogwildSteps(NamedTuple):
    """Result of some steps. total: sum over the steps of loss times denominator."""

    total: float
    counted: float
    examples: float


class HogwildWorker:
    """Worker: a model that uses the shared weights, and a separate optimizer.

    number: the worker's number among all workers.
    """

    def __init__(
        self, number: int, learner: HogwildLearner, model: nn.Module, meter: Meter
    ) -> None:
        self.number = number
        self.learner = learner
        self.model = model
        self.meter = meter
        # Worker 0 of this process uses the model itself and the learner's optimizer; a single
        # worker is therefore plain SGD.
        if model is learner.model:
            self.optimizer = learner.optimizer
        else:
            self.optimizer = learner.task.optimizer(model.parameters())
        self.rates = ScheduledRates(self.optimizer, learner.task.lr_schedule)
        self.trimming = GradientTransforms(learner.task, model.named_parameters())
        # Workers skip steps of their own, and so have scales of their own.
        self.scaling = loss_scaling_of(learner.task, meter.name, learner.device)
        self.batches = Batches(
            len(learner.train_examples),
            learner.strategy.batch_size,
            learner.seed,
            order=learner.train_examples.order(),
        )

    def run(self, first: int, end: int) -> HogwildSteps:
        """Make this worker's steps among the steps first … end-1."""
        ran = HogwildSteps(0.0, 0.0, 0)
        # Steps are assigned in turn, so that two workers never take the same batch.
        for step in range(first + self.number, end, self.learner.size):
            try:
                made = self._step(step)
            except BaseException as error:
                # The other workers would continue to the end of the round without use.
                self.learner.stop_all()
                if isinstance(error, (DureError, KeyboardInterrupt)):
                    raise
                raise WorkerFailedError(
                    self.meter.name, f"step {step + 1}", described(error), traceback_of(error)
                ) from error
            ran = HogwildSteps(*map(operator.add, ran, made))
            if self.learner.stopping():
                break
        return ran

    def _step(self, step: int) -> HogwildSteps:
        learner = self.learner
        indices = self.batches.at(step)
        if len(learner.hogwild_workers) == 1:
            # Threads share the generators: only the single worker of a process can seed them.
            draws = learner.train_examples.draws
            seed_generators(learner.seed, "step", step, learner.group.rank, everything=draws)
        self.optimizer.zero_grad(set_to_none=True)
        value, counted = accumulate_gradient(
            learner.losses,
            indices,
            learner.strategy.accumulate,
            read=self._read,
            forward=self.model,
            computing=lambda *given: learner.computing(),
            backward=self._backward,
            parameters=self.model.parameters(),
        )
        if not math.isfinite(value):
            raise LossNotFiniteError(value, self.meter.name, f"step {step + 1}", intact=False)
        self.scaling.unscale(self.model.parameters())
        self.trimming.at(step)
        self.rates.at(step)
        self.scaling.step(self.optimizer)
        return HogwildSteps(value * counted, counted, len(indices))

    def _backward(self, loss: Tensor) -> None:
        self.scaling.scaled(loss).backward()  # type: ignore[no-untyped-call]

    def _read(self, indices: Tensor) -> tuple[Any, Any]:
        learner = self.learner
        batch: tuple[Any, Any] = to_device(learner.train_examples.batch(indices), learner.device)
        return batch


class HogwildLearner(SingleLearner):
    """Workers of this process: all workers in a world of threads, one in a process."""

    rank_state_differs = True

    def __init__(self, task: Task, context: RankContext, seed: int, strategy: Hogwild) -> None:
        super().__init__(task, context, seed, strategy.batch_size)
        self.strategy = strategy
        self.context = context
        steps = self.batches.steps_per_epoch
        self.period = strategy.period if strategy.period is not None else steps
        self.units_per_epoch = max(1, steps // self.period)
        self.round = 0
        # For processes this flag is in shared memory, so that it stops all ranks.
        self.stop = torch.zeros(1, dtype=torch.int64)
        self.team: WorkerThreads | None = None
        if context.kind == "threads":
            self.group.meter.name = "worker 0"
            self.group.meter.is_worker = True
            self.size = len(context.devices)
            self.team = worker_threads_at(context, self.flops_per_step())
        else:
            self.size = self.group.size
            self.stop = share_weights(self.model, self.group)
        self.buffers = BufferNames(self.model)
        self.hogwild_workers = [HogwildWorker(self.group.rank, self, self.model, self.group.meter)]
        # Replicas share the weights of the model (`refresh`); only gradients and buffers are
        # separate.
        for number in range(1, len(self.team or ())):
            own = replica(self.model, unused_copy(self.model, task, seed), self.device)
            self.hogwild_workers.append(
                HogwildWorker(number, self, own, Meter(f"worker {number}", context.trace))
            )

    def flops_per_step(self) -> float:
        return flops_per_step(self.model, self.train_examples, self.batches.batch_size)

    def stop_all(self) -> None:
        """Make every worker stop after its present step."""
        self.stop.fill_(1)

    def stopping(self) -> bool:
        """Return whether workers have to stop: a worker has failed, or the user asks for it."""
        if self.context.interrupted():
            self.stop_all()
        return bool(self.stop)

    def advance(self, control_flags: int) -> StepResult:
        """Run a round: the steps of all workers until they synchronise."""
        self._begin()
        first = self.step
        end = self.step + self.period
        if self.team is not None:
            results = self._in_threads(self.team, first, end)
        else:
            results, control_flags = self._in_processes(first, end, control_flags)
        self.round += 1
        self.step = end
        # a stopped worker has made fewer steps: the mean is over the steps that were made
        total, counted, examples = map(sum, zip(*results, strict=True))
        return StepResult(total / counted if counted else None, int(examples), control_flags)

    def _begin(self) -> None:
        """Begin a round on all ranks together; rank 0 may still be saving the weights before."""
        if self.group.rank == 0:
            self.stop.zero_()
        # No rank begins before rank 0 has cleared the flag, and no rank writes weights that rank 0
        # is still saving.
        self.group.all_gather_values([0.0], "the start of a round")
        if len(self.hogwild_workers) > 1:
            # once for all threads: the numbers that a thread draws depend on timing
            seed_generators(self.seed, "round", self.round, everything=self.train_examples.draws)
            for hog in self.hogwild_workers[1:]:
                refresh(hog.model, self.model)

    def _in_threads(self, team: WorkerThreads, first: int, end: int) -> list[HogwildSteps]:
        answers = team.each(
            lambda worker: self.hogwild_workers[worker].run(first, end), self.group.step
        )
        met = time.perf_counter()
        for hog, done in zip(self.hogwild_workers, answers, strict=True):
            hog.meter.compute("training", done.start, done.end, self.round + 1)
            hog.meter.idle("wait for the others", done.end, met, self.round + 1)
        return [done.value for done in answers]

    def _in_processes(
        self, first: int, end: int, control_flags: int
    ) -> tuple[list[HogwildSteps], int]:
        started = time.perf_counter()
        ran = self.hogwild_workers[0].run(first, end)
        ended = time.perf_counter()
        # Arrivals are sent in the time of rank 0's clock.
        told = [float(control_flags), ended + self.context.clock_offset, *map(float, ran)]
        rows = self.group.all_gather_values(told, "the end of a round")
        arrival = max(row[1] for row in rows) - self.context.clock_offset
        self.group.meter.compute("training", started, ended, self.round + 1)
        self.group.meter.communication(
            "meeting", ended, time.perf_counter(), self.round + 1, arrival=arrival
        )
        # buffers of rank 0, such as batch-norm statistics
        self.group.broadcast_values(self.buffers.of(self.model))
        return [HogwildSteps(*row[2:]) for row in rows], int(rows[0][0])

    def evaluate(self) -> dict[str, float]:
        return evaluate(
            self.task, self.model, self.test_examples, group=self.group, step=self.round
        )

    def state(self) -> dict[str, Any]:
        return {
            "round": self.round,
            "step": self.step,
            "buffers": to_cpu(non_persistent_buffers_of(self.model)),
        }

    def part(self) -> dict[str, Any]:
        """Return the optimizer states of the workers of this process, and their loss scales."""
        return {
            "optimizers": [to_cpu(hog.optimizer.state_dict()) for hog in self.hogwild_workers],
            "loss_scalings": [hog.scaling.state() for hog in self.hogwild_workers],
        }

    def restore(self, weights: Mapping[str, Tensor], state: Mapping[str, Any]) -> None:
        load_weights(self.model, weights)
        load_non_persistent_buffers(self.model, state["buffers"])
        own = state["parts"][self.group.rank]
        for hog, kept in zip(self.hogwild_workers, own["optimizers"], strict=True):
            load_optimizer(hog.optimizer, kept)
        # Checkpoints of dure up to 0.1 do not have them.
        for hog, scale in zip(self.hogwild_workers, own.get("loss_scalings", ()), strict=False):
            hog.scaling.restore(scale)
        self.round = state["round"]
        self.step = state["step"]

    def meters(self) -> Sequence[Meter]:
        return [hog.meter for hog in self.hogwild_workers]


@torch.no_grad()
def share_weights(model: nn.Module, group: Group) -> Tensor:
    """Move the model's parameters to memory that all ranks map, with the values of rank 0.

    Returns a further number in this memory, int64 of shape (1,), which begins at 0. All ranks call
    this function together. The memory is released with the last rank, even if a rank is killed.
    Raises ValueError if the ranks are on several hosts.
    """
    if group.size > 1 and len(group.hosts()) > 1:
        raise ValueError(
            "Hogwild's processes share the weights in memory: all ranks have to be on one machine"
        )
    sizes = [-(-parameter.nbytes // _LINE) * _LINE for parameter in model.parameters()]
    # The others open rank 0's file through its process: an anonymous file leaves nothing behind.
    file = os.memfd_create("dure-weights") if group.rank == 0 else -1
    own = f"/proc/{os.getpid()}/fd/{file}".encode() if group.rank == 0 else None
    path = group.broadcast_bytes(own).decode()
    if group.rank == 0:
        os.ftruncate(file, sum(sizes) + _LINE)
    # No rank maps the file before its length is set.
    group.all_gather_values([0.0], "sharing the weights")
    # shared: writes go to the common file, not to a private copy
    storage = torch.UntypedStorage.from_file(path, True, sum(sizes) + _LINE)
    # The number has a separate cache line: all workers read it after each of their steps.
    start = _LINE
    for parameter, size in zip(model.parameters(), sizes, strict=True):
        shared = _tensor_in(storage, start, parameter)
        if group.rank == 0:
            # Only rank 0 writes, and the others read after the exchange below.
            shared.copy_(parameter)
        parameter.data = shared
        start += size
    # Rank 0 closes the file after all ranks have mapped it.
    group.all_gather_values([0.0], "sharing the weights")
    if group.rank == 0:
        os.close(file)
    return _tensor_in(storage, 0, torch.zeros(1, dtype=torch.int64))


def _tensor_in(storage: Any, start: int, like: Tensor) -> Tensor:
    """Return the contiguous tensor at byte `start` of a storage, with dtype and shape of `like`."""
    empty = torch.empty(0, dtype=like.dtype)
    return empty.set_(storage, start // like.element_size(), like.shape)  # type: ignore[call-overload, no-any-return]
