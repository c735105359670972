"""Choice of an engine, by the model and the round alone.

Engines differ in rounding. So neither a clock nor the number of cores influences the choice: the
same run chooses the same engine on a busy machine and on another machine.

    many clients at once    if the model, its loss and its optimizer can be batched
    by processes            if a round has `LONG_ROUND` operations, on a machine without a GPU

The number of processes changes no bit. The number of clients per process and message does: it is a
part of a round, whose size follows from the number of clients (`parts_of`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from importlib.util import find_spec
from typing import Literal, NamedTuple

import torch
from torch import nn

from dure.contracts.fresh_model import examples_for, seeded_model, unused_copy
from dure.contracts.task import Task
from dure.contracts.trainer import ClientTrainers
from dure.contracts.training_options import training_options_of
from dure.data.examples import Examples
from dure.federated.engines.batched import BatchedEngine, batched_engine
from dure.federated.engines.job import ClientEngine, ClientJob
from dure.federated.engines.loop import LoopEngine
from dure.federated.engines.noised import StepNoise
from dure.federated.engines.objective import Objective
from dure.federated.engines.optimizers import optimizer_of
from dure.federated.engines.processes import ProcessesEngine, forks_here
from dure.federated.engines.program import program_of
from dure.federated.engines.progress import DEADLINE
from dure.federated.engines.sgd import CannotBatchError, sgd_of
from dure.federated.engines.trainer import TrainerEngine
from dure.machine.cores import available_cores
from dure.machine.devices import device_of_model, fork_objection, is_cpu, is_type
from dure.tasks.flops import flops_per_step
from dure.tensors.flat import trainable_parameters

LONG_ROUND = 2e9
"""Floating-point operations of a round that is worth several processes, some 40 ms.

In a shorter round messages cost more than several processes gain.
"""

COMPANY = 10
"""Least number of clients per part, beyond two parts: small parts take longer per client."""

MOST_PARTS = 8
"""Largest number of parts of a round."""


ONE_BY_ONE: dict[str, str] = {
    "clip_norm": "clip_norm is of the gradient of one client's step, not of many clients' at once",
    "precision": "it computes in the precision of the weights",
    "compile": "it traces the model itself, and no compiler has it",
    "unfreeze": "its steps are of all that is trained",
}
"""Settings of a task that batched training does not support, with the reasons."""

OWN_OBJECTIVE = "the algorithm has an objective of its own, written for one client's model"


class EngineSpec(NamedTuple):
    """Specification of a named engine.

    batched: whether many clients train at once. where: the processes that train.
    """

    batched: bool
    where: Literal["here", "processes", "ray"]


ENGINE_SPECS = {
    "loop": EngineSpec(batched=False, where="here"),
    "batched": EngineSpec(batched=True, where="here"),
    "loop-processes": EngineSpec(batched=False, where="processes"),
    "batched-processes": EngineSpec(batched=True, where="processes"),
    "loop-ray": EngineSpec(batched=False, where="ray"),
    "batched-ray": EngineSpec(batched=True, where="ray"),
}
"""Engine specifications by name."""

NAMES = tuple(ENGINE_SPECS)


class EngineInputs(NamedTuple):
    """Inputs from which an engine is built.

    Args:
        task: the task of the run.
        model: a new model, which becomes the engine's.
        examples: training examples of all clients.
        batch_size: of a client's step; None is all of its data.
        seed: of the run.
        jobs: the jobs of a typical round.
        processes: number of processes; None is one per core.
        wanted: auto, or one of `NAMES`.
        together: whether jobs always come in whole rounds, as here.
        sums: whether updates are only summed (`batched_engine`).
        chunk: jobs per child and message of the earlier engine whose bits are required again; 0
            chooses by these jobs.
        threads: thread limit of an engine in this process, in long enough steps of many clients;
            None leaves the number unchanged.
        noised: example-level privacy; None without it.
        objective: the loss that clients minimise; None is the task's.
        deadline: seconds without a step after which a process counts as hung.
        device: device of the run's conditions; None is the device of the task's model.
    """

    task: Task
    model: nn.Module
    examples: Examples
    batch_size: int | None
    seed: int
    jobs: Sequence[ClientJob]
    processes: int | None = None
    wanted: str = "auto"
    together: bool = False
    sums: bool = False
    chunk: int = 0
    threads: int | None = None
    noised: StepNoise | None = None
    objective: Objective | None = None
    deadline: float = DEADLINE
    device: str | None = None


def engine_for(setting: EngineInputs) -> ClientEngine:
    """Return the engine for jobs like these; its `why` gives the reason in a line.

    Raises ValueError if the requested engine cannot compute the task, with the reason.
    """
    wanted = setting.wanted
    if setting.task.trainer is not None:
        return _trainer_engine(setting, setting.task.trainer)
    _check_name(wanted)
    way = ENGINE_SPECS.get(wanted)
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


def _trainer_engine(setting: EngineInputs, trainers: ClientTrainers) -> TrainerEngine:
    """Return the engine of a task with trainers. Raises ValueError for what only loops compute."""
    # "loop" says that clients train one after another, as they do here.
    if setting.wanted not in ("auto", "loop"):
        raise ValueError(
            f"the engine {setting.wanted} trains by a loop of dure's, but the task has a trainer: "
            "use auto"
        )
    if setting.noised is not None:
        raise ValueError(
            "dp-sgd clips the gradients of single examples, which a trainer of another library "
            "does not compute: use dure join, or user-level privacy"
        )
    if setting.objective is not None:
        raise ValueError(f"{OWN_OBJECTIVE}, and a trainer has its own loss: use dure join")
    return TrainerEngine(
        trainers, setting.model, setting.examples, setting.batch_size, setting.seed
    )


def _batched(setting: EngineInputs) -> BatchedEngine | str:
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
    """Return why the task needs training client by client; None if it does not."""
    return next((ONE_BY_ONE[one] for one in training_options_of(task) if one in ONE_BY_ONE), None)


def check_engine(task: Task, wanted: str, model: nn.Module | None = None) -> None:
    """Raise ValueError if the engine requested by name cannot compute the task here.

    The error gives the reason. Problems that only the jobs can show are reported later. Cost: for
    `batched` a model, an optimizer and a step.
    """
    _check_name(wanted)
    if task.compile and wanted in ENGINE_SPECS and ENGINE_SPECS[wanted].where != "here":
        raise ValueError(
            f"the engine {wanted} computes in its own processes, but the model is compiled in "
            "this one: use loop or auto"
        )
    if wanted in ENGINE_SPECS and ENGINE_SPECS[wanted].batched:
        reason = _one_by_one(task) or _reason(task, model)
        if reason is not None:
            raise _cannot(wanted, reason)


def check_place(wanted: str, name: str | None, device: torch.device) -> None:
    """Raise ValueError if an engine requested by name does not compute on the clients' device.

    name: the device of the run's conditions; None is the device of the task's model. device: the
    device that the run computes on.
    """
    where = ENGINE_SPECS[wanted].where if wanted in ENGINE_SPECS else "here"
    if where == "here" or is_cpu(device):
        return
    if where == "processes":
        raise ValueError(
            f"the engine {wanted} computes on the CPU, but these clients are computed on {device}: "
            "use loop, batched or auto"
        )
    if name is None:
        raise ValueError(
            f"the engine {wanted} places clients by the device of the run, but the task's model "
            f"function chooses {device}: return the model on the CPU, and give the device "
            f"{device.type}"
        )
    if not is_type(name):
        raise ValueError(
            f"the engine {wanted} leaves the choice of devices to Ray, so {name} cannot be "
            f"promised: give the device {device.type}"
        )


def check_objective(wanted: str) -> None:
    """Raise ValueError if an engine requested by name does not support a custom objective."""
    if wanted in ENGINE_SPECS and ENGINE_SPECS[wanted].batched:
        raise _cannot(wanted, OWN_OBJECTIVE)


def _check_name(wanted: str) -> None:
    if wanted == "auto":
        return
    if wanted not in ENGINE_SPECS:
        raise ValueError(f"there is no engine {wanted!r}; choose auto or one of {', '.join(NAMES)}")
    where, batched = ENGINE_SPECS[wanted].where, ENGINE_SPECS[wanted].batched
    # Batched training has backward passes of its own.
    objection = fork_objection(autograd=not batched) if where == "processes" else None
    if objection is not None:
        raise ValueError(
            f"the engine {wanted} needs forked processes, which {objection}: use loop, batched or "
            "auto, or hide the GPU (CUDA_VISIBLE_DEVICES=)"
        )
    if where == "ray" and find_spec("ray") is None:
        raise ValueError(f'the engine {wanted} needs the extra: pip install "dure[ray]"')


def _reason(task: Task, model: nn.Module | None) -> str | None:
    """Return why the model cannot be batched, or None. model: the task's, which stays unchanged."""
    try:
        model = seeded_model(task, 0) if model is None else unused_copy(model, task, 0)
        task = task.on(device_of_model(model))
        program_of(task, model, examples_for(task)[0])
        sgd_of(optimizer_of(task, list(model.parameters())), trainable_parameters(model))
    except CannotBatchError as reason:
        return str(reason)
    except Exception:
        return None  # an error of user code is reported when a client meets it
    return None


def _cannot(wanted: str, reason: str) -> ValueError:
    return ValueError(f"the engine {wanted} cannot compute this: {reason}; use loop or auto")


@dataclass
class _Made:
    """The possible engines. batched: the batched engine, or the reason why there is none."""

    setting: EngineInputs
    loop: LoopEngine
    batched: BatchedEngine | str

    @property
    def workers(self) -> int:
        """Number of processes that may compute."""
        asked = self.setting.processes
        return asked if asked is not None else available_cores()

    def named(self, name: str, way: EngineSpec) -> ClientEngine:
        inner: ClientEngine = self.loop
        if way.batched:
            if isinstance(self.batched, str):
                raise _cannot(name, self.batched)
            inner = self.batched
        check_place(name, self.setting.device, self.loop.device)
        if way.where == "ray":
            return self.on_ray(inner, way.batched)
        return self.on_processes(inner) if way.where == "processes" else self.alone(inner)

    def alone(self, engine: ClientEngine) -> ClientEngine:
        """Return the engine in this process, with all cores for its operators."""
        engine.alone(lambda: self.flops, self.setting.threads)
        return engine

    def on_ray(self, inner: ClientEngine, batched: bool) -> ClientEngine:
        """Return the engine on the machines of a Ray cluster."""
        from dure.federated.engines.on_ray import RayEngine

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

    def on_processes(self, inner: ClientEngine) -> ProcessesEngine:
        """Return the engine on several processes, each with a single thread for its operators."""
        # The cores belong to the children: an operator has a single thread.
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

    def _chunk(self, inner: ClientEngine) -> int:
        """Return the jobs per process and message: at most a cohort, or a part of a round."""
        jobs = self.setting.jobs
        # A resumed run uses the chunk of its first part.
        if self.setting.chunk:
            return self.setting.chunk
        return max(1, min(inner.at_once(jobs[0]), -(-len(jobs) // parts_of(len(jobs)))))

    @property
    def is_long(self) -> bool:
        """Whether a round is divided over processes, if possible at all."""
        jobs = self.setting.jobs
        if (
            len(jobs) == 1
            or self.setting.task.compile
            or not is_cpu(self.loop.device)
            or not forks_here()
        ):
            return False
        examples = sum(_examples(job, self.setting.batch_size) for job in jobs)
        return examples * self.flops >= LONG_ROUND


def parts_of(clients: int) -> int:
    """Return the number of parts of a round of `clients` clients for processes.

    The number is even, so that two parts finish at the same time.
    """
    return 2 * max(1, min(clients // (2 * COMPANY), MOST_PARTS // 2))


def _auto(made: _Made) -> ClientEngine:
    """Return the engine by the rule above, without a clock or the number of cores."""
    chosen: ClientEngine = made.loop
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


def _examples(job: ClientJob, batch_size: int | None) -> int:
    """Return the examples that the job processes, ignoring smaller last batches."""
    return job.steps * min(batch_size or len(job.indices), len(job.indices))
