"""Layout: the manager's assignment of shards to servers, and the members of each group.

There is a single layout at a time, with a version. A node replaces its layout by a newer version as
a whole, so repeated and late messages do no harm. Each shard has an *epoch*, which grows when its
owner or its replica changes: messages to a shard name the epoch, and a replaced server's messages
are rejected. Each worker has a *life*, which grows when the worker is dropped: later pushes of the
old life are rejected.
"""

from __future__ import annotations

from collections.abc import Mapping

import msgspec

from dure.parameter_server.members import WorkerMembers


class ShardLocation(msgspec.Struct, frozen=True):
    """Location of a shard.

    Args:
        owner: server that answers for the shard; None for a lost shard.
        replica: server with a copy; None without a copy.
        epoch: number of changes of owner and replica.
    """

    owner: int | None
    replica: int | None
    epoch: int = 0


class ReassignedWork(msgspec.Struct, frozen=True):
    """Parts of a dropped worker that another worker computes on its behalf.

    Args:
        worker: the dropped worker.
        first: first clock.
        stop: last clock + 1.
        by: the worker that computes.
    """

    worker: int
    first: int
    stop: int
    by: int


class ShardLayout(msgspec.Struct, frozen=True, tag="Layout"):
    """Assignment of shards and members.

    Args:
        version: number of the layout.
        shards: location of each shard, by number.
        groups: members of each group.
        lives: life of each worker; 0 by default.
        closing: dropped workers whose pushes the servers are still to count.
        owed: work of dropped workers.
    """

    version: int
    shards: tuple[ShardLocation, ...]
    groups: tuple[WorkerMembers, ...]
    lives: Mapping[int, int] = {}
    closing: tuple[int, ...] = ()
    owed: tuple[ReassignedWork, ...] = ()

    def life(self, worker: int) -> int:
        """Return the valid life of a worker."""
        return self.lives.get(worker, 0)

    def owned_by(self, server: int) -> list[int]:
        """Return the shards that a server answers for."""
        return [n for n, placed in enumerate(self.shards) if placed.owner == server]

    def held_by(self, server: int) -> list[int]:
        """Return the shards of which a server has the copy."""
        return [n for n, placed in enumerate(self.shards) if placed.replica == server]

    def group_of(self, worker: int) -> int:
        """Return the number of a worker's group. Raises ValueError for a worker without a group."""
        for number, members in enumerate(self.groups):
            if worker in members.workers:
                return number
        raise ValueError(f"worker {worker} is in no group")
