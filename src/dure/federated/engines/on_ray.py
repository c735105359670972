"""Engine on a Ray cluster: any engine, in actors on the cluster's machines.

Each actor gets the task and the examples once. A round's weights are put into Ray's object store
once, and reach each machine once; jobs travel in chunks, and results return in the jobs' order. The
results depend on the chunks alone: with `loop` the bits equal the bits of a single process with a
single thread.

On a GPU each actor computes on the device that Ray assigns to it, or its share of one. Weights and
updates travel in the CPU's memory.

If Ray runs already (`ray.init`, or RAY_ADDRESS in the environment), the engine uses that cluster.
Otherwise it starts Ray on this machine, and stops Ray at the end. The engine needs the extra `ray`.

While the engine waits for an actor, it asks for the actor's progress, which a thread of its own
answers; an actor that makes no step for the deadline, or does not answer, counts as hung
(`progress`).
"""

from __future__ import annotations

import math
import sys
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from itertools import chain, islice
from typing import Any

import cloudpickle
import torch
from msgspec.structs import replace
from torch import Tensor, nn

from dure.contracts.fresh_model import seeded_model
from dure.contracts.task import Task
from dure.data.examples import Examples
from dure.errors import DureError, WorkerFailedError
from dure.federated.engines.batched import batched_engine
from dure.federated.engines.job import ClientEngine, ClientJob, JobResult, Reference
from dure.federated.engines.loop import LoopEngine
from dure.federated.engines.objective import Objective
from dure.federated.engines.progress import DEADLINE, ProcessProgress, hang_reason, work_of
from dure.machine import user_code
from dure.machine.devices import (
    CPU,
    device_count,
    device_of,
    device_of_model,
    is_cpu,
    ray_resource,
    set_current,
    to_cpu,
    to_device,
)
from dure.machine.global_settings import settings_here
from dure.machine.stall_timeout import StallTimeout
from dure.machine.user_code import user_modules_of
from dure.tensors.frozen import frozen_of, load_frozen

CHUNKS_AHEAD = 2
"""Chunks queued for each actor, so that it is never idle."""


class Actor:
    """Actor on a machine of the cluster.

    kind: type of the device that Ray assigns, or "cpu". number: of the actor, which chooses a
    device if the actor sees several.
    """

    def __init__(self, path: list[str], packed: bytes, kind: str, number: int) -> None:
        # A single thread, because Ray has reserved a single CPU, and for equal bits.
        torch.set_num_threads(1)
        # Paths of the task's modules.
        sys.path.extend(entry for entry in path if entry not in sys.path)
        _, settings, setting = cloudpickle.loads(packed)
        settings.apply()
        task, examples, batch_size, seed, batched, frozen, objective = setting
        seen = max(1, device_count(kind))
        self.device = device_of(kind if kind == CPU.type else f"{kind}:{number % seen}")
        set_current(self.device)
        task = task.on(self.device)
        model = seeded_model(task, seed).to(self.device)
        # Initial weights that a machine draws or reads might differ from another machine's, and
        # jobs carry the trained weights alone.
        load_frozen(model, frozen)
        make: Any = batched_engine if batched else partial(LoopEngine, objective=objective)
        self.engine = make(
            task=task,
            model=model,
            examples=examples,
            batch_size=batch_size,
            seed=seed,
        )
        self.progress = ProcessProgress()
        self.engine.look = self.progress.step

    def came(self) -> tuple[int, ...]:
        """Return the actor's progress; answered during training."""
        return self.progress.now()

    def train(
        self, jobs: Sequence[tuple[ClientJob, list[int | None]]], *sets: list[Any]
    ) -> list[Any]:
        """Return the results of the jobs, or a list with the error that ended them.

        jobs: without their tensors, which are in `sets`.
        """
        tensors = [to_device(list(map(torch.from_numpy, one)), self.device) for one in sets]

        def whole(job: ClientJob, places: list[int | None]) -> ClientJob:
            given: dict[str, Any] = {
                name: tensors[at] for name, at in zip(_SENT, places, strict=False) if at is not None
            }
            # The sets of references follow: weights and buffers of each.
            rest = iter([tensors[at] for at in places[len(_SENT) :] if at is not None])
            return replace(job, **given, references=list(map(Reference, rest, rest)))

        try:
            results = self.engine.train([whole(*one) for one in jobs])
            return [_moved(one, CPU) if not is_cpu(self.device) else one for one in results]
        except DureError as error:
            return [error]


def _moved(result: JobResult, device: torch.device) -> JobResult:
    """Return a result whose tensors are on a device; an update that is not formed yet is formed."""
    delta, buffers = to_device((list(result.delta), list(result.buffers)), device)
    return replace(result, delta=delta, buffers=buffers)


_ASIDE = "aside"
"""Concurrency group of the calls that an actor answers during training."""

_SENT = ("weights", "buffers", "anchor", "correction")
"""Fields of a job that are put into the object store."""


class RayEngine(ClientEngine):
    """Engine that passes jobs to actors on a Ray cluster.

    Args:
        task: the task of the run.
        model: like the jobs' model; actors get its frozen parameters, and compute on devices of the
            type of its device.
        examples: training examples of all clients.
        batch_size: of a client's step; None is all of its data.
        seed: of the run.
        batched: whether actors have the batched engine.
        cohort: number of jobs per actor and message.
        workers: number of actors; None is one per core of the cluster, or per device of it.
        objective: the loss that clients minimise; None is the task's.
        deadline: seconds without a step after which an actor counts as hung.

    Raises:
        ImportError: Ray is not installed.
        ValueError: the cluster has no device of that type.
    """

    def __init__(
        self,
        task: Task,
        model: nn.Module,
        examples: Examples,
        batch_size: int | None,
        seed: int,
        batched: bool,
        cohort: int,
        workers: int | None,
        objective: Objective | None = None,
        deadline: float = DEADLINE,
    ) -> None:
        self.name = "batched-ray" if batched else "loop-ray"
        self.batch_size = batch_size
        self.deadline = deadline
        self.ray = _ray()
        # An existing cluster belongs to the user: it is used, and left running.
        self._started = not self.ray.is_initialized()
        if self._started:
            self.ray.init(include_dashboard=False, log_to_driver=False, logging_level="error")
        self.home = device_of_model(model)
        needs, places = self._needs(self.home.type)
        if not places:
            self.actors = []
            self.close()
            raise ValueError(
                f"the Ray cluster has no {ray_resource(self.home.type)}, so clients cannot be "
                f"computed on {self.home.type}: use another device"
            )
        count = workers if workers is not None else places
        # In the CPU's memory: actors may have other devices.
        frozen = to_cpu(frozen_of(model))
        setting = (task.on(CPU), examples, batch_size, seed, batched, frozen, objective)
        settings = settings_here().of_computing()
        # On this machine the actors import the task's file in place; other machines may not have
        # the file.
        if self._is_here() and task.reference is not None:
            content = user_code.dumps((user_modules_of(task.reference["name"]), settings, setting))
        else:
            content = cloudpickle.dumps((None, settings, setting))
        packed = self.ray.put(content)
        # A concurrency group of its own: it answers while the actor trains.
        actor = self.ray.remote(concurrency_groups={_ASIDE: 1}, **needs(count))(Actor)
        self.actors = [
            actor.remote(list(sys.path), packed, self.home.type, number) for number in range(count)
        ]
        # Actors may wait for a place in the cluster, and import torch.
        self._ready = {actor: actor.__ray_ready__.remote() for actor in self.actors}
        self.chunk = max(1, cohort)
        self.cohort = count * self.chunk

    def _needs(self, kind: str) -> tuple[Callable[[int], dict[str, Any]], int]:
        """Return the resources of each of so many actors, and the number of places for actors."""
        there = self.ray.cluster_resources()
        if kind == CPU.type:
            return lambda count: {"num_cpus": 1}, max(1, int(there.get("CPU", 1)))
        resource = ray_resource(kind)
        devices = int(there.get(resource, 0))

        def needs(count: int) -> dict[str, Any]:
            # Equal shares, each of one device, rounded down to Ray's precision.
            share = math.floor(1e4 / -(-count // devices)) / 1e4
            given = {"num_gpus": share} if resource == "GPU" else {"resources": {resource: share}}
            return {"num_cpus": 1, **given}

        return needs, devices

    def _is_here(self) -> bool:
        """Return whether the cluster is this machine alone."""
        there = {node["NodeManagerAddress"] for node in self.ray.nodes() if node["Alive"]}
        return there == {self.ray.util.get_node_ip_address()}

    def train(self, jobs: Iterable[ClientJob]) -> Iterator[JobResult]:
        """Yield the results in the jobs' order.

        Raises the exception of a client, and WorkerFailedError for an actor that died, or made no
        step for the deadline.
        """
        pending: deque[tuple[list[ClientJob], Any, Any]] = deque()
        known: dict[int, tuple[Sequence[Tensor], Any]] = {}
        waiting = iter(jobs)
        turn = 0
        while True:
            # Actors take turns, whatever their speed: the choice of the actor changes no bit.
            while len(pending) < CHUNKS_AHEAD * len(self.actors) and (
                chunk := list(islice(waiting, self.chunk))
            ):
                actor = self.actors[turn % len(self.actors)]
                pending.append((chunk, actor, self._sent(chunk, actor, known)))
                turn += 1
            if not pending:
                return
            chunk, actor, future = pending.popleft()
            yield from self._results(chunk, actor, future)

    def _sent(
        self, chunk: list[ClientJob], actor: Any, known: dict[int, tuple[Sequence[Tensor], Any]]
    ) -> Any:
        """Send a chunk to an actor and return its future results."""
        sets: list[Any] = []
        places: dict[int, int] = {}
        light = []
        for job in chunk:
            where: list[int | None] = []
            sent = [getattr(job, name) for name in _SENT]
            for values in [*sent, *chain.from_iterable(job.references)]:
                if values is None:
                    where.append(None)
                    continue
                key = id(values)
                if key not in known:
                    # The tensors are stored with their reference, so that their `id` is not reused
                    # meanwhile.
                    known[key] = (
                        values,
                        self.ray.put([tensor.numpy() for tensor in to_cpu(list(values))]),
                    )
                if key not in places:
                    places[key] = len(sets)
                    sets.append(known[key][1])
                where.append(places[key])
            # Without weights and buffers a job is its indices and a few numbers.
            bare = replace(job, weights=(), buffers=(), anchor=None, correction=None, references=())
            light.append((bare, where))
        # Each set is an argument of its own: Ray resolves references only there, not inside of
        # lists.
        return actor.train.remote(light, *sets)

    def _results(self, chunk: list[ClientJob], actor: Any, future: Any) -> list[JobResult]:
        try:
            self._wait(chunk, actor, future)
            results: list[Any] = self.ray.get(future)
        except self.ray.exceptions.RayError as error:
            reason = f"its actor was lost: {str(error).strip().splitlines()[-1]}"
            raise WorkerFailedError(*self._named(chunk, 0), reason) from error
        if results and isinstance(results[0], DureError):
            raise results[0]
        return results if is_cpu(self.home) else [_moved(one, self.home) for one in results]

    def _wait(self, chunk: list[ClientJob], actor: Any, future: Any) -> None:
        """Wait for the results; raise WorkerFailedError for an actor without progress."""
        self.ray.wait([self._ready[actor], future])
        patience = StallTimeout(self.deadline)
        known: tuple[int, ...] = ()
        asked = None
        while not self.ray.wait([future], timeout=patience.every)[0]:
            # One question at a time, whether or not it is answered.
            if asked is None:
                asked = actor.came.options(concurrency_group=_ASIDE).remote()
            elif self.ray.wait([asked], timeout=0)[0]:
                known = self.ray.get(asked)
                asked = None
            if patience.is_over(known):
                who, when = self._named(chunk, known[0] if known else 0)
                raise WorkerFailedError(who, when, hang_reason(self.deadline, False))

    def _named(self, chunk: list[ClientJob], done: int) -> tuple[str, str]:
        return work_of(chunk, done, one_by_one=self.chunk == 1)

    def close(self) -> None:
        """End the actors, and Ray if this engine has started it."""
        for actor in self.actors:
            self.ray.kill(actor)
        self.actors = []
        if self._started and self.ray.is_initialized():
            self.ray.shutdown()


def _ray() -> Any:
    try:
        import ray
    except ImportError as error:
        raise ImportError('engines on Ray need the extra: pip install "dure[ray]"') from error
    return ray
