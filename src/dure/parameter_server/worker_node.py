"""Worker under a virtual clock: a loop of pull, compute and push.

A worker computes a single gradient at a time: its own, or a gradient that it owes on behalf of a
dropped worker. The worker pulls the weights for all of them and computes the first that is ready,
which prevents a deadlock between workers that wait for each other's parts.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from torch import Tensor

from dure.parameter_server.layout import ReassignedWork, ShardLayout
from dure.parameter_server.messages import Envelope, Message
from dure.parameter_server.scheduler import BatchPart
from dure.parameter_server.tables import SparseRows
from dure.parameter_server.worker import WorkerProtocol

ChoosePart = Callable[[WorkerProtocol, BatchPart | None], BatchPart | None]
"""Function (side, asked) -> the part to compute next; None if there is none.

`asked` is None before the pull. After the pull the function is called again with its earlier
result, since the members of the clock may have changed meanwhile.
"""
RowsToPull = Callable[[WorkerProtocol, BatchPart], Sequence[Tensor]]
"""Function (side, work) -> the table rows that a part reads, by portion of tables."""
ComputePart = Callable[
    [WorkerProtocol, BatchPart, Sequence[Tensor | SparseRows]],
    tuple[Sequence[Tensor | SparseRows], float],
]
"""Function (side, work, values) -> the gradients of a part, by portion, and their weight."""
ComputingTime = Callable[[int, int], float]
"""Function (worker, clock) -> the duration of that computation, in seconds."""


@dataclass
class GradientJob:
    """Computation for a side. `gradients` is None before its start."""

    side: WorkerProtocol
    work: BatchPart
    gradients: Sequence[Tensor | SparseRows] | None = None
    weight: float = 0.0


class WorkerNode:
    """Worker with the dropped workers on whose behalf it computes.

    Args:
        own: the worker's own side of the protocol.
        next: chooses the next part.
        compute: computes gradients.
        seconds: duration of a computation.
        other: creates the side for a dropped worker.
        done: callback for a part whose pushes all servers have.
        rows: table rows to pull.
    """

    def __init__(
        self,
        own: WorkerProtocol,
        next: ChoosePart,
        compute: ComputePart,
        seconds: ComputingTime,
        other: Callable[[ReassignedWork, ShardLayout], WorkerProtocol],
        done: Callable[[WorkerProtocol, BatchPart], None] = lambda side, work: None,
        rows: RowsToPull = lambda side, work: (),
    ) -> None:
        self.own = own
        self.next = next
        self.compute = compute
        self.seconds = seconds
        self.other = other
        self.done = done
        self.rows = rows
        self.computed = 0.0
        """Total computing time in seconds."""
        self._others: dict[ReassignedWork, WorkerProtocol] = {}
        self._jobs: list[GradientJob] = []
        """Jobs in progress, at most one a side: pulled or computed."""
        self._unsafe: list[tuple[WorkerProtocol, int, BatchPart]] = []
        """Unacknowledged pushes: side, the side's clock, and the part."""
        self._computing: GradientJob | None = None
        self._ends = math.inf
        self._woken = True
        self._held = False

    @property
    def sides(self) -> list[WorkerProtocol]:
        """Sides of the protocol, the worker's own first."""
        return [self.own, *self._others.values()]

    @property
    def finished(self) -> bool:
        """Whether the worker has no work, and every server has its pushes."""
        waits = self._woken or self._held or bool(self._jobs)
        return not waits and not any(side.behind for side in self.sides)

    @property
    def wake(self) -> float:
        """Time of the next `tick`."""
        if self._woken:
            return -math.inf
        return min([self._ends, *(side.wake for side in self.sides)])

    def go_on(self) -> None:
        """Look for work at the next `tick`."""
        self._woken = True
        self._held = False

    def hold(self) -> int:
        """Stop before the next computation, until `go_on`.

        Returns the largest clock that a side has not begun.
        """
        self._held = True
        clocks = {id(side): side.clock for side in self.sides}
        if self._computing is not None and id(self._computing.side) in clocks:
            clocks[id(self._computing.side)] += 1
        return max(clocks.values())

    def drop(self) -> list[BatchPart]:
        """Drop the jobs that have not begun to compute; returns their parts."""
        dropped = [job for job in self._jobs if job is not self._computing]
        self._jobs = [job for job in self._jobs if job is self._computing]
        return [job.work for job in dropped]

    def receive(self, sender: str, message: Message, now: float) -> list[Envelope]:
        """Return the messages that answer a message."""
        said: list[Envelope] = []
        for side in self.sides:
            said += side.receive(sender, message, now)
        if isinstance(message, ShardLayout):
            self._take_over()
        self._settle()
        return [*said, *self._begin(now)]

    def tick(self, now: float) -> list[Envelope]:
        """Process due events: a finished gradient, a heartbeat, retries. Returns messages."""
        self._woken = False
        said: list[Envelope] = []
        job = self._computing
        if job is not None and now >= self._ends:
            self._computing = None
            self._ends = math.inf
            self._jobs.remove(job)
            # Meanwhile another worker may have taken over this side.
            if job.side in self.sides:
                assert job.gradients is not None
                self._unsafe.append((job.side, job.side.clock, job.work))
                said += job.side.push(job.gradients, job.weight, now, job.work.batch)
        for side in self.sides:
            said += side.tick(now)
        return [*said, *self._begin(now)]

    def _take_over(self) -> None:
        """Create sides for newly owed work, and drop the sides of work that is no longer owed."""
        owed = self.own.owed
        for one in owed:
            if one not in self._others:
                self._others[one] = self.other(one, self.own.layout)
        for one in [one for one in self._others if one not in owed]:
            del self._others[one]
        self._jobs = [job for job in self._jobs if job.side in self.sides or job is self._computing]

    def _settle(self) -> None:
        """Call `done` for the parts that all servers have."""
        safe = [one for one in self._unsafe if one[0].clock - one[0].behind > one[1]]
        for side, _, work in safe:
            self.done(side, work)
        self._unsafe = [one for one in self._unsafe if one not in safe]

    def _begin(self, now: float) -> list[Envelope]:
        """Pull for the next parts, and compute the first part that is ready."""
        if self.own.given_up or self._held:
            return []
        said: list[Envelope] = []
        busy = [job.side for job in self._jobs]
        for owed, side in [(None, self.own), *self._others.items()]:
            over = owed is not None and side.clock >= owed.stop
            work = None if over or side in busy else self.next(side, None)
            if work is not None:
                self._jobs.append(GradientJob(side, work))
                said += side.pull(now, side.clock, self.rows(side, work))
        for job in list(self._jobs):
            if self._computing is None and job.side.arrived:
                values = job.side.take()
                work = self.next(job.side, job.work)
                if work is None:
                    self._jobs.remove(job)
                    continue
                if work != job.work:
                    job.work = work
                    if rows := self.rows(job.side, work):
                        # The pulled rows belong to the earlier part: pull again.
                        said += job.side.pull(now, job.side.clock, rows)
                        continue
                job.gradients, job.weight = self.compute(job.side, job.work, values)
                seconds = self.seconds(job.side.number, job.side.clock)
                self.computed += seconds
                self._computing = job
                self._ends = now + seconds
        return said
