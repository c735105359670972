"""Scheduler of a worker group: assignment of parts of batches to workers.

A group processes the batches of the training data in order; a batch has as many parts as there are
members.

    bounded staleness    at clock c a worker has its own part of batch c
    without a bound      an idle worker gets the next part: a slow worker gets fewer

so that in both cases each example is used once an epoch. Unfinished parts of a dropped worker are
assigned again (without a bound), or computed by another worker on its behalf (`members`).

Work is granted up to a batch, at which a round ends for evaluation or a checkpoint. If the run is
to end earlier, no more parts are assigned, and parts that were not begun come back (`holding`).

Without a bound several parts are assigned at a time, so that small steps do not wait for the
scheduler: with r parts left and m workers, r / 4m, so that single parts are assigned near the end
and a slow worker delays no other worker.

Source: Li et al. 2014, section 4.1 (a task scheduler for each group); Polychronopoulos and Kuck
1987, "Guided Self-Scheduling".
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from dure.parameter_server.members import WorkerMembers

_MOST_DEALT = 32
"""Largest number of parts in an assignment."""


class BatchPart(msgspec.Struct, frozen=True):
    """Part `part`, counted from 0, of the `parts` of a batch."""

    batch: int
    part: int
    parts: int


class Scheduler:
    """Scheduler of a group. `bounded`: whether staleness has a bound."""

    def __init__(self, members: WorkerMembers, bounded: bool) -> None:
        self.members = members
        self.bounded = bounded
        self.until = 0
        """First batch that may not be begun."""
        self.held = False
        """Whether no more parts are assigned, since the run is to end."""
        self._dealt = 0
        """Number of parts that were assigned for the first time."""
        self._again: list[BatchPart] = []
        self._out: dict[int, list[BatchPart]] = {}
        self._gone: set[int] = set()

    def next(self, worker: int, clock: int, asked: BatchPart | None = None) -> BatchPart | None:
        """Return a worker's part at its clock; None without work.

        `asked` is the earlier result of this call, for which the worker has pulled the weights.
        """
        if self.bounded:
            workers = self.members.at(clock)
            if clock >= self.until or worker not in workers:
                return None
            return BatchPart(clock, workers.index(worker), len(workers))
        if asked is not None:
            return asked
        # A dropped worker may resume and ask.
        if worker in self._gone:
            return None
        work = self._again.pop(0) if self._again else self._fresh()
        if work is not None:
            self._out.setdefault(worker, []).append(work)
        return work

    def deal(self, worker: int) -> tuple[BatchPart, ...]:
        """Return parts for a worker that has asked for some, without a bound; may be empty."""
        if self.held:
            return ()
        count = min(_MOST_DEALT, max(1, self._left() // (4 * self._parts())))
        found: list[BatchPart] = []
        while len(found) < count and (work := self.next(worker, 0)) is not None:
            found.append(work)
        return tuple(found)

    def done(self, worker: int, work: BatchPart) -> None:
        """Record that every server has a worker's part."""
        if not self.bounded:
            self._out[worker].remove(work)

    def back(self, worker: int, works: Sequence[BatchPart]) -> None:
        """Take back parts that a worker has not begun."""
        for work in works:
            self._out[worker].remove(work)
        self._again += works

    def gone(self, worker: int) -> None:
        """Assign the parts of a dropped worker again; the worker gets no more parts."""
        self._gone.add(worker)
        self._again += self._out.pop(worker, [])

    @property
    def idle(self) -> bool:
        """Whether all granted parts are done; after `held`, whether no worker has a part.

        Only for groups without a bound.
        """
        left = self._left() + len(self._again)
        return not any(self._out.values()) and (self.held or not left)

    def undone(self) -> tuple[int, tuple[BatchPart, ...]]:
        """Return the first batch that was not assigned, and the earlier parts that are not done.

        Only for an idle group without a bound.
        """
        batches = -(-self._dealt // self._parts())
        rest = range(self._dealt, batches * self._parts())
        return batches, (*self._again, *map(self._work, rest))

    def _left(self) -> int:
        return self.until * self._parts() - self._dealt

    def _parts(self) -> int:
        """Return the number of parts of a batch, equal to the initial number of workers."""
        return len(self.members.workers)

    def _fresh(self) -> BatchPart | None:
        if self._left() == 0:
            return None
        self._dealt += 1
        return self._work(self._dealt - 1)

    def _work(self, number: int) -> BatchPart:
        """Return a part by its number over all batches."""
        batch, part = divmod(number, self._parts())
        return BatchPart(batch, part, self._parts())

    def resume(self, batches: int, undone: Sequence[BatchPart] = ()) -> None:
        """Resume after `batches` batches, of which the parts `undone` are not done."""
        self.until = batches
        self._dealt = batches * self._parts()
        self._again = list(undone)
