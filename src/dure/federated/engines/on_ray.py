"""Clients on a Ray cluster: any engine, in actors on its machines.

Each actor has the task and the examples, sent once. A round's weights are put into Ray's object
store once, and reach each machine once; jobs travel in chunks, results come back in the jobs'
order. What is computed depends on the chunks alone: with `loop` the bits are those of one process
with one thread.

Where Ray runs already (`ray.init`, or RAY_ADDRESS in the environment) that cluster is used,
otherwise one is started on this machine, and stopped at the end. It needs the extra `ray`.

An actor that is waited for is asked how far it has come, in a thread of its own there; one that
makes no step for the deadline, or does not answer, is given up (`progress`).
"""

from __future__ import annotations

import sys
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from functools import partial
from itertools import chain, islice
from typing import Any

import cloudpickle
import torch
from msgspec.structs import replace
from torch import Tensor, nn

from dure.contracts.strategy import seeded_model
from dure.contracts.task import Task
from dure.data.examples import Examples
from dure.errors import DureError, WorkerFailedError
from dure.federated.engines.batched import batched_engine
from dure.federated.engines.job import Engine, Job, Reference, Trained
from dure.federated.engines.loop import LoopEngine
from dure.federated.engines.objective import Objective
from dure.federated.engines.progress import DEADLINE, Progress, named, silent
from dure.machine import own_code
from dure.machine.global_settings import settings_here
from dure.machine.own_code import files_of
from dure.machine.patience import Patience
from dure.tensors.frozen import frozen_of, load_frozen

CHUNKS_AHEAD = 2
"""Chunks that wait for each actor, so that it is never idle."""


class Actor:
    """What lives on a machine of the cluster."""

    def __init__(self, path: list[str], packed: bytes) -> None:
        # One thread, for one CPU is what Ray has reserved, and for the bits.
        torch.set_num_threads(1)
        # Where the task's modules are found.
        sys.path.extend(entry for entry in path if entry not in sys.path)
        _, settings, setting = cloudpickle.loads(packed)
        settings.apply()
        task, examples, batch_size, seed, batched, frozen, objective = setting
        model = seeded_model(task, seed)
        # Weights that a machine draws or reads are not those of another for certain, and jobs have
        # the trained ones alone.
        load_frozen(model, frozen)
        make: Any = batched_engine if batched else partial(LoopEngine, objective=objective)
        self.engine = make(
            task=task,
            model=model,
            examples=examples,
            batch_size=batch_size,
            seed=seed,
        )
        self.progress = Progress()
        self.engine.look = self.progress.step

    def came(self) -> tuple[int, ...]:
        """How far it has come; answered while it trains."""
        return self.progress.now()

    def train(self, jobs: Sequence[tuple[Job, list[int | None]]], *sets: list[Any]) -> list[Any]:
        """The results of the jobs, or the error that ended them.

        jobs: without their tensors, which are in `sets`.
        """
        tensors = [list(map(torch.from_numpy, one)) for one in sets]

        def whole(job: Job, places: list[int | None]) -> Job:
            given: dict[str, Any] = {
                name: tensors[at] for name, at in zip(_SENT, places, strict=False) if at is not None
            }
            # The sets of references come behind: weights and buffers of each.
            rest = iter([tensors[at] for at in places[len(_SENT) :] if at is not None])
            return replace(job, **given, references=list(map(Reference, rest, rest)))

        try:
            return list(self.engine.train([whole(*one) for one in jobs]))
        except DureError as error:
            return [error]


_ASIDE = "aside"
"""The concurrency group of what an actor answers while it trains."""

_SENT = ("weights", "buffers", "anchor", "correction")
"""The fields of a job that are put into the object store."""


class RayEngine(Engine):
    """Gives jobs to actors on a Ray cluster.

    model: like those that the jobs are for, of which actors get the frozen parameters. batched:
    whether actors have the batched engine. workers: how many there are; None is one a core of the
    cluster. objective: what clients minimise; None is the task's loss. deadline: seconds without a
    step after which an actor is given up.

    Raises ImportError if Ray is not installed.
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
        # A cluster that was there before is the user's: it is used, and left running.
        self._started = not self.ray.is_initialized()
        if self._started:
            self.ray.init(include_dashboard=False, log_to_driver=False, logging_level="error")
        count = (
            workers
            if workers is not None
            else max(1, int(self.ray.cluster_resources().get("CPU", 1)))
        )
        setting = (task, examples, batch_size, seed, batched, frozen_of(model), objective)
        settings = settings_here().of_computing()
        # A task's file is run by the actors where it lies; on other machines it may not.
        if self._is_here() and task.reference is not None:
            content = own_code.dumps((files_of(task.reference["name"]), settings, setting))
        else:
            content = cloudpickle.dumps((None, settings, setting))
        packed = self.ray.put(content)
        # A group of its own: it answers while the actor trains.
        actor = self.ray.remote(num_cpus=1, concurrency_groups={_ASIDE: 1})(Actor)
        self.actors = [actor.remote(list(sys.path), packed) for _ in range(count)]
        # They may wait for a place in the cluster, and import torch.
        self._ready = {actor: actor.__ray_ready__.remote() for actor in self.actors}
        self.chunk = max(1, cohort)
        self.cohort = count * self.chunk

    def _is_here(self) -> bool:
        """Whether the cluster is this machine alone."""
        there = {node["NodeManagerAddress"] for node in self.ray.nodes() if node["Alive"]}
        return there == {self.ray.util.get_node_ip_address()}

    def train(self, jobs: Iterable[Job]) -> Iterator[Trained]:
        """The results in the jobs' order.

        Raises what a client raised, and WorkerFailedError for an actor that died, or made no step
        for the deadline.
        """
        pending: deque[tuple[list[Job], Any, Any]] = deque()
        known: dict[int, tuple[Sequence[Tensor], Any]] = {}
        waiting = iter(jobs)
        turn = 0
        while True:
            # Actors take turns, whichever is faster: which of them computes a chunk changes no bit.
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
        self, chunk: list[Job], actor: Any, known: dict[int, tuple[Sequence[Tensor], Any]]
    ) -> Any:
        """The future results of a chunk."""
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
                    # The tensors are kept with their reference, so that their `id` is not given to
                    # others meanwhile.
                    known[key] = values, self.ray.put([tensor.numpy() for tensor in values])
                if key not in places:
                    places[key] = len(sets)
                    sets.append(known[key][1])
                where.append(places[key])
            # Without weights and buffers a job is its indices and a few numbers.
            bare = replace(job, weights=(), buffers=(), anchor=None, correction=None, references=())
            light.append((bare, where))
        # Each set an argument of its own: Ray replaces references by what they stand for only
        # there, not inside of lists.
        return actor.train.remote(light, *sets)

    def _results(self, chunk: list[Job], actor: Any, future: Any) -> list[Trained]:
        try:
            self._wait(chunk, actor, future)
            results: list[Any] = self.ray.get(future)
        except self.ray.exceptions.RayError as error:
            reason = f"its actor was lost: {str(error).strip().splitlines()[-1]}"
            raise WorkerFailedError(*self._named(chunk, 0), reason) from error
        if results and isinstance(results[0], DureError):
            raise results[0]
        return results

    def _wait(self, chunk: list[Job], actor: Any, future: Any) -> None:
        """Until the results are there; raises WorkerFailedError for an actor without progress."""
        self.ray.wait([self._ready[actor], future])
        patience = Patience(self.deadline)
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
                raise WorkerFailedError(who, when, silent(self.deadline, False))

    def _named(self, chunk: list[Job], done: int) -> tuple[str, str]:
        return named(chunk, done, one_by_one=self.chunk == 1)

    def close(self) -> None:
        """Ends the actors, and Ray if it was started here."""
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
