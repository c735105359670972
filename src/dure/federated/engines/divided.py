"""An engine that gives jobs to several workers, each with an engine of its own: processes, or
threads.

Jobs are handed out in chunks, the largest first, to whoever is idle, from a window of them; results
come back in the jobs' order. What is computed depends on the chunks alone and not on who was
faster.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from itertools import islice
from typing import Generic, TypeVar

from dure.errors import DureError
from dure.federated.engines.job import Engine, Job, Trained


@dataclass(eq=False)
class Chunk:
    """Jobs that one worker does together. results: those that have come, and then perhaps an
    error."""

    jobs: list[Job]
    started: bool = False
    done: bool = False
    results: list[Trained] = field(default_factory=list)
    error: DureError | None = None

    @property
    def examples(self) -> int:
        """How much work it is, for a batch size that all have: the larger clients make more steps,
        or larger ones."""
        return sum(job.steps * len(job.indices) for job in self.jobs)


@dataclass(eq=False)
class Worker:
    """Whoever does a chunk at a time. chunk: which, until it is done."""

    chunk: Chunk | None = field(default=None, kw_only=True)


Member = TypeVar("Member", bound=Worker)


class DividedEngine(Engine, ABC, Generic[Member]):
    """`workers` start with the first job. chunk: how many jobs one gets at once. window: how many
    chunks are computed ahead of what is asked for, at most. why: it is this engine."""

    def __init__(self, name: str, workers: int, chunk: int, window: int) -> None:
        self.name, self.workers, self.chunk, self.window = name, workers, chunk, window
        self.cohort = workers * chunk
        self.why = ""
        self._members: list[Member] = []

    def train(self, jobs: Iterable[Job]) -> Iterator[Trained]:
        """The results in the jobs' order; a bounded number is computed ahead of what is asked for.

        Raises what the workers' engines raise, when the results before it have been given, and
        WorkerFailedError when a worker is lost.
        """
        source = iter(jobs)
        pool: deque[Chunk] = deque()
        while True:
            while len(pool) < self.window and (some := list(islice(source, self.chunk))):
                pool.append(Chunk(some))
            if not pool:
                return
            self._hand_out(pool)
            if not pool[0].done:
                self._receive()
                continue
            chunk = pool.popleft()
            yield from chunk.results
            if chunk.error is not None:
                raise chunk.error

    def _hand_out(self, pool: Iterable[Chunk]) -> None:
        """The largest chunks to the idle."""
        waiting = sorted(
            (chunk for chunk in pool if not chunk.started), key=lambda chunk: -chunk.examples
        )
        if waiting and not self._members:
            self._start()
        idle = (member for member in self._members if member.chunk is None)
        for member, chunk in zip(idle, waiting, strict=False):
            chunk.started = True
            self._give(member, chunk)

    @abstractmethod
    def _start(self) -> None:
        """Fills `_members`."""

    @abstractmethod
    def _give(self, member: Member, chunk: Chunk) -> None:
        """Has it do the chunk, which becomes its."""

    @abstractmethod
    def _receive(self) -> None:
        """Waits for one of them at least, and takes what has come: results and perhaps an error; it
        is then idle."""

    @abstractmethod
    def close(self) -> None:
        """Ends the workers. Another `train` would start new ones."""
