"""Which engine computes, by a short trial on the first jobs.

Engines differ in rounding, so a repeated run has to choose alike, whatever else the machine does at
the time. Therefore a rule proposes, from the model and the round alone: many clients at once where
the model is one for it, and several processes where a round has `LONG_ROUND` operations. The trial
confirms, and overrules only what it finds `CLEARLY` slower.

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
from typing import Literal, NamedTuple

from msgspec.structs import replace
from torch import Tensor, nn

from dure.contracts.strategy import another, examples_for, seeded_model
from dure.contracts.task import Task
from dure.data.examples import Examples
from dure.errors import DureError
from dure.federated.engines.batched import BatchedEngine, batched_engine
from dure.federated.engines.job import Engine, Job
from dure.federated.engines.loop import LoopEngine
from dure.federated.engines.optimizers import optimizer_of
from dure.federated.engines.processes import ProcessesEngine, forks_here
from dure.federated.engines.products import Deferred
from dure.federated.engines.program import program_of
from dure.federated.engines.sgd import CannotBatchError, sgd_of
from dure.machine.memory import give_back
from dure.tasks.flops import flops_per_step

CLEARLY = 2.0
SECONDS = 0.06
LONG_ROUND = 2e9
"""Floating-point operations, some 40 ms.

What several processes gain in a shorter round is lost in messages.
"""


class Way(NamedTuple):
    """How an engine that has a name computes.

    batched: many clients at once, not one after another.
    """

    batched: bool
    where: Literal["here", "processes", "ray"]


WAYS = {
    "loop": Way(batched=False, where="here"),
    "batched": Way(batched=True, where="here"),
    "loop-processes": Way(batched=False, where="processes"),
    "batched-processes": Way(batched=True, where="processes"),
    "loop-ray": Way(batched=False, where="ray"),
    "batched-ray": Way(batched=True, where="ray"),
}
"""The engines by their names."""

NAMES = tuple(WAYS)


class Setting(NamedTuple):
    """What an engine is made of.

    model: a fresh one, which becomes the engine's own. jobs: those of a typical round. processes:
    at most so many; None is one a core. wanted: auto, or one of `NAMES`. together: whether jobs
    always come as these do, a round at a time. sums: whether updates are only summed
    (`batched_engine`). chunk: so many jobs a child at once, as the engine had whose bits are wanted
    again; 0 is as the first of these jobs suggests. threads: of the operators of an engine alone,
    in steps of many clients that are long enough; None leaves them as they are.
    """

    task: Task
    model: nn.Module
    examples: Examples
    batch_size: int | None
    seed: int
    jobs: Sequence[Job]
    processes: int | None = None
    wanted: str = "auto"
    together: bool = False
    sums: bool = False
    chunk: int = 0
    threads: int | None = None


def engine_for(setting: Setting) -> Engine:
    """The engine for jobs like these; its `why` says in one line why it is this one.

    Raises ValueError if the wanted engine cannot compute the task, with the reason.
    """
    wanted = setting.wanted
    _check_name(wanted)
    way = WAYS.get(wanted)
    # The loop comes first, as the other one tries the model.
    loop = LoopEngine(
        task=setting.task,
        model=setting.model,
        examples=setting.examples,
        batch_size=setting.batch_size,
        seed=setting.seed,
    )
    batched = _batched(setting) if way is None or way.batched else ""
    made = _Made(setting, loop, batched)
    if way is not None:
        return made.named(wanted, way)
    chosen = _auto(made)
    give_back()  # what the others needed
    return chosen


def _batched(setting: Setting) -> BatchedEngine | str:
    return batched_engine(
        task=setting.task,
        model=setting.model,
        examples=setting.examples,
        batch_size=setting.batch_size,
        seed=setting.seed,
        together=setting.together,
        sums=setting.sums,
    )


def check_engine(task: Task, wanted: str, model: nn.Module | None = None) -> None:
    """Raises ValueError if the engine asked for by name cannot compute the task here.

    It gives the reason. What only the jobs can tell is said when they come. Cost: for `batched` a
    model, an optimizer and one step.
    """
    _check_name(wanted)
    if wanted in WAYS and WAYS[wanted].batched:
        reason = _reason(task, model)
        if reason is not None:
            raise _cannot(wanted, reason)


def _check_name(wanted: str) -> None:
    if wanted == "auto":
        return
    if wanted not in WAYS:
        raise ValueError(f"there is no engine {wanted!r}; choose auto or one of {', '.join(NAMES)}")
    where = WAYS[wanted].where
    if where == "processes" and not forks_here():
        raise ValueError(
            f"the engine {wanted} needs forked processes, which a GPU or this system does not allow"
        )
    if where == "ray" and find_spec("ray") is None:
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

    setting: Setting
    loop: LoopEngine
    batched: BatchedEngine | str

    @property
    def workers(self) -> int:
        """Processes that may compute."""
        asked = self.setting.processes
        # The cores that this process may use, which in a container are fewer than the machine has.
        return asked if asked is not None else len(os.sched_getaffinity(0))

    def named(self, name: str, way: Way) -> Engine:
        inner: Engine = self.loop
        if way.batched:
            if isinstance(self.batched, str):
                raise _cannot(name, self.batched)
            inner = self.batched
        if way.where == "ray":
            return self.on_ray(inner, way.batched)
        return self.on_processes(inner) if way.where == "processes" else self.alone(inner)

    def alone(self, engine: Engine) -> Engine:
        """The engine in this process, whose operators have the cores to themselves."""
        engine.alone(lambda: self.flops, self.setting.threads)
        return engine

    def on_ray(self, inner: Engine, batched: bool) -> Engine:
        """The engine on the machines of a Ray cluster."""
        from dure.federated.engines.on_ray import RayEngine

        return RayEngine(
            task=self.setting.task,
            examples=self.setting.examples,
            batch_size=self.setting.batch_size,
            seed=self.setting.seed,
            batched=batched,
            cohort=inner.cohort,
            workers=self.setting.processes,
        )

    def on_processes(self, inner: Engine) -> ProcessesEngine:
        """The engine on several processes, each with one thread for its operators."""
        # The cores are the children's: an operator has one thread.
        inner.threads = None
        return ProcessesEngine(inner, self.setting.model, self.workers, self._chunk(inner))

    @cached_property
    def flops(self) -> float:
        """Floating-point operations of an example's step, forward and backward."""
        return flops_per_step(self.loop.model, self.setting.examples, 1)

    def _chunk(self, inner: Engine) -> int:
        """How many clients a worker gets: what the engine likes and a round has for each."""
        jobs = self.setting.jobs
        each = -(-len(jobs) // self.workers)
        # A chunk decides roundings, so a resumed run has that of its first part.
        return self.setting.chunk or max(1, min(inner.at_once(jobs[0]), each))

    def divided(self, inner: Engine) -> ProcessesEngine | None:
        """The engine on all cores, if that pays by the rule and is possible; None otherwise."""
        jobs = self.setting.jobs
        if self.workers == 1 or len(jobs) == 1 or self.loop.device.type != "cpu":
            return None
        examples = sum(_examples(job, self.setting.batch_size) for job in jobs)
        if examples * self.flops < LONG_ROUND or not forks_here():
            return None
        return self.on_processes(inner)


def _auto(made: _Made) -> Engine:
    jobs = made.setting.jobs
    chosen: Engine = made.loop
    # Only the loop is left: a trial would choose nothing.
    if isinstance(made.batched, str) and (made.workers == 1 or len(jobs) == 1 or not forks_here()):
        chosen.why = f"no other can: {made.batched}"
        return chosen
    try:
        rate = _rate(chosen, jobs[:2])
        if isinstance(made.batched, str):
            chosen.why = f"one client after another, for {made.batched}"
        else:
            batched = made.alone(made.batched)
            together = _rate(batched, jobs[: batched.at_once(jobs[0])])
            why = (
                f"many clients at once are {together / rate:.1f} times as fast as one after another"
            )
            # The rule proposes many at once, and a noisy clock must not change that: only a clear
            # loss does.
            if together * CLEARLY >= rate:
                chosen = batched
                rate = together
            chosen.why = why
        divided = made.divided(chosen)
        if divided is not None:
            return _confirmed(made, divided, chosen, rate)
    except DureError:  # what is wrong with a client is said when its turn comes
        chosen = made.loop
        chosen.why = "the trial failed"
    return chosen


def _confirmed(made: _Made, divided: ProcessesEngine, alone: Engine, rate: float) -> Engine:
    """Takes `divided`, if it is not clearly slower than `alone`, which has this rate."""
    try:
        gain = _rate(divided, made.setting.jobs[: divided.cohort]) / rate
    except BaseException:
        # Even Ctrl-C: children that were started for the trial must not outlive it.
        divided.close()
        raise
    said = f"{alone.why}; {divided.workers} processes are {gain:.1f} times as fast as one"
    if gain * CLEARLY >= 1:
        divided.why = said
        return divided
    divided.close()
    # `on_processes` took the engine's threads away; it gets them back.
    alone.why = said
    return made.alone(alone)


def _rate(engine: Engine, jobs: Sequence[Job]) -> float:
    """Examples a second, at best.

    The first call is not counted: in it kernels are chosen and memory is taken.
    """
    batch_size = engine.batch_size
    began = time.perf_counter()
    # One step of each: the first call warms up, the second says how long a longer trial may be.
    short = _first_steps(jobs, 1)
    _time(engine, short)
    one_step = _time(engine, short)
    best = sum(_examples(job, batch_size) for job in short) / one_step
    # Some three calls fit into SECONDS.
    steps = int(min(4, max(1, SECONDS / 3 / one_step)))
    longer = _first_steps(jobs, steps)
    examples = sum(_examples(job, batch_size) for job in longer)
    # The best of them: whatever else the machine does can only slow a call down.
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
    # The sum is what the server does with such updates, so it is part of the price.
    if isinstance(last, Deferred):
        last.products.sum([1.0] * last.products.clients)
    return time.perf_counter() - began


def _examples(job: Job, batch_size: int | None) -> int:
    """Examples that the job processes, but for smaller last batches."""
    return job.steps * min(batch_size or len(job.indices), len(job.indices))
