"""Graceful stop of a run between rounds: begun work is finished, and the state can be resumed.

    leader -> workers   Hold    begin nothing more
    worker -> leader    Held    this is the first of my batches that I have not begun
    leader -> workers   Grant   up to here

Workers that must have made equally many steps, such as those of a group with bounded staleness, are
granted the batches up to the furthest of them: the others catch up, so that no worker waits for a
stopped worker. A dropped worker still takes part in some batches, computed by others on its behalf;
these batches are included. Without a bound each worker stops at once, and the scheduler takes back
the parts that it has not begun.

No I/O and no clock.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence

import msgspec

from dure.parameter_server.members import WorkerMembers
from dure.parameter_server.scheduler import BatchPart


class ResumePoint(msgspec.Struct, frozen=True):
    """Progress of workers at a stop.

    `until` has the first batch of each worker that it has not done. `undone` has, for each group,
    the earlier parts that no worker has done.
    """

    until: Mapping[int, int]
    undone: Sequence[Sequence[BatchPart]]


class GracefulStop:
    """Graceful stop of workers. `teams` lists workers that must have made equally many steps."""

    def __init__(self, teams: Sequence[Sequence[int]]) -> None:
        self.teams = teams
        self.until: dict[int, int] = {}
        """Granted first batch not to do, by worker, after the decision.

        Workers without a team are absent, as are teams without a live worker.
        """
        self._said: dict[int, int] = {}
        self._decided = False

    def held(self, worker: int, until: int) -> None:
        """Record the first batch that a worker has not begun."""
        self._said[worker] = until

    def awaited(self, alive: Collection[int]) -> list[int]:
        """Return the live workers that have not answered."""
        return [worker for worker in alive if worker not in self._said]

    def decide(self, alive: Collection[int], least: Callable[[int], int]) -> bool:
        """Decide the granted batches once all live workers have answered.

        `least` gives a lower bound by worker. Returns whether this call decides.
        """
        if self._decided or self.awaited(alive):
            return False
        self._decided = True
        for team in self.teams:
            said = [max(self._said[one], least(one)) for one in team if one in alive]
            if said:
                self.until.update(dict.fromkeys(team, max(said)))
        return True

    @property
    def decided(self) -> bool:
        """Whether the granted batches are decided."""
        return self._decided


def owed_until(members: WorkerMembers, until: int) -> int:
    """Return the first batch without a part of a dropped worker, at most `until`."""
    ends = [end for worker in members.workers if (end := members.end(worker)) is not None]
    return min(max(ends, default=0), until)
