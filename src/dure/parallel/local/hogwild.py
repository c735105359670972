"""Hogwild: workers update the same weights, without locks and without waiting for each other.

Every worker, again and again, takes the next batch that is its own, computes the gradient g of its
mean loss at the weights as they are, which others may change meanwhile, and makes its step: w <- w
- lr · g for SGD, number by number into the shared memory. Updates may get lost, and gradients may
belong to weights that never were together. Where gradients are sparse that is rare; otherwise it
acts like a little noise.

    round:  steps s_0 … s_0 + period - 1; worker i of N makes the steps s_0 + i, s_0 + i + N, …;
    then all meet

Only where a run is evaluated, saved or ended do the workers meet, so a run counts rounds. What the
optimizer remembers, such as momentum, is each worker's own. The buffers of worker 0 are those that
stay.

Nothing is sent between threads. Between processes the weights lie in memory that all of them map,
and nothing but buffers is sent. With one worker this is SGD, to the last bit; with several no run
repeats another, since who is first is the machine's affair: the config of a run says
"deterministic": false.

Source: Recht, Ré, Wright, Niu 2011, "Hogwild!: A Lock-Free Approach to Parallelizing Stochastic
Gradient Descent".
"""

from __future__ import annotations

import math
import operator
import os
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor, nn

from dure.collectives.group import Group
from dure.contracts.learning import ALL, Part
from dure.contracts.lr_schedule import Rates
from dure.contracts.strategy import (
    Kind,
    Learner,
    Place,
    Progress,
    Strategy,
    World,
    another,
)
from dure.contracts.task import Task
from dure.data.batches import Batches, check_batch_size
from dure.errors import DureError, LossNotFiniteError, WorkerFailedError, described, traceback_of
from dure.machine.devices import to_cpu, to_device
from dure.parallel.local.replicas import COMPILES_ALONE, refresh, replica
from dure.parallel.local.single import SingleLearner
from dure.parallel.local.team import Team, team_at
from dure.randomness.seeds import seed_generators
from dure.record.meter import Meter
from dure.tasks.batch_norm import check_pieces
from dure.tasks.evaluation import evaluate
from dure.tasks.flops import flops_per_step
from dure.tasks.pieces import check_accumulate, learn
from dure.tasks.trimming import Trimming
from dure.tensors.buffers import Buffers, load_passing_buffers, load_weights, passing_buffers
from dure.tensors.optimizer_state import load_optimizer

_LINE = 64
"""Bytes of a cache line: no two tensors share one."""


@dataclass(frozen=True)
class Hogwild(Strategy):
    """Workers update the same weights without locks.

    Args:
        batch_size: examples of a worker's step; None is all the data in every step.
        period: steps, of all workers together, until they meet to be evaluated or saved; None is an
            epoch.
        accumulate: pieces in which a worker computes a batch, one after another.
    """

    batch_size: int | None = 64
    period: int | None = None
    accumulate: int = 1

    name: ClassVar[str] = "hogwild"
    kind: ClassVar[Kind] = "threads"
    also: ClassVar[Mapping[Kind, str]] = {"ranks": "Hogwild in processes"}
    unit: ClassVar[str] = "round"
    trains_with: ClassVar[frozenset[Part]] = ALL

    @property
    def deterministic(self) -> bool:
        return False

    @property
    def label(self) -> str:
        return "Hogwild"

    def check(self, task: Task, workers: int | None) -> None:
        check_batch_size(self.batch_size)
        check_accumulate(self.accumulate)
        if self.period is not None and self.period < 1:
            raise ValueError(f"period is {self.period}, but workers meet after at least one step")

    def check_model(self, task: Task, model: nn.Module, workers: int | None) -> None:
        """Raises ValueError for batches that the model cannot train on."""
        check_pieces(task, model, self.batch_size, 1, self.accumulate)

    def cannot(self, part: Part, kind: Kind) -> str | None:
        if part == "compile" and kind == "threads":
            return COMPILES_ALONE
        if part == "ema" and kind == "ranks":
            return (
                "its processes have the weights in one memory, and each would put its average "
                "there: take threads"
            )
        return super().cannot(part, kind)

    def check_in(self, world: World) -> None:
        """Raises ValueError for several devices."""
        if len(set(world.computes_on)) > 1:
            raise ValueError(
                "Hogwild's workers share the weights, so they compute on one device: name only one"
            )

    def learner(self, task: Task, place: Place, seed: int) -> Learner:
        return HogwildLearner(task, place, seed, self)


class Ran(NamedTuple):
    """What steps have computed. total: the loss of each step times what it counts."""

    total: float
    counted: float
    examples: float


class Hog:
    """A worker: a model that uses the shared weights, and an optimizer of its own.

    number: its own among all workers.
    """

    def __init__(
        self, number: int, learner: HogwildLearner, model: nn.Module, meter: Meter
    ) -> None:
        self.number = number
        self.learner = learner
        self.model = model
        self.meter = meter
        # Worker 0 of this process works on the model itself, with the learner's optimizer; so a
        # single worker is plain SGD.
        if model is learner.model:
            self.optimizer = learner.optimizer
        else:
            self.optimizer = learner.task.optimizer(model.parameters())
        self.rates = Rates(self.optimizer, learner.task.lr_schedule)
        self.trimming = Trimming(learner.task, model.named_parameters())
        self.batches = Batches(
            len(learner.train_examples),
            learner.strategy.batch_size,
            learner.seed,
            order=learner.train_examples.order(),
        )

    def run(self, first: int, end: int) -> Ran:
        """Makes its own among the steps first … end-1."""
        ran = Ran(0.0, 0.0, 0)
        # Steps are dealt out in turn, so that two workers never take one batch.
        for step in range(first + self.number, end, self.learner.size):
            try:
                made = self._step(step)
            except BaseException as error:
                # The others would go on to the end of the round, for nothing.
                self.learner.stop_all()
                if isinstance(error, (DureError, KeyboardInterrupt)):
                    raise
                raise WorkerFailedError(
                    self.meter.name, f"step {step + 1}", described(error), traceback_of(error)
                ) from error
            ran = Ran(*map(operator.add, ran, made))
            if self.learner.stopping():
                break
        return ran

    def _step(self, step: int) -> Ran:
        learner = self.learner
        indices = self.batches.at(step)
        if len(learner.hogs) == 1:
            # Threads share the generators: only a worker alone in its process can seed them.
            draws = learner.train_examples.draws
            seed_generators(learner.seed, "step", step, learner.group.rank, everything=draws)
        self.optimizer.zero_grad(set_to_none=True)
        value, counted = learn(
            learner.losses,
            indices,
            learner.strategy.accumulate,
            read=self._read,
            forward=self.model,
            computing=lambda *given: learner.computing(),
            backward=Tensor.backward,
            parameters=self.model.parameters(),
        )
        if not math.isfinite(value):
            raise LossNotFiniteError(value, self.meter.name, f"step {step + 1}", intact=False)
        self.trimming.at(step)
        self.rates.at(step)
        self.optimizer.step()
        return Ran(value * counted, counted, len(indices))

    def _read(self, indices: Tensor) -> tuple[Any, Any]:
        learner = self.learner
        batch: tuple[Any, Any] = to_device(learner.train_examples.batch(indices), learner.device)
        return batch


class HogwildLearner(SingleLearner):
    """The workers that live here: all of them in threads, one in a process."""

    unit = "round"
    parted = True

    def __init__(self, task: Task, place: Place, seed: int, strategy: Hogwild) -> None:
        super().__init__(task, place, seed, strategy.batch_size)
        self.strategy = strategy
        self.place = place
        steps = self.batches.steps_per_epoch
        self.period = strategy.period if strategy.period is not None else steps
        self.units_per_epoch = max(1, steps // self.period)
        self.round = 0
        # In processes a number in shared memory, which all ranks see: one flag stops all of them.
        self.stop = torch.zeros(1, dtype=torch.int64)
        self.team: Team | None = None
        if place.kind == "threads":
            self.group.meter.name = "worker 0"
            self.group.meter.is_worker = True
            self.size = len(place.devices)
            self.team = team_at(place, self.flops_per_step())
        else:
            self.size = self.group.size
            self.stop = share_weights(self.model, self.group)
        self.buffers = Buffers(self.model)
        self.hogs = [Hog(self.group.rank, self, self.model, self.group.meter)]
        # Replicas use the weights of the model where they are (`refresh`); only gradients and
        # buffers are theirs.
        for number in range(1, len(self.team or ())):
            own = replica(self.model, another(self.model, task, seed), self.device)
            self.hogs.append(Hog(number, self, own, Meter(f"worker {number}", place.trace)))

    def flops_per_step(self) -> float:
        return flops_per_step(self.model, self.train_examples, self.batches.batch_size)

    def stop_all(self) -> None:
        """Has every worker stop after its step."""
        self.stop.fill_(1)

    def stopping(self) -> bool:
        """Whether the workers are to stop: one of them has failed, or the user has asked for it."""
        if self.place.interrupted():
            self.stop_all()
        return bool(self.stop)

    def advance(self, wish: int) -> Progress:
        """One round: the steps of all workers until they meet."""
        self._begin()
        first = self.step
        end = self.step + self.period
        if self.team is not None:
            results = self._in_threads(self.team, first, end)
        else:
            results, wish = self._in_processes(first, end, wish)
        self.round += 1
        self.step = end
        # a worker that was stopped has made fewer steps: the mean is over what was computed
        total, counted, examples = map(sum, zip(*results, strict=True))
        return Progress(total / counted if counted else None, int(examples), wish)

    def _begin(self) -> None:
        """All begin together: rank 0 may still have been saving the weights."""
        if self.group.rank == 0:
            self.stop.zero_()
        # Nobody begins before rank 0 has put the flag back, and nobody writes weights that it still
        # saves.
        self.group.all_gather_values([0.0], "the start of a round")
        if len(self.hogs) > 1:
            # once for all threads: what each of them draws depends on who is first
            seed_generators(self.seed, "round", self.round, everything=self.train_examples.draws)
            for hog in self.hogs[1:]:
                refresh(hog.model, self.model)

    def _in_threads(self, team: Team, first: int, end: int) -> list[Ran]:
        answers = team.each(lambda worker: self.hogs[worker].run(first, end), self.group.step)
        met = time.perf_counter()
        for hog, done in zip(self.hogs, answers, strict=True):
            hog.meter.compute("training", done.start, done.end, self.round + 1)
            hog.meter.idle("wait for the others", done.end, met, self.round + 1)
        return [done.value for done in answers]

    def _in_processes(self, first: int, end: int, wish: int) -> tuple[list[Ran], int]:
        started = time.perf_counter()
        ran = self.hogs[0].run(first, end)
        ended = time.perf_counter()
        # Clocks differ between hosts; arrivals are told in rank 0's time.
        told = [float(wish), ended + self.place.clock_offset, *map(float, ran)]
        rows = self.group.all_gather_values(told, "the end of a round")
        arrival = max(row[1] for row in rows) - self.place.clock_offset
        self.group.meter.compute("training", started, ended, self.round + 1)
        self.group.meter.communication(
            "meeting", ended, time.perf_counter(), self.round + 1, arrival=arrival
        )
        # rank 0's, such as batch-norm statistics
        self.group.broadcast_values(self.buffers.of(self.model))
        return [Ran(*row[2:]) for row in rows], int(rows[0][0])

    def evaluate(self) -> dict[str, float]:
        return evaluate(
            self.task, self.model, self.test_examples, group=self.group, step=self.round
        )

    def state(self) -> dict[str, Any]:
        return {
            "round": self.round,
            "step": self.step,
            "buffers": to_cpu(passing_buffers(self.model)),
        }

    def part(self) -> dict[str, Any]:
        """The optimizers of the workers that live here."""
        return {"optimizers": [to_cpu(hog.optimizer.state_dict()) for hog in self.hogs]}

    def restore(self, weights: Mapping[str, Tensor], state: Mapping[str, Any]) -> None:
        load_weights(self.model, weights)
        load_passing_buffers(self.model, state["buffers"])
        for hog, kept in zip(self.hogs, state["parts"][self.group.rank]["optimizers"], strict=True):
            load_optimizer(hog.optimizer, kept)
        self.round = state["round"]
        self.step = state["step"]

    def meters(self) -> Sequence[Meter]:
        return [hog.meter for hog in self.hogs]


@torch.no_grad()
def share_weights(model: nn.Module, group: Group) -> Tensor:
    """Moves the model's parameters into memory that all ranks map; they have rank 0's values.

    Returns one more number there, int64 of shape (1,), which begins at 0. All ranks call it
    together. The memory is gone with the last rank, however they end. Raises ValueError if the
    ranks do not share a host.
    """
    if group.size > 1 and len(group.hosts()) > 1:
        raise ValueError(
            "Hogwild's processes share the weights in memory: all ranks have to be on one machine"
        )
    sizes = [-(-parameter.nbytes // _LINE) * _LINE for parameter in model.parameters()]
    # The others open rank 0's file by its process; it has no name that could be left behind.
    file = os.memfd_create("dure-weights") if group.rank == 0 else -1
    own = f"/proc/{os.getpid()}/fd/{file}".encode() if group.rank == 0 else None
    path = group.broadcast_bytes(own).decode()
    if group.rank == 0:
        os.ftruncate(file, sum(sizes) + _LINE)
    # Nobody maps the file before it has its length.
    group.all_gather_values([0.0], "sharing the weights")
    # shared: writes go to the file that all map, not to a private copy
    storage = torch.UntypedStorage.from_file(path, True, sum(sizes) + _LINE)
    # The number has the first line to itself: all workers read it after each of their steps.
    start = _LINE
    for parameter, size in zip(model.parameters(), sizes, strict=True):
        shared = _tensor_in(storage, start, parameter)
        if group.rank == 0:
            # Only rank 0 writes, and the others see it when all have met below.
            shared.copy_(parameter)
        parameter.data = shared
        start += size
    # Rank 0 closes the file when all have mapped it.
    group.all_gather_values([0.0], "sharing the weights")
    if group.rank == 0:
        os.close(file)
    return _tensor_in(storage, 0, torch.zeros(1, dtype=torch.int64))


def _tensor_in(storage: Any, start: int, like: Tensor) -> Tensor:
    """The contiguous tensor at `start` of a storage, of the dtype and shape of `like`."""
    empty = torch.empty(0, dtype=like.dtype)
    return empty.set_(storage, start // like.element_size(), like.shape)  # type: ignore[call-overload, no-any-return]
