"""How a run ends before all meet: what is begun is finished, and all stand where it can go on.

    leader -> workers   Hold    begin nothing more
    worker -> leader    Held    this is the first of my batches that I have not begun
    leader -> workers   Grant   up to here

Workers that have to be equally far, such as those of a group with a bound on their staleness, are
granted the batches up to the furthest of them: those who are behind catch up, so that nobody waits
for somebody who has stopped. A worker that was given up takes part in some batches still, which
others do in its name; these belong to them too. Without a bound each stops where it is, and the
parts that it has not begun go back to the scheduler.

No I/O and no clock.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence

import msgspec

from dure.parameter_server.members import Members
from dure.parameter_server.scheduler import Work


class Standing(msgspec.Struct, frozen=True):
    """Where workers stand.

    until: of each, before which of its batches it is to go on. undone: of each group, the parts
    before that which nobody has done.
    """

    until: Mapping[int, int]
    undone: Sequence[Sequence[Work]]


class Holding:
    """Workers are to end. teams: those that have to be equally far; a worker is in one, or none."""

    def __init__(self, teams: Sequence[Sequence[int]]) -> None:
        self.teams = teams
        self.until: dict[int, int] = {}
        """Up to where each is granted, once that is known; of those in no team nothing, nor of a
        team in which nobody is alive."""
        self._said: dict[int, int] = {}
        self._decided = False

    def held(self, worker: int, until: int) -> None:
        """A worker has said before which of its batches it has stopped."""
        self._said[worker] = until

    def awaited(self, alive: Collection[int]) -> list[int]:
        """Those who have said nothing yet."""
        return [worker for worker in alive if worker not in self._said]

    def decide(self, alive: Collection[int], least: Callable[[int], int]) -> bool:
        """Decides up to where each is granted, once all who are alive have said something.

        least: of the worker, up to where its team has to go in any case. Whether it is decided now.
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
        """Whether everybody knows up to where it goes."""
        return self._decided


def owed_until(members: Members, until: int) -> int:
    """Before which batch those who were given up take part in none, of the `until` granted ones."""
    ends = [end for worker in members.workers if (end := members.end(worker)) is not None]
    return min(max(ends, default=0), until)
