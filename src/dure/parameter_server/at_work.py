"""A worker at work under a virtual clock: pulls, computes for a while, pushes, and again.

A worker computes one gradient at a time: its own, or one that it owes in the name of a worker that
was given up. It asks for the weights of both, and computes what can be computed first; so nobody
waits for a part that waits for somebody who waits.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from torch import Tensor

from dure.parameter_server.layout import Layout, Owed
from dure.parameter_server.messages import Envelope, Message
from dure.parameter_server.scheduler import Work
from dure.parameter_server.tables import Rows
from dure.parameter_server.worker import WorkerSide

Next = Callable[[WorkerSide, Work | None], Work | None]
"""next(side, asked): what is to be computed for it now; None where there is nothing.

asked: None before the weights are asked for. When they have come it is called again, with what it
has said: who takes part in a clock may have changed until then.
"""
Wanted = Callable[[WorkerSide, Work], Sequence[Tensor]]
"""rows(side, work): the rows of tables that a part reads, by portion of tables."""
Compute = Callable[
    [WorkerSide, Work, Sequence[Tensor | Rows]], tuple[Sequence[Tensor | Rows], float]
]
"""compute(side, work, values): the gradients of a part, by portion, and what they count."""
Seconds = Callable[[int, int], float]
"""seconds(worker, clock): how long that takes."""


@dataclass
class Job:
    """What is computed for a side. gradients: None until it has begun."""

    side: WorkerSide
    work: Work
    gradients: Sequence[Tensor | Rows] | None = None
    weight: float = 0.0


class Worker:
    """A worker, and those for which it speaks.

    own: its side. other: makes the side that speaks for a worker that was given up. done: is told
    what every server has. rows: what is to be pulled of tables.
    """

    def __init__(
        self,
        own: WorkerSide,
        next: Next,
        compute: Compute,
        seconds: Seconds,
        other: Callable[[Owed, Layout], WorkerSide],
        done: Callable[[WorkerSide, Work], None] = lambda side, work: None,
        rows: Wanted = lambda side, work: (),
    ) -> None:
        self.own = own
        self.next = next
        self.compute = compute
        self.seconds = seconds
        self.other = other
        self.done = done
        self.rows = rows
        self.computed = 0.0
        """Seconds that it has computed."""
        self._others: dict[Owed, WorkerSide] = {}
        self._jobs: list[Job] = []
        """What was begun, for one side each: asked for, or computed."""
        self._unsafe: list[tuple[WorkerSide, int, Work]] = []
        """What was pushed, and is not acknowledged: for whom, and at which of its clocks."""
        self._computing: Job | None = None
        self._ends = math.inf
        self._woken = True
        self._held = False

    @property
    def sides(self) -> list[WorkerSide]:
        """For whom it speaks: itself first."""
        return [self.own, *self._others.values()]

    @property
    def finished(self) -> bool:
        """Whether it has nothing to do, and every server has what it has done."""
        waits = self._woken or self._held or bool(self._jobs)
        return not waits and not any(side.behind for side in self.sides)

    @property
    def wake(self) -> float:
        """When it is to be told that time has passed."""
        if self._woken:
            return -math.inf
        return min([self._ends, *(side.wake for side in self.sides)])

    def go_on(self) -> None:
        """There may be more to do now."""
        self._woken = True
        self._held = False

    def hold(self) -> int:
        """Begins to compute nothing more, until it is to go on.

        Returns before which clock that has any of those for whom it speaks.
        """
        self._held = True
        clocks = {id(side): side.clock for side in self.sides}
        if self._computing is not None and id(self._computing.side) in clocks:
            clocks[id(self._computing.side)] += 1
        return max(clocks.values())

    def drop(self) -> list[Work]:
        """Drops what it has not begun; what that was."""
        dropped = [job for job in self._jobs if job is not self._computing]
        self._jobs = [job for job in self._jobs if job is self._computing]
        return [job.work for job in dropped]

    def receive(self, sender: str, message: Message, now: float) -> list[Envelope]:
        """What it says to a message."""
        said: list[Envelope] = []
        for side in self.sides:
            said += side.receive(sender, message, now)
        if isinstance(message, Layout):
            self._take_over()
        self._settle()
        return [*said, *self._begin(now)]

    def tick(self, now: float) -> list[Envelope]:
        """What is due: a gradient that is computed, a beat, what was not answered."""
        self._woken = False
        said: list[Envelope] = []
        job = self._computing
        if job is not None and now >= self._ends:
            self._computing = None
            self._ends = math.inf
            self._jobs.remove(job)
            # Another may have taken over from it meanwhile.
            if job.side in self.sides:
                assert job.gradients is not None
                self._unsafe.append((job.side, job.side.clock, job.work))
                said += job.side.push(job.gradients, job.weight, now, job.work.batch)
        for side in self.sides:
            said += side.tick(now)
        return [*said, *self._begin(now)]

    def _take_over(self) -> None:
        """Speaks from now on for those for whom it is to speak, and for nobody else."""
        owed = self.own.owed
        for one in owed:
            if one not in self._others:
                self._others[one] = self.other(one, self.own.layout)
        for one in [one for one in self._others if one not in owed]:
            del self._others[one]
        self._jobs = [job for job in self._jobs if job.side in self.sides or job is self._computing]

    def _settle(self) -> None:
        """Tells of what has become safe."""
        safe = [one for one in self._unsafe if one[0].clock - one[0].behind > one[1]]
        for side, _, work in safe:
            self.done(side, work)
        self._unsafe = [one for one in self._unsafe if one not in safe]

    def _begin(self, now: float) -> list[Envelope]:
        """Asks for what it needs next, and computes what it can."""
        if self.own.given_up or self._held:
            return []
        said: list[Envelope] = []
        busy = [job.side for job in self._jobs]
        for owed, side in [(None, self.own), *self._others.items()]:
            over = owed is not None and side.clock >= owed.stop
            work = None if over or side in busy else self.next(side, None)
            if work is not None:
                self._jobs.append(Job(side, work))
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
                        # Those that have come are of the part that it was to have before.
                        said += job.side.pull(now, job.side.clock, rows)
                        continue
                job.gradients, job.weight = self.compute(job.side, job.work, values)
                seconds = self.seconds(job.side.number, job.side.clock)
                self.computed += seconds
                self._computing = job
                self._ends = now + seconds
        return said
