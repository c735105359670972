"""The scheduler of a worker group: who computes which part of which batch.

A group goes over the batches of the training data in order; a batch has as many parts as workers
take part.

    bounded staleness    at clock c a worker has its own part of batch c
    without a bound      whoever is free gets the next part: a slow worker gets fewer

so that in both each example is used once an epoch. What a worker had and did not finish when it was
given up is dealt out again (without a bound), or is owed and computed in its name (`members`).

Work is granted up to a batch: where a run is evaluated or saved, all meet. Where it is to end
before that, nothing more is dealt out, and what was not begun comes back (`holding`).

Without a bound several parts are dealt out at a time, so that small steps do not wait for the
dealer: with r parts left and m workers, r / 4m, so that near the end they are single ones and a
slow worker keeps nobody waiting.

Source: Li et al. 2014, section 4.1 (a task scheduler for each group); Polychronopoulos and Kuck
1987, "Guided Self-Scheduling".
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from dure.parameter_server.members import Members

_MOST_DEALT = 32
"""Parts at a time, at most."""


class Work(msgspec.Struct, frozen=True):
    """Part `part`, counted from 0, of the `parts` of a batch."""

    batch: int
    part: int
    parts: int


class Scheduler:
    """Of the group `members`. bounded: whether there is a bound on the staleness."""

    def __init__(self, members: Members, bounded: bool) -> None:
        self.members = members
        self.bounded = bounded
        self.until = 0
        """Batches before this one may be begun."""
        self.held = False
        """Whether nothing more is dealt out, since the run is to end."""
        self._dealt = 0
        """Parts that were dealt out for the first time."""
        self._again: list[Work] = []
        self._out: dict[int, list[Work]] = {}
        self._gone: set[int] = set()

    def next(self, worker: int, clock: int, asked: Work | None = None) -> Work | None:
        """What a worker does at its clock; None where it has nothing to do now.

        asked: what this has said before, when the weights for it were asked for.
        """
        if self.bounded:
            workers = self.members.at(clock)
            if clock >= self.until or worker not in workers:
                return None
            return Work(clock, workers.index(worker), len(workers))
        if asked is not None:
            return asked
        # One that was stopped, and given up, may wake and ask.
        if worker in self._gone:
            return None
        work = self._again.pop(0) if self._again else self._fresh()
        if work is not None:
            self._out.setdefault(worker, []).append(work)
        return work

    def deal(self, worker: int) -> tuple[Work, ...]:
        """Parts for a worker that has asked for some, where there is no bound; none if none are
        left."""
        if self.held:
            return ()
        count = min(_MOST_DEALT, max(1, self._left() // (4 * self._parts())))
        found: list[Work] = []
        while len(found) < count and (work := self.next(worker, 0)) is not None:
            found.append(work)
        return tuple(found)

    def done(self, worker: int, work: Work) -> None:
        """Every server has what a worker has computed of a part."""
        if not self.bounded:
            self._out[worker].remove(work)

    def back(self, worker: int, works: Sequence[Work]) -> None:
        """A worker gives back what it has not begun."""
        for work in works:
            self._out[worker].remove(work)
        self._again += works

    def gone(self, worker: int) -> None:
        """A worker was given up: what it had is dealt out again, and it gets nothing any more."""
        self._gone.add(worker)
        self._again += self._out.pop(worker, [])

    @property
    def idle(self) -> bool:
        """Whether everything granted was dealt out and done; if it is held, whether nobody has any.

        Asked where there is no bound.
        """
        left = self._left() + len(self._again)
        return not any(self._out.values()) and (self.held or not left)

    def undone(self) -> tuple[int, tuple[Work, ...]]:
        """Before which batch it stands, and the parts before that which nobody has done.

        Asked when it is idle, where there is no bound.
        """
        batches = -(-self._dealt // self._parts())
        rest = range(self._dealt, batches * self._parts())
        return batches, (*self._again, *map(self._work, rest))

    def _left(self) -> int:
        return self.until * self._parts() - self._dealt

    def _parts(self) -> int:
        """Into how many parts a batch is divided: as many as there were workers at first."""
        return len(self.members.workers)

    def _fresh(self) -> Work | None:
        if self._left() == 0:
            return None
        self._dealt += 1
        return self._work(self._dealt - 1)

    def _work(self, number: int) -> Work:
        """A part by its number over all batches."""
        batch, part = divmod(number, self._parts())
        return Work(batch, part, self._parts())

    def resume(self, batches: int, undone: Sequence[Work] = ()) -> None:
        """So many batches were granted, dealt out and done before, but for some parts of them."""
        self.until = batches
        self._dealt = batches * self._parts()
        self._again = list(undone)
