"""Which engine computes, by a short trial on the first jobs.

Engines differ in rounding, so a repeated run has to choose alike, whatever else the machine does at
the time. Therefore a rule proposes, from the model and the round alone: many clients at once where
the model is one for it; several processes where a round has `LONG_ROUND` operations, or threads
where each step of so many clients has `LONG_STEP`. The trial confirms, and overrules only what it
finds `CLEARLY` slower.

A trial takes the first steps of the first clients, for `SECONDS` an engine or as long as two steps
take. Its results are thrown away: a run is to have the bits of one engine.
"""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from importlib.util import find_spec
from typing import Any, NamedTuple

from msgspec.structs import replace
from torch import Tensor, nn

from dure.contracts.strategy import another, examples_for, seeded_model
from dure.contracts.task import Task
from dure.data.examples import Examples
from dure.errors import DureError
from dure.federated.engines.batched import BatchedEngine, batched_engine
from dure.federated.engines.divided import DividedEngine
from dure.federated.engines.job import Engine, Job
from dure.federated.engines.loop import LoopEngine
from dure.federated.engines.optimizers import optimizer_of
from dure.federated.engines.processes import ProcessesEngine, forks_here
from dure.federated.engines.products import Deferred
from dure.federated.engines.program import program_of
from dure.federated.engines.sgd import CannotBatchError, sgd_of
from dure.federated.engines.threads import ThreadsEngine
from dure.machine.memory import give_back
from dure.machine.threads import flops_per_step

CLEARLY = 2.0
SECONDS = 0.06
LONG_ROUND = 2e9
"""Floating-point operations, some 40 ms; what several processes gain in a shorter round is lost in
messages."""

LONG_STEP = 2e8
"""Floating-point operations of a step, forward and backward, of all clients that one worker has at
once, a millisecond or two; in shorter steps threads wait for Python's lock."""

NAMES = (
    "loop",
    "batched",
    "loop-processes",
    "batched-processes",
    "batched-threads",
    "loop-ray",
    "batched-ray",
)


class Setting(NamedTuple):
    """What an engine is made of: the arguments of `engine_for`."""

    task: Task
    model: nn.Module
    examples: Examples
    batch_size: int | None
    seed: int
    jobs: Sequence[Job]
    processes: int | None
    wanted: str
    together: bool
    sums: bool = False
    chunk: int = 0
    threads: int | None = None


def engine_for(
    task: Task,
    model: nn.Module,
    examples: Examples,
    batch_size: int | None,
    seed: int,
    jobs: Sequence[Job],
    processes: int | None = None,
    wanted: str = "auto",
    together: bool = False,
    sums: bool = False,
    chunk: int = 0,
    threads: int | None = None,
) -> Engine:
    """The engine for jobs like these, those of a typical round; its `why` says in one line why it
    is this one.

    model: a fresh one, which becomes the engine's own. processes: at most so many; None is one a
    core. wanted: auto, or one of `NAMES`. together: whether jobs always come as these do, a round
    at a time; sums: whether updates are only summed (`batched_engine`). chunk: so many jobs a child
    at once, as the engine had whose bits are wanted again; 0 is as the first of these jobs
    suggests. threads: of the operators of an engine alone, in steps of many clients that are long
    enough; None leaves them as they are.

    Raises ValueError if the wanted engine cannot compute the task, with the reason.
    """
    _check_name(wanted)
    workers = processes if processes is not None else len(os.sched_getaffinity(0))
    loop = LoopEngine(
        task, model, examples, batch_size, seed
    )  # first, as the other one tries the model
    asked_for_loop = wanted.startswith("loop")
    batched = (
        ""
        if asked_for_loop
        else batched_engine(task, model, examples, batch_size, seed, together, sums)
    )
    made = _Made(loop, batched, model, jobs, workers, processes, chunk, threads)
    if wanted != "auto":
        return made.wanted(wanted)
    chosen = _auto(made)
    give_back()  # what the others needed
    return chosen


def check_engine(task: Task, wanted: str, model: nn.Module | None = None) -> None:
    """Raises ValueError, with the reason, if the engine that is asked for by name cannot compute
    the task here. What only the jobs can tell is said when they come. Cost: for `batched` a model,
    an optimizer and one step."""
    _check_name(wanted)
    if wanted.startswith("batched"):
        reason = _reason(task, model)
        if reason is not None:
            raise _cannot(wanted, reason)


def _check_name(wanted: str) -> None:
    if wanted not in ("auto", *NAMES):
        raise ValueError(f"there is no engine {wanted!r}; choose auto or one of {', '.join(NAMES)}")
    if wanted.endswith("processes") and not forks_here():
        raise ValueError(
            f"the engine {wanted} needs forked processes, which a GPU or this system does not allow"
        )
    if wanted.endswith("ray") and find_spec("ray") is None:
        raise ValueError(f'the engine {wanted} needs the extra: pip install "dure[ray]"')


def _reason(task: Task, model: nn.Module | None) -> str | None:
    """Why many clients at once cannot be computed. model: the task's, which stays as it is."""
    try:
        model = seeded_model(task, 0) if model is None else another(model, task, 0)
        parameters = list(model.parameters())
        program_of(task, model, examples_for(model, task)[0])
        sgd_of(optimizer_of(task, parameters), parameters)
    except CannotBatchError as reason:
        return str(reason)
    except Exception:
        return None  # an error of the user's own code is said when a client meets it
    return None


def _cannot(wanted: str, reason: str) -> ValueError:
    return ValueError(f"the engine {wanted} cannot compute this: {reason}; take loop or auto")


@dataclass
class _Made:
    """The engines that there can be. batched: the engine, or why there is none."""

    loop: LoopEngine
    batched: BatchedEngine | str
    model: nn.Module
    jobs: Sequence[Job]
    workers: int
    asked: int | None
    chunk: int
    threads: int | None

    def wanted(self, name: str) -> Engine:
        inner: LoopEngine | BatchedEngine = self.loop
        if name.startswith("batched"):
            if isinstance(self.batched, str):
                raise _cannot(name, self.batched)
            inner = self.batched
        if name.endswith("ray"):
            return self.on_ray(inner)
        if name.endswith("threads"):
            assert isinstance(inner, BatchedEngine)
            return self.on_threads(inner)
        return self.on_processes(inner) if name.endswith("processes") else self.alone(inner)

    def alone(self, engine: LoopEngine | BatchedEngine) -> LoopEngine | BatchedEngine:
        """In this process and thread: the operators' threads have the cores to themselves. Where
        jobs come now with these and then with those, a step has no threads of its own, for they
        could change its bits."""
        if isinstance(engine, BatchedEngine) and engine.together and engine.device.type == "cpu":
            engine.flops, engine.threads = self.flops, self.threads
        return engine

    def on_ray(self, inner: LoopEngine | BatchedEngine) -> Engine:
        """On the machines of a Ray cluster."""
        from dure.federated.engines.on_ray import RayEngine

        one, batched = self.loop, isinstance(inner, BatchedEngine)
        cohort = inner.cohort if isinstance(inner, BatchedEngine) else 1
        return RayEngine(
            one.task, one.examples, one.batch_size, one.seed, batched, cohort, self.asked
        )

    def on_processes(self, inner: LoopEngine | BatchedEngine) -> ProcessesEngine:
        """On several processes."""
        _one_thread(inner)
        return ProcessesEngine(inner, self.model, self.workers, self._chunk(inner))

    def on_threads(self, inner: BatchedEngine) -> ThreadsEngine:
        """On several threads, each with an engine like this one."""
        _one_thread(inner)
        return ThreadsEngine(
            [inner, *(self._another(inner) for _ in range(self.workers - 1))], self._chunk(inner)
        )

    @cached_property
    def flops(self) -> float:
        """Floating-point operations of an example's step, forward and backward."""
        return flops_per_step(self.loop.model, self.loop.examples, 1)

    def _another(self, one: BatchedEngine) -> BatchedEngine:
        setting = (one.batch_size, one.seed, one.together, one.sums)
        made = batched_engine(self.loop.task, self.model, self.loop.examples, *setting)
        assert isinstance(made, BatchedEngine)
        return made

    def _chunk(self, inner: LoopEngine | BatchedEngine) -> int:
        """As many clients a worker at once as the engine likes and a round has for each."""
        if self.chunk or not isinstance(inner, BatchedEngine):
            return self.chunk or 1
        return max(1, min(inner.at_once(self.jobs[0]), -(-len(self.jobs) // self.workers)))

    def divided(self, inner: LoopEngine | BatchedEngine) -> DividedEngine[Any] | None:
        """On the cores, if that pays by the rule and is possible."""
        if self.workers == 1 or len(self.jobs) == 1 or self.loop.device.type != "cpu":
            return None
        batch = self.loop.batch_size
        if sum(_examples(job, batch) for job in self.jobs) * self.flops < LONG_ROUND:
            return None
        job = self.jobs[0]
        of_a_step = (
            self.flops * min(batch or len(job.indices), len(job.indices)) * self._chunk(inner)
        )
        if isinstance(inner, BatchedEngine) and of_a_step >= LONG_STEP:
            return self.on_threads(inner)
        return self.on_processes(inner) if forks_here() else None


def _one_thread(engine: LoopEngine | BatchedEngine) -> None:
    """For the operators of each worker."""
    if isinstance(engine, BatchedEngine):
        engine.threads = None


def _auto(made: _Made) -> Engine:
    chosen: LoopEngine | BatchedEngine = made.loop
    if isinstance(made.batched, str) and (
        made.workers == 1 or len(made.jobs) == 1 or not forks_here()
    ):
        chosen.why = f"no other can: {made.batched}"
        return chosen
    try:
        rate = _rate(chosen, made.jobs[:2])
        if isinstance(made.batched, str):
            chosen.why = f"one client after another, for {made.batched}"
        else:
            together = _rate(
                made.alone(made.batched), made.jobs[: made.batched.at_once(made.jobs[0])]
            )
            why = (
                f"many clients at once are {together / rate:.1f} times as fast as one after another"
            )
            if together * CLEARLY >= rate:
                chosen, rate = made.batched, together
            chosen.why = why
        divided = made.divided(chosen)
        if divided is not None:
            return _confirmed(made, divided, chosen, rate)
    except DureError:  # what is wrong with a client is said when its turn comes
        chosen = made.loop
        chosen.why = "the trial failed"
    return chosen


def _confirmed(
    made: _Made, divided: DividedEngine[Any], alone: LoopEngine | BatchedEngine, rate: float
) -> Engine:
    """divided, if it is not clearly slower than `alone`, which has this rate."""
    try:
        gain = _rate(divided, made.jobs[: divided.cohort]) / rate
    except BaseException:
        divided.close()
        raise
    workers = f"{divided.workers} {divided.name.rpartition('-')[2]}"
    said = f"{alone.why}; {workers} are {gain:.1f} times as fast as one"
    if gain * CLEARLY >= 1:
        divided.why = said
        return divided
    divided.close()
    alone.why = said
    return made.alone(alone)


def _rate(engine: Engine, jobs: Sequence[Job]) -> float:
    """Examples a second, at best; the first call is not counted, for it brings kernels and memory
    into being."""
    batch_size = getattr(engine, "batch_size", None)
    began = time.perf_counter()
    short = _first_steps(jobs, 1)
    _time(engine, short)
    one_step = _time(engine, short)
    best = sum(_examples(job, batch_size) for job in short) / one_step
    steps = int(min(4, max(1, SECONDS / 3 / one_step)))
    longer = _first_steps(jobs, steps)
    examples = sum(_examples(job, batch_size) for job in longer)
    for _ in range(8):
        if time.perf_counter() - began > SECONDS:
            break
        best = max(best, examples / _time(engine, longer))
    return best


def _first_steps(jobs: Sequence[Job], steps: int) -> list[Job]:
    return [replace(job, steps=min(steps, job.steps)) for job in jobs]


def _time(engine: Engine, jobs: Sequence[Job]) -> float:
    began = time.perf_counter()
    last: Sequence[Tensor] = ()
    for trained in engine.train(jobs):
        last = trained.delta
    if isinstance(last, Deferred):
        last.products.sum([1.0] * last.products.clients)
    return time.perf_counter() - began


def _examples(job: Job, batch_size: int | None) -> int:
    """Examples that the job processes, but for smaller last batches."""
    return job.steps * min(batch_size or len(job.indices), len(job.indices))
