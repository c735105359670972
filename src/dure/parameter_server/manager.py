"""Manager: liveness of nodes, and ownership of shards.

    a node sends regular beats               alive
    silent for `patience` seconds, or lost   dropped

The shards of a dropped server pass to the servers with their copies, and get a new copy at the next
live server; a shard without a copy is lost, and the loss is reported. A dropped worker takes part
no more from a clock that no worker has begun, and another worker computes its earlier parts
(`members`). If others cannot compute them, since each has its own data, the dropped worker takes
part no more from the first clock of which a server lacks its push. A worker that leaves takes part
no more after its last clock. Each change is a new layout, which the manager records before sending:
a restarted manager resumes from the record, while pushes and pulls continue without the manager.

No I/O and no clock: `now` is an argument, in seconds of the manager's own clock.

Source: Li et al. 2014, section 4.2 and 4.6 (server manager, heartbeats).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import msgspec

from dure.parameter_server.layout import ReassignedWork, ShardLayout, ShardLocation
from dure.parameter_server.members import WorkerMembers
from dure.parameter_server.messages import (
    Envelope,
    Lease,
    Message,
    PushCount,
    ServerBeat,
    server,
    worker,
)


class ServerLoss(NamedTuple):
    """A dropped server, the reason, and the shards without a copy."""

    server: int
    reason: str
    shards: tuple[int, ...]


def first_layout(
    owners: Sequence[int], servers: int, groups: Sequence[Sequence[int]], replicas: int = 0
) -> ShardLayout:
    """Return the initial layout.

    Args:
        owners: owner of each shard.
        servers: number of servers.
        groups: workers of each group.
        replicas: copies of each shard, 0 or 1; the next server has the copy.

    Raises ValueError for copies that the servers cannot have.
    """
    if replicas not in (0, 1):
        raise ValueError(f"replicas is {replicas}, but it has to be 0 or 1")
    if replicas and servers < 2:
        raise ValueError("a copy of a shard needs a second server: set servers=2, or replicas=0")
    placed = (ShardLocation(owner, (owner + 1) % servers if replicas else None) for owner in owners)
    return ShardLayout(0, tuple(placed), tuple(WorkerMembers.of(workers) for workers in groups))


class Manager:
    """Manager of servers 0 … servers-1 and of the layout's workers.

    Args:
        layout: initial layout.
        servers: number of servers.
        staleness: bound of the workers; None without a bound.
        patience: seconds of silence after which a node is dropped; also the length of a server's
            lease.
        replicas: copies of each shard.
        inherits: whether others compute the owed parts of a dropped worker.
    """

    def __init__(
        self,
        layout: ShardLayout,
        servers: int,
        staleness: int | None,
        patience: float = 2.0,
        replicas: int = 0,
        inherits: bool = True,
    ) -> None:
        self.layout = layout
        self.servers = servers
        self.staleness = staleness
        self.patience = patience
        self.replicas = replicas
        self.inherits = inherits
        self.losses: list[ServerLoss] = []
        """Dropped servers, for reports."""
        self._dead: dict[str, str] = {}
        self._left: set[str] = set()
        self._heard: dict[str, float] = {}
        self._counts: dict[tuple[int, int], PushCount] = {}
        """Push counts of closing workers, by worker and shard."""

    @property
    def workers(self) -> tuple[int, ...]:
        """All workers since the beginning."""
        return tuple(w for members in self.layout.groups for w in members.workers)

    def alive(self, node: str) -> bool:
        """Return whether a node was neither dropped nor has left."""
        return node not in self._dead and node not in self._left

    @property
    def dead(self) -> Mapping[str, str]:
        """Dropped nodes, with the reasons."""
        return self._dead

    def receive(self, sender: str, message: Message, now: float) -> list[Envelope]:
        """Return the messages that answer a beat; ignores other messages."""
        if not isinstance(message, ServerBeat):
            return []
        said: list[Envelope] = []
        # A dropped node learns of its drop from the layout and is not admitted again.
        if self.alive(message.node):
            self._heard[message.node] = now
            if message.node in map(server, range(self.servers)):
                said.append((message.node, Lease(message.sent, self.patience)))
        for count in message.counts:
            self._count(count)
        changed = self._without(message)
        changed += self._close()
        if not changed and message.layout < self.layout.version:
            said.append((message.node, self.layout))
        return [*said, *changed]

    @property
    def wake(self) -> float:
        """Time of the next `tick`."""
        alive = [node for node in self._nodes() if self.alive(node)]
        return min((self._heard.get(node, 0.0) + self.patience for node in alive), default=1e300)

    def tick(self, now: float) -> list[Envelope]:
        """Drop the nodes that were silent for too long; returns messages."""
        said: list[Envelope] = []
        for node in self._nodes():
            since = self._heard.setdefault(node, now)
            if self.alive(node) and now >= since + self.patience:
                said += self.lost(node, f"was silent for {self.patience:g} s", now)
        return said

    def lost(self, node: str, reason: str, now: float) -> list[Envelope]:
        """Drop a node that is known to be lost; `tick` detects silent nodes."""
        if not self.alive(node):
            return []
        self._dead[node] = reason
        kind, _, number = node.partition(" ")
        if kind == "server":
            self._give_up_server(int(number), reason)
        else:
            self._give_up_worker(int(number))
        return [*self._say(), *self._close()]

    def leave(self, who: int, clock: int) -> list[Envelope]:
        """Remove a worker after `clock` pushes, all of which every server has."""
        if not self.alive(worker(who)):
            return []
        self._left.add(worker(who))
        groups = list(self.layout.groups)
        number = self.layout.group_of(who)
        groups[number] = groups[number].without(who, clock)
        self._change(groups=tuple(groups))
        return self._say()

    def _nodes(self) -> list[str]:
        return [*map(server, range(self.servers)), *map(worker, self.workers)]

    def _say(self) -> list[Envelope]:
        """Return the layout as messages to all live nodes."""
        return [(node, self.layout) for node in self._nodes() if self.alive(node)]

    def _change(self, **fields: Any) -> None:
        self.layout = msgspec.structs.replace(
            self.layout, version=self.layout.version + 1, **fields
        )

    # Servers

    def _give_up_server(self, number: int, reason: str) -> None:
        shards = []
        lost = []
        for shard, placed in enumerate(self.layout.shards):
            if placed.owner == number:
                owner = placed.replica
                if owner is None:
                    lost.append(shard)
            elif placed.replica == number:
                owner = placed.owner
            else:
                shards.append(placed)
                continue
            shards.append(ShardLocation(owner, self._next_to(owner), placed.epoch + 1))
        self.losses.append(ServerLoss(number, reason, tuple(lost)))
        self._change(shards=tuple(shards))

    def _without(self, beat: ServerBeat) -> list[Envelope]:
        """Mark shards as lost whose owner was lost before the copy was complete."""
        held = [
            shard
            for shard in beat.without
            if self.alive(beat.node)
            and beat.layout == self.layout.version
            and self.layout.shards[shard].owner is not None
        ]
        if not held:
            return []
        number = int(beat.node.partition(" ")[2])
        self.losses.append(ServerLoss(number, "had no copy yet when the owner went", tuple(held)))
        shards = [
            ShardLocation(None, None, placed.epoch + 1) if shard in held else placed
            for shard, placed in enumerate(self.layout.shards)
        ]
        self._change(shards=tuple(shards))
        return self._say()

    def _next_to(self, owner: int | None) -> int | None:
        """Return the server for the copy of a shard of this owner; None without copies."""
        if owner is None or not self.replicas:
            return None
        others = [(owner + step) % self.servers for step in range(1, self.servers)]
        return next((other for other in others if self.alive(server(other))), None)

    # Workers

    def _give_up_worker(self, number: int) -> None:
        # Its work on behalf of others ends as well; another worker will take over.
        theirs = [owed.worker for owed in self.layout.owed if owed.by == number]
        closing = (number, *theirs)
        lives = {**self.layout.lives, **{w: self.layout.life(w) + 1 for w in closing}}
        self._change(
            lives=lives,
            closing=tuple(dict.fromkeys((*self.layout.closing, *closing))),
            owed=tuple(owed for owed in self.layout.owed if owed.by != number),
        )
        for key in [key for key in self._counts if key[0] in closing]:
            del self._counts[key]

    def _count(self, count: PushCount) -> None:
        placed = self.layout.shards[count.shard]
        if count.epoch == placed.epoch and count.life == self.layout.life(count.worker):
            self._counts[count.worker, count.shard] = count

    def _close(self) -> list[Envelope]:
        """End the closing workers whose pushes all servers have counted."""
        there = [n for n, placed in enumerate(self.layout.shards) if placed.owner is not None]
        closed = [
            who
            for who in self.layout.closing
            if all((who, shard) in self._counts for shard in there)
        ]
        if not closed or not there:
            return []
        for who in closed:
            counts = [self._counts.pop((who, shard)) for shard in there]
            self._end(who, min(c.least for c in counts), max(c.most for c in counts))
        return self._say()

    def _end(self, who: int, least: int, most: int) -> None:
        """End the participation of a worker, of whose pushes the shards have `least` to `most`."""
        number = self.layout.group_of(who)
        members = self.layout.groups[number]
        stop = members.end(who)
        if stop is None:
            stop = self._stop(least, most)
            members = members.without(who, stop)
        owed = list(self.layout.owed)
        heirs = [w for w in members.changes[-1].workers if self.alive(worker(w))]
        # Without a bound no worker waits for its parts, and the scheduler assigns them again.
        if self.staleness is not None and least < stop and heirs:
            busy = [one.by for one in owed]
            owed.append(ReassignedWork(who, least, stop, min(heirs, key=busy.count)))
        groups = list(self.layout.groups)
        groups[number] = members
        self._change(
            groups=tuple(groups),
            owed=tuple(owed),
            closing=tuple(one for one in self.layout.closing if one != who),
        )

    def _stop(self, least: int, most: int) -> int:
        """Return the first clock without the dropped worker."""
        if not self.inherits:
            return least
        return most if self.staleness is None else most + self.staleness + 1

    # Restarts

    def state(self) -> dict[str, Any]:
        """Return the state to record before a new layout is sent."""
        return {
            "layout": msgspec.to_builtins(self.layout),
            "dead": dict(self._dead),
            "left": sorted(self._left),
        }

    def restore(self, state: Mapping[str, Any]) -> None:
        """Restore a recorded state. All nodes get the full patience again."""
        self.layout = msgspec.convert(state["layout"], ShardLayout, strict=False)
        self._dead = dict(state["dead"])
        self._left = set(state["left"])
        self._heard = {}
        self._counts = {}
