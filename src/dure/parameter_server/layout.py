"""What the manager says, and everybody acts upon: who owns which shard, and who takes part.

There is one layout at a time, with a version. A node that hears of a newer one takes it as a whole,
so that it can be told twice, or late, without harm. Each shard has an *epoch*, which grows when its
owner or its replica changes: what is said to a shard names the epoch, and a server that was
replaced while it slept is refused by it. Each worker has a *life*, which grows when it is given up:
what it pushes afterwards is refused.
"""

from __future__ import annotations

from collections.abc import Mapping

import msgspec

from dure.parameter_server.members import Members


class Placed(msgspec.Struct, frozen=True):
    """Where a shard is. owner: the server that answers for it; None where it is lost.

    replica: who holds a copy; None where nobody does.
    """

    owner: int | None
    replica: int | None
    epoch: int = 0


class Owed(msgspec.Struct, frozen=True):
    """Parts of a worker that was given up, which another computes in its name.

    first … stop-1: the clocks. by: the other.
    """

    worker: int
    first: int
    stop: int
    by: int


class Layout(msgspec.Struct, frozen=True, tag=True):
    """Where everything is.

    shards: by number. groups: the workers of each. lives: of each worker, 0 at first. closing:
    workers that were given up, and of whose pushes the servers are to say how many they have.
    """

    version: int
    shards: tuple[Placed, ...]
    groups: tuple[Members, ...]
    lives: Mapping[int, int] = {}
    closing: tuple[int, ...] = ()
    owed: tuple[Owed, ...] = ()

    def life(self, worker: int) -> int:
        """Which life of a worker counts."""
        return self.lives.get(worker, 0)

    def owned_by(self, server: int) -> list[int]:
        """The shards that a server answers for."""
        return [n for n, placed in enumerate(self.shards) if placed.owner == server]

    def held_by(self, server: int) -> list[int]:
        """The shards of which a server has the copy."""
        return [n for n, placed in enumerate(self.shards) if placed.replica == server]

    def group_of(self, worker: int) -> int:
        """The number of a worker's group. Raises ValueError for one that is in none."""
        for number, members in enumerate(self.groups):
            if worker in members.workers:
                return number
        raise ValueError(f"worker {worker} is in no group")
