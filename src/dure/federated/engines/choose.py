"""Which engine computes: a rule of the model and the round alone.

Engines differ in rounding. So neither a clock nor the number of cores has a say: the same run
chooses alike on a busy machine and on another one.

    many clients at once    where the model, its loss and its optimizer can be computed so
    by processes            where a round has `LONG_ROUND` operations, on a CPU

How many processes there are changes no bit. What does is how many clients a process computes at
once: a part of a round, whose size follows from the number of clients (`parts_of`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from importlib.util import find_spec
from typing import Literal, NamedTuple

from torch import nn

from dure.contracts.learning import asked_of
from dure.contracts.strategy import another, examples_for, seeded_model
from dure.contracts.task import Task
from dure.data.examples import Examples
from dure.federated.engines.batched import BatchedEngine, batched_engine
from dure.federated.engines.job import Engine, Job
from dure.federated.engines.loop import LoopEngine
from dure.federated.engines.noised import Noised
from dure.federated.engines.objective import Objective
from dure.federated.engines.optimizers import optimizer_of
from dure.federated.engines.processes import ProcessesEngine, forks_here
from dure.federated.engines.program import program_of
from dure.federated.engines.progress import DEADLINE
from dure.federated.engines.sgd import CannotBatchError, sgd_of
from dure.machine.cores import available_cores
from dure.machine.devices import home_of
from dure.tasks.flops import flops_per_step
from dure.tensors.flat import trained_of

LONG_ROUND = 2e9
"""Floating-point operations, some 40 ms.

What several processes gain in a shorter round is lost in messages.
"""

COMPANY = 10
"""Clients for each of more than two parts: the fewer a part has, the longer each of them takes."""

MOST_PARTS = 8
"""Parts of a round, at most."""


ONE_BY_ONE: dict[str, str] = {
    "clip_norm": "clip_norm is of the gradient of one client's step, not of many clients' at once",
    "precision": "it computes in the precision of the weights",
    "compile": "it traces the model itself, and no compiler has it",
    "unfreeze": "its steps are of all that is trained",
}
"""What a task asks of training that many clients at once cannot do, and why."""

OWN_OBJECTIVE = "the algorithm has an objective of its own, written for one client's model"


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
    so many; None is one a core. wanted: auto, or one of `NAMES`. together: whether jobs always come
    as these do, a round at a time. sums: whether updates are only summed (`batched_engine`). chunk:
    so many jobs a child at once, as the engine had whose bits are wanted again; 0 is as these jobs
    suggest. threads: of the operators of an engine alone, in steps of many clients that are long
    enough; None leaves them as they are. noised: examples are protected. objective: what clients
    minimise; None is the task's loss. deadline: seconds without a step after which a process is
    given up.
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
    noised: Noised | None = None
    objective: Objective | None = None
    deadline: float = DEADLINE


def engine_for(setting: Setting) -> Engine:
    """The engine for jobs like these; its `why` says in one line why it is this one.

    Raises ValueError if the wanted engine cannot compute the task, with the reason.
    """
    wanted = setting.wanted
    _check_name(wanted)
    way = WAYS.get(wanted)
    loop = LoopEngine(
        task=setting.task,
        model=setting.model,
        examples=setting.examples,
        batch_size=setting.batch_size,
        seed=setting.seed,
        noised=setting.noised,
        objective=setting.objective,
    )
    batched = _batched(setting) if way is None or way.batched else ""
    made = _Made(setting, loop, batched)
    if way is not None:
        return made.named(wanted, way)
    return _auto(made)


def _batched(setting: Setting) -> BatchedEngine | str:
    if setting.noised is not None:
        return "the gradients of single examples are clipped"
    if setting.objective is not None:
        return OWN_OBJECTIVE
    asked = _one_by_one(setting.task)
    if asked is not None:
        return asked
    return batched_engine(
        task=setting.task,
        model=setting.model,
        examples=setting.examples,
        batch_size=setting.batch_size,
        seed=setting.seed,
        together=setting.together,
        sums=setting.sums,
    )


def _one_by_one(task: Task) -> str | None:
    """Why the task asks for one client after another; None if it does not."""
    return next((ONE_BY_ONE[one] for one in asked_of(task) if one in ONE_BY_ONE), None)


def check_engine(task: Task, wanted: str, model: nn.Module | None = None) -> None:
    """Raises ValueError if the engine asked for by name cannot compute the task here.

    It gives the reason. What only the jobs can tell is said when they come. Cost: for `batched` a
    model, an optimizer and one step.
    """
    _check_name(wanted)
    if task.compile and wanted in WAYS and WAYS[wanted].where != "here":
        raise ValueError(
            f"the engine {wanted} computes in processes of its own, and the compiler has the model "
            f"of this one: take loop or auto"
        )
    if wanted in WAYS and WAYS[wanted].batched:
        reason = _one_by_one(task) or _reason(task, model)
        if reason is not None:
            raise _cannot(wanted, reason)


def check_objective(wanted: str) -> None:
    """Raises ValueError for an engine, asked for by name, that cannot compute an own objective."""
    if wanted in WAYS and WAYS[wanted].batched:
        raise _cannot(wanted, OWN_OBJECTIVE)


def _check_name(wanted: str) -> None:
    if wanted == "auto":
        return
    if wanted not in WAYS:
        raise ValueError(f"there is no engine {wanted!r}; choose auto or one of {', '.join(NAMES)}")
    where = WAYS[wanted].where
    if where == "processes" and not forks_here():
        raise ValueError(
            f"the engine {wanted} needs forked processes, which a GPU or this system does not "
            f"allow: take loop, batched or auto, or hide the GPU (CUDA_VISIBLE_DEVICES=)"
        )
    if where == "ray" and find_spec("ray") is None:
        raise ValueError(f'the engine {wanted} needs the extra: pip install "dure[ray]"')


def _reason(task: Task, model: nn.Module | None) -> str | None:
    """Why many clients at once cannot be computed. model: the task's, which stays as it is."""
    try:
        model = seeded_model(task, 0) if model is None else another(model, task, 0)
        task = task.on(home_of(model))
        program_of(task, model, examples_for(task)[0])
        sgd_of(optimizer_of(task, list(model.parameters())), trained_of(model))
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
        return asked if asked is not None else available_cores()

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

        if self.loop.device.type != "cpu":
            raise ValueError(
                f"the engine {inner.name}-ray computes on CPUs, and the model is on "
                f"{self.loop.device}: take loop, batched or auto"
            )
        return RayEngine(
            task=self.setting.task,
            model=self.setting.model,
            examples=self.setting.examples,
            batch_size=self.setting.batch_size,
            seed=self.setting.seed,
            batched=batched,
            cohort=inner.cohort,
            workers=self.setting.processes,
            objective=self.setting.objective,
            deadline=self.setting.deadline,
        )

    def on_processes(self, inner: Engine) -> ProcessesEngine:
        """The engine on several processes, each with one thread for its operators."""
        # The cores are the children's: an operator has one thread.
        inner.threads = None
        return ProcessesEngine(
            inner=inner,
            model=self.setting.model,
            workers=self.workers,
            chunk=self._chunk(inner),
            deadline=self.setting.deadline,
        )

    @cached_property
    def flops(self) -> float:
        """Floating-point operations of an example's step, forward and backward."""
        return flops_per_step(self.loop.model, self.setting.examples, 1)

    def _chunk(self, inner: Engine) -> int:
        """How many clients a process gets: what the engine likes and a part of a round has."""
        jobs = self.setting.jobs
        # A resumed run has that of its first part.
        if self.setting.chunk:
            return self.setting.chunk
        return max(1, min(inner.at_once(jobs[0]), -(-len(jobs) // parts_of(len(jobs)))))

    @property
    def is_long(self) -> bool:
        """Whether a round is divided over processes, if that is possible at all."""
        jobs = self.setting.jobs
        if (
            len(jobs) == 1
            or self.setting.task.compile
            or self.loop.device.type != "cpu"
            or not forks_here()
        ):
            return False
        examples = sum(_examples(job, self.setting.batch_size) for job in jobs)
        return examples * self.flops >= LONG_ROUND


def parts_of(clients: int) -> int:
    """Into how many parts a round of so many clients is divided for processes.

    An even number, so that two of them are done at the same time.
    """
    return 2 * max(1, min(clients // (2 * COMPANY), MOST_PARTS // 2))


def _auto(made: _Made) -> Engine:
    """By the rule above. It looks at no clock and no number of cores."""
    chosen: Engine = made.loop
    why = f"one client after another, for {made.batched}"
    if not isinstance(made.batched, str):
        chosen = made.batched
        why = "many clients at once, for the model, its loss and its optimizer can be computed so"
    if made.is_long:
        chosen = made.on_processes(chosen)
        why += "; by processes, for a round is long"
    else:
        chosen = made.alone(chosen)
    chosen.why = why
    return chosen


def _examples(job: Job, batch_size: int | None) -> int:
    """Examples that the job processes, but for smaller last batches."""
    return job.steps * min(batch_size or len(job.indices), len(job.indices))
