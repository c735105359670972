"""A replica of Downpour SGD at work: it fetches, computes and pushes, one beside the other.

At step t, counted from 0, with weights w of its own:

    t mod n_fetch = 0    begin to fetch w; what comes takes the place of w, between two steps
                         g = gradient of the replica's next batch at w
                         accrued <- accrued + g;  w <- w - alpha·g
    t mod n_push = 0     begin to push accrued;  accrued <- 0

so the push of step 0 carries one gradient. At most one fetch and one push are under way: the next
one waits for it, and the replica with it, so that a slow link holds up steps and does not fill the
memory. Where all meet, the last step pushes what is accrued, and the next step waits for a fetch:
what is evaluated there contains every gradient.

Without overlap a step waits for its fetch, which contains all own pushes, and for the push of the
step before.

No I/O and no clock: `now` is an argument, in seconds of the replica's own clock.

Source: Dean et al. 2012, "Large Scale Distributed Deep Networks", section 4.1, algorithm 1.1.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from dure.parameter_server.messages import Envelope, Message
from dure.parameter_server.tables import apart
from dure.parameter_server.worker import WorkerSide


@dataclass(frozen=True)
class Pace:
    """How often a replica fetches and pushes, in steps, and whether it computes meanwhile."""

    fetch_every: int = 1
    push_every: int = 1
    overlap: bool = True


class Job(Protocol):
    """A gradient that is being computed."""

    @property
    def ends(self) -> float:
        """When it is there; infinity as long as nobody knows."""

    def result(self) -> Sequence[Tensor]:
        """The gradient, by portion, which nobody else uses. Raises what its computation raised."""

    @property
    def is_empty(self) -> bool:
        """Whether the gradient, which is there, is of no example."""


Compute = Callable[[int, Sequence[Tensor], float], Job]
"""compute(step, weights, now): begins the gradient of a step, at these weights by portion."""
Move = Callable[[Sequence[Tensor], Sequence[Tensor], int], None]
"""move(weights, gradients, step): w <- w - alpha·g, in place."""


class Replica:
    """A replica, or the part of one that a machine has, from its first step on.

    side: what it says to the servers. weights: by portion, of which it takes copies. done: steps
    that were done before.
    """

    def __init__(
        self,
        side: WorkerSide,
        pace: Pace,
        weights: Sequence[Tensor],
        compute: Compute,
        move: Move,
        done: int = 0,
    ) -> None:
        self.side = side
        self.pace = pace
        self.weights = [each.clone() for each in weights]
        self.compute = compute
        self.move = move
        self.step = done
        """Steps that are done."""
        self.until = done
        """It may do the steps before this one."""
        self._fresh = False
        """Whether weights have come since all have met."""
        self._fetched = -1
        """For which step it has begun to fetch."""
        self._job: Job | None = None
        self._accrued: list[Tensor] | None = None
        self._count = 0
        """Gradients of examples that are accrued."""
        self._due = False
        """Whether what is accrued is to be pushed now."""
        self._woken = False
        self.held = False
        """Whether it begins no step, since the run is to end."""

    def begin_at(self, step: int) -> None:
        """So many steps were done before; for one that has done none."""
        self.step = self.until = step

    def grant(self, until: int) -> None:
        """All have met, and it may do the steps before `until`."""
        if until != self.until:
            self.until = until
            self._fresh = False
            self._fetched = -1
            self._woken = True

    def hold(self) -> int:
        """Begins no step until it hears where it stops; the first that it has not begun."""
        self.held = True
        return self.step + (self._job is not None)

    def stop_at(self, until: int) -> None:
        """It stops before this step, though not all have met, and pushes what is accrued there."""
        self.held = False
        self.until = until
        self._due = self._due or (self.step >= until and self._accrued is not None)
        self._woken = True

    @property
    def finished(self) -> bool:
        """Whether it has done all that it may do, and every server has it."""
        waits = self._job is not None or self._due or self.side.asked is not None
        return self.step >= self.until and not waits and not self.side.behind

    @property
    def computing(self) -> bool:
        """Whether a gradient is being computed."""
        return self._job is not None

    @property
    def wake(self) -> float:
        """When it is to be told that time has passed."""
        if self._woken:
            return -math.inf
        return min(self.side.wake, math.inf if self._job is None else self._job.ends)

    def receive(self, sender: str, message: Message, now: float) -> list[Envelope]:
        """What it says to a message."""
        said = self.side.receive(sender, message, now)
        return [*said, *self._go_on(now)]

    def tick(self, now: float) -> list[Envelope]:
        """What is due: a gradient that is computed, what was not answered."""
        self._woken = False
        if self._job is not None and now >= self._job.ends:
            job = self._job
            self._job = None
            self._take(job)
        said = self.side.tick(now)
        return [*said, *self._go_on(now)]

    def _take(self, job: Job) -> None:
        """The gradient of the step is there."""
        gradients = job.result()
        self._count += not job.is_empty
        if self._accrued is None:
            self._accrued = list(gradients)
        else:
            for sum_, gradient in zip(self._accrued, gradients, strict=True):
                sum_.add_(gradient)
        self.move(self.weights, gradients, self.step)
        last = self.step + 1 >= self.until
        self._due = last or self.step % self.pace.push_every == 0
        self.step += 1

    def _go_on(self, now: float) -> list[Envelope]:
        """Whatever need not wait."""
        if self.side.given_up or self._job is not None:
            return []
        self._land()
        said = self._push(now)
        if not self._due and self.step < self.until and not self.held:
            said += self._fetch(now)
            if not self._waits:
                self._job = self.compute(self.step, self.weights, now)
        return said

    def _land(self) -> None:
        """Takes what was fetched, if it is there."""
        if self.side.asked is not None and self.side.arrived:
            fetched, _ = apart(self.side.take())
            for weights, values in zip(self.weights, fetched, strict=True):
                weights.copy_(values)
            self._fresh = True

    def _push(self, now: float) -> list[Envelope]:
        """Pushes what is to be pushed, if the push before it is safe."""
        if not self._due or self.side.behind:
            return []
        assert self._accrued is not None
        gradients, count = self._accrued, self._count
        self._accrued = None
        self._count = 0
        self._due = False
        # Of no example at all it moves the clock, and no weights.
        return self.side.push(gradients, 1.0 if count else 0.0, now, self.step - 1, max(1, count))

    @property
    def _to_fetch(self) -> bool:
        """Whether this step has a fetch, and that has not begun."""
        due = self.step % self.pace.fetch_every == 0 or not self._fresh
        return due and self._fetched != self.step

    def _fetch(self, now: float) -> list[Envelope]:
        """Begins the fetch of this step, if it has one, and the one before it has landed."""
        if not self._to_fetch or self.side.asked is not None:
            return []
        self._fetched = self.step
        return self.side.pull(now, None if self.pace.overlap else self.side.clock)

    @property
    def _waits(self) -> bool:
        """Whether the gradient of this step cannot be begun yet."""
        if self._to_fetch or not self._fresh:
            return True
        return not self.pace.overlap and (self.side.asked is not None or self.side.behind > 0)
