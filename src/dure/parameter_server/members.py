"""Members of a group by clock, and their change after the loss of a worker.

A group's workers share its batches: at clock c each of the m members has its part of batch c, one
of m. The members of a clock must therefore be the same for all nodes, and a change must begin at a
clock that no worker has begun.

With staleness s no worker has begun a clock beyond k + s if k pushes of the lost worker arrived
anywhere: all others wait for its pushes. So from clock

    k + s + 1

on it takes part no more, and another worker computes its earlier parts on its behalf: each example
counts once. Without a bound every clock may have begun; a scheduler then assigns the parts.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import msgspec


class MembershipChange(msgspec.Struct, frozen=True):
    """Members from a clock on, in order."""

    clock: int
    workers: tuple[int, ...]


class WorkerMembers(msgspec.Struct, frozen=True):
    """Workers of a group by clock. `changes` are ascending; the first is at clock 0 or before."""

    changes: tuple[MembershipChange, ...]

    @classmethod
    def of(cls, workers: Sequence[int]) -> WorkerMembers:
        """Return a group with these members from the start."""
        return cls((MembershipChange(0, tuple(workers)),))

    def at(self, clock: int) -> tuple[int, ...]:
        """Return the members of a clock."""
        return next(c.workers for c in reversed(self.changes) if c.clock <= clock)

    def without(self, worker: int, clock: int) -> WorkerMembers:
        """Return the group with a worker removed from this clock on."""
        kept = tuple(change for change in self.changes if change.clock < clock)
        if not kept:  # a worker that takes part in no clock stays in the list of workers
            kept = (MembershipChange(clock - 1, self.workers),)
        later = [
            MembershipChange(clock, self.at(clock)),
            *(c for c in self.changes if c.clock > clock),
        ]
        left = (
            MembershipChange(change.clock, tuple(w for w in change.workers if w != worker))
            for change in later
        )
        return WorkerMembers(kept + tuple(left))

    def end(self, worker: int) -> int | None:
        """Return the first clock without a worker; None for a worker that stays."""
        if worker in self.changes[-1].workers:
            return None
        last = max(n for n, change in enumerate(self.changes) if worker in change.workers)
        return self.changes[last + 1].clock

    @property
    def workers(self) -> tuple[int, ...]:
        """All workers that ever take part."""
        return tuple(dict.fromkeys(w for change in self.changes for w in change.workers))

    def floor(self, times: Sequence[tuple[int, int]]) -> float:
        """Return the least time of the workers to wait for; infinity if there are none.

        `times` are pairs (worker, number of its pushes). A removed worker counts until its last
        part has arrived.
        """
        there = {time: frozenset(self.at(time)) for time in {time for _, time in times}}
        return min((time for worker, time in times if worker in there[time]), default=math.inf)
