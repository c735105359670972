"""Replica of Downpour SGD: overlapping fetches, gradients and pushes.

At step t, counted from 0, with weights w of its own:

    t mod n_fetch = 0    begin to fetch w; fetched values replace w between two steps
                         g = gradient of the replica's next batch at w
                         accrued <- accrued + g;  w <- w - alpha·g
    t mod n_push = 0     begin to push accrued;  accrued <- 0

so the push of step 0 carries a single gradient. At most one fetch and one push are in flight: the
next waits for its predecessor, and the replica with it, so that a slow connection delays steps in
place of filling the memory. At the end of a round the last step pushes the accrued gradients, and
the next step waits for a fetch: the evaluated weights contain every gradient.

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
from dure.parameter_server.tables import split_rows
from dure.parameter_server.worker import WorkerProtocol


@dataclass(frozen=True)
class Pace:
    """Steps between a replica's fetches and pushes, and whether they overlap with computation."""

    fetch_every: int = 1
    push_every: int = 1
    overlap: bool = True


class ReplicaJob(Protocol):
    """Gradient computation in progress."""

    @property
    def ends(self) -> float:
        """Time of the end; infinity while it is unknown."""

    def result(self) -> Sequence[Tensor]:
        """Return the gradient, by portion, owned by the caller. Raises the computation's error."""

    @property
    def is_empty(self) -> bool:
        """Whether the finished gradient has no examples."""


BeginGradient = Callable[[int, Sequence[Tensor], float], ReplicaJob]
"""Function (step, weights, now) that begins the gradient of a step at these weights, by portion."""
LocalMove = Callable[[Sequence[Tensor], Sequence[Tensor], int], None]
"""Function (weights, gradients, step) for w <- w - alpha·g, in place."""


class DownpourReplica:
    """Replica, or a machine's part of a replica.

    Args:
        side: protocol towards the servers.
        pace: intervals of fetches and pushes.
        weights: initial weights by portion, which are copied.
        compute: begins a gradient.
        move: makes a local step.
        done: number of steps that were done before.
    """

    def __init__(
        self,
        side: WorkerProtocol,
        pace: Pace,
        weights: Sequence[Tensor],
        compute: BeginGradient,
        move: LocalMove,
        done: int = 0,
    ) -> None:
        self.side = side
        self.pace = pace
        self.weights = [each.clone() for each in weights]
        self.compute = compute
        self.move = move
        self.step = done
        """Number of steps done."""
        self.until = done
        """First step that is not granted."""
        self._fresh = False
        """Whether a fetch has arrived since the begin of the round."""
        self._fetched = -1
        """Last step with a begun fetch."""
        self._job: ReplicaJob | None = None
        self._accrued: list[Tensor] | None = None
        self._count = 0
        """Number of accrued gradients with examples."""
        self._due = False
        """Whether the accrued gradients are to be pushed now."""
        self._woken = False
        self.held = False
        """Whether no step may begin, since the run is to end."""

    def begin_at(self, step: int) -> None:
        """Set the number of steps that were done before, for a new replica."""
        self.step = self.until = step

    def grant(self, until: int) -> None:
        """Begin a round with the steps before `until`."""
        if until != self.until:
            self.until = until
            self._fresh = False
            self._fetched = -1
            self._woken = True

    def hold(self) -> int:
        """Begin no step until `stop_at`; returns the first step that is not begun."""
        self.held = True
        return self.step + (self._job is not None)

    def stop_at(self, until: int) -> None:
        """Stop before step `until`, within a round, and push the accrued gradients there."""
        self.held = False
        self.until = until
        self._due = self._due or (self.step >= until and self._accrued is not None)
        self._woken = True

    @property
    def finished(self) -> bool:
        """Whether all granted steps are done, and every server has their pushes."""
        waits = self._job is not None or self._due or self.side.asked is not None
        return self.step >= self.until and not waits and not self.side.behind

    @property
    def computing(self) -> bool:
        """Whether a gradient is being computed."""
        return self._job is not None

    @property
    def wake(self) -> float:
        """Time of the next `tick`."""
        if self._woken:
            return -math.inf
        return min(self.side.wake, math.inf if self._job is None else self._job.ends)

    def receive(self, sender: str, message: Message, now: float) -> list[Envelope]:
        """Return the messages that answer a message."""
        said = self.side.receive(sender, message, now)
        return [*said, *self._go_on(now)]

    def tick(self, now: float) -> list[Envelope]:
        """Process due events: a finished gradient, retries. Returns messages."""
        self._woken = False
        if self._job is not None and now >= self._job.ends:
            job = self._job
            self._job = None
            self._take(job)
        said = self.side.tick(now)
        return [*said, *self._go_on(now)]

    def _take(self, job: ReplicaJob) -> None:
        """Accrue a finished gradient and make the local step."""
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
        """Begin all operations that need not wait."""
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
        """Take the fetched weights if they have arrived."""
        if self.side.asked is not None and self.side.arrived:
            fetched, _ = split_rows(self.side.take())
            for weights, values in zip(self.weights, fetched, strict=True):
                weights.copy_(values)
            self._fresh = True

    def _push(self, now: float) -> list[Envelope]:
        """Push due gradients if the previous push is acknowledged."""
        if not self._due or self.side.behind:
            return []
        assert self._accrued is not None
        gradients, count = self._accrued, self._count
        self._accrued = None
        self._count = 0
        self._due = False
        # A push without examples moves the clock, but no weights.
        return self.side.push(gradients, 1.0 if count else 0.0, now, self.step - 1, max(1, count))

    @property
    def _to_fetch(self) -> bool:
        """Whether this step has a fetch that has not begun."""
        due = self.step % self.pace.fetch_every == 0 or not self._fresh
        return due and self._fetched != self.step

    def _fetch(self, now: float) -> list[Envelope]:
        """Begin the fetch of this step, if it has one and the previous fetch has arrived."""
        if not self._to_fetch or self.side.asked is not None:
            return []
        self._fetched = self.step
        return self.side.pull(now, None if self.pace.overlap else self.side.clock)

    @property
    def _waits(self) -> bool:
        """Whether the gradient of this step cannot begin yet."""
        if self._to_fetch or not self._fresh:
            return True
        return not self.pace.overlap and (self.side.asked is not None or self.side.behind > 0)
