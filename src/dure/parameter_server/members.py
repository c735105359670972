"""Who takes part in which clock: the workers of a group, and how that changes when one dies.

A group's workers share its batches: at clock c each of the m workers that take part has its part of
batch c, one of m. So who takes part has to be the same for everybody at every clock, and a change
can only be made from a clock on that nobody has begun.

With staleness s nobody has begun a clock beyond k + s, where k pushes of the dead worker arrived
somewhere: all others wait for it. So from clock

    k + s + 1

on it takes part no more, and the parts that it owes before that are computed by another, in its
name: each example counts once. Without a bound there is no clock that nobody has begun; there a
scheduler deals out the parts.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import msgspec


class Change(msgspec.Struct, frozen=True):
    """From this clock on these workers take part, in order."""

    clock: int
    workers: tuple[int, ...]


class Members(msgspec.Struct, frozen=True):
    """The workers of a group, clock by clock. changes: in order; the first is at 0 or before it."""

    changes: tuple[Change, ...]

    @classmethod
    def of(cls, workers: Sequence[int]) -> Members:
        """A group in which these take part from the start."""
        return cls((Change(0, tuple(workers)),))

    def at(self, clock: int) -> tuple[int, ...]:
        """Who takes part in this clock."""
        return next(c.workers for c in reversed(self.changes) if c.clock <= clock)

    def without(self, worker: int, clock: int) -> Members:
        """The same, but that a worker takes part no more from this clock on."""
        kept = tuple(change for change in self.changes if change.clock < clock)
        if not kept:  # who takes part in no clock at all is known as well
            kept = (Change(clock - 1, self.workers),)
        later = [Change(clock, self.at(clock)), *(c for c in self.changes if c.clock > clock)]
        left = (
            Change(change.clock, tuple(w for w in change.workers if w != worker))
            for change in later
        )
        return Members(kept + tuple(left))

    def end(self, worker: int) -> int | None:
        """From which clock on a worker takes part no more; None if it does to the end."""
        if worker in self.changes[-1].workers:
            return None
        last = max(n for n, change in enumerate(self.changes) if worker in change.workers)
        return self.changes[last + 1].clock

    @property
    def workers(self) -> tuple[int, ...]:
        """All who ever take part."""
        return tuple(dict.fromkeys(w for change in self.changes for w in change.workers))

    def floor(self, times: Sequence[tuple[int, int]]) -> float:
        """The least time of those who are waited for; infinity where nobody is.

        times: (worker, its pushes). One that takes part no more is waited for until its last part
        is there.
        """
        there = {time: frozenset(self.at(time)) for time in {time for _, time in times}}
        return min((time for worker, time in times if worker in there[time]), default=math.inf)
