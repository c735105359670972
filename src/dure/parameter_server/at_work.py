"""A worker at work under a virtual clock: pulls, computes for a while, pushes, and again.

A worker computes one gradient at a time: its own, or one that it owes in the name of a worker that
was given up. It asks for the weights of both, and computes what can be computed first; so nobody
waits for a part that waits for somebody who waits.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

from torch import Tensor

from dure.parameter_server.layout import Layout, Owed
from dure.parameter_server.messages import Envelope, Message
from dure.parameter_server.worker import WorkerSide

Compute = Callable[[int, int, Layout, Sequence[Tensor]], tuple[Sequence[Tensor], float]]
"""compute(worker, clock, layout, values): the gradients of a part, and what they count."""
Seconds = Callable[[int, int], float]
"""seconds(worker, clock): how long that takes."""


class Worker:
    """Works until clock `stop`.

    own: its side. other: makes the side that speaks for a worker that was given up.
    """

    def __init__(
        self,
        own: WorkerSide,
        compute: Compute,
        seconds: Seconds,
        stop: float,
        other: Callable[[Owed, Layout], WorkerSide],
    ) -> None:
        self.own = own
        self.compute = compute
        self.seconds = seconds
        self.stop = stop
        self.other = other
        self._others: dict[Owed, WorkerSide] = {}
        self._computing: tuple[WorkerSide, Sequence[Tensor], float] | None = None
        self._done = math.inf
        self._begun = False

    @property
    def sides(self) -> list[WorkerSide]:
        """For whom it speaks: itself first."""
        return [self.own, *self._others.values()]

    @property
    def finished(self) -> bool:
        """Whether everything that it is to do is done, and safe."""
        ends = self._ends()
        return self._computing is None and all(
            side.clock >= end and side.behind == 0 for side, end in ends
        )

    @property
    def wake(self) -> float:
        """When it is to be told that time has passed."""
        if not self._begun:
            return -math.inf
        return min([self._done, *(side.wake for side in self.sides)])

    def receive(self, sender: str, message: Message, now: float) -> list[Envelope]:
        """What it says to a message."""
        said: list[Envelope] = []
        for side in self.sides:
            said += side.receive(sender, message, now)
        if isinstance(message, Layout):
            for owed in self.own.owed:
                if owed not in self._others:
                    self._others[owed] = self.other(owed, self.own.layout)
            for owed in [owed for owed in self._others if owed not in self.own.owed]:
                del self._others[owed]
        return [*said, *self._go_on(now)]

    def tick(self, now: float) -> list[Envelope]:
        """What is due: a gradient that is computed, a beat, what was not answered."""
        self._begun = True
        said: list[Envelope] = []
        if now >= self._done and self._computing is not None:
            side, gradients, weight = self._computing
            self._computing = None
            self._done = math.inf
            if side in self.sides:
                said += side.push(gradients, weight, now)
        for side in self.sides:
            said += side.tick(now)
        return [*said, *self._go_on(now)]

    def _ends(self) -> list[tuple[WorkerSide, float]]:
        """Each side, and the clock at which it has no more to do."""
        theirs = [(side, min(self.stop, owed.stop)) for owed, side in self._others.items()]
        return [(self.own, self.stop), *theirs]

    def _go_on(self, now: float) -> list[Envelope]:
        """Asks for what it needs next, and computes what it can."""
        if self.own.given_up:
            return []
        said: list[Envelope] = []
        for side, end in self._ends():
            computing = self._computing is not None and self._computing[0] is side
            if side.clock < end and side.asked is None and not computing:
                said += side.pull(now, side.clock)
        for side in self.sides:
            if self._computing is None and side.arrived:
                values = side.take()
                gradients, weight = self.compute(side.number, side.clock, side.layout, values)
                self._computing = (side, gradients, weight)
                self._done = now + self.seconds(side.number, side.clock)
        return said
