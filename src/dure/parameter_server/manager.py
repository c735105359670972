"""The manager: who is alive, and who owns what.

    a node beats every so often            heard
    silent for `patience` seconds, or lost given up

A server that is given up loses its shards to those that hold their copies, and these get another
copy at the next server alive; a shard without a copy is lost, which is told and not hidden. A
worker that is given up takes part no more from a clock on that nobody has begun, and what it owes
until then another computes (`members`); where others cannot, since each has data of its own, it
takes part no more from the first clock of which a server lacks its push. A worker that leaves by
itself takes part no more from its last clock on. Everything is said by a new layout, which the
manager writes down before it says it: after a restart it goes on from there, while pushes and pulls
have gone on without it.

No I/O and no clock: `now` is an argument, in seconds of the manager's own clock.

Source: Li et al. 2014, section 4.2 and 4.6 (server manager, heartbeats).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import msgspec

from dure.parameter_server.layout import Layout, Owed, Placed
from dure.parameter_server.members import Members
from dure.parameter_server.messages import Beat, Count, Envelope, Lease, Message, server, worker


class Loss(NamedTuple):
    """What went with a server. shards: those that nobody has a copy of."""

    server: int
    reason: str
    shards: tuple[int, ...]


def first_layout(
    owners: Sequence[int], servers: int, groups: Sequence[Sequence[int]], replicas: int = 0
) -> Layout:
    """The layout of the beginning.

    owners: of each shard. groups: the workers of each. replicas: copies of each shard, 0 or 1; the
    next server has it. Raises ValueError for a copy that no server can have.
    """
    if replicas not in (0, 1):
        raise ValueError(f"replicas is {replicas}, but a shard has no copy, or one")
    if replicas and servers < 2:
        raise ValueError("a copy of a shard needs a second server: take servers=2, or replicas=0")
    placed = (Placed(owner, (owner + 1) % servers if replicas else None) for owner in owners)
    return Layout(0, tuple(placed), tuple(Members.of(workers) for workers in groups))


class Manager:
    """The manager of servers 0 … servers-1 and of the layout's workers.

    staleness: of the workers. patience: seconds of silence after which a node is given up; a
    server's lease is as long. inherits: whether others compute what a worker owes that was given
    up.
    """

    def __init__(
        self,
        layout: Layout,
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
        self.losses: list[Loss] = []
        """Servers that were given up, for whoever has to be told."""
        self._dead: dict[str, str] = {}
        self._left: set[str] = set()
        self._heard: dict[str, float] = {}
        self._counts: dict[tuple[int, int], Count] = {}
        """What the servers have of workers that are closing: by worker and shard."""

    @property
    def workers(self) -> tuple[int, ...]:
        """All that there ever were."""
        return tuple(w for members in self.layout.groups for w in members.workers)

    def alive(self, node: str) -> bool:
        """Whether a node was not given up, and has not left."""
        return node not in self._dead and node not in self._left

    @property
    def dead(self) -> Mapping[str, str]:
        """Who was given up, and why."""
        return self._dead

    def receive(self, sender: str, message: Message, now: float) -> list[Envelope]:
        """What it says to a beat; other messages are not for it, and it says nothing."""
        if not isinstance(message, Beat):
            return []
        said: list[Envelope] = []
        # One that was given up is told so, by the layout; it is not taken back.
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
        """When it is to be told that time has passed."""
        alive = [node for node in self._nodes() if self.alive(node)]
        return min((self._heard.get(node, 0.0) + self.patience for node in alive), default=1e300)

    def tick(self, now: float) -> list[Envelope]:
        """Gives up those who were silent for too long."""
        said: list[Envelope] = []
        for node in self._nodes():
            since = self._heard.setdefault(node, now)
            if self.alive(node) and now >= since + self.patience:
                said += self.lost(node, f"was silent for {self.patience:g} s", now)
        return said

    def lost(self, node: str, reason: str, now: float) -> list[Envelope]:
        """A node is gone for good. For the silent, `tick` says so."""
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
        """A worker leaves, after so many pushes, all of which every server has."""
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
        """The layout, to everybody."""
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
            shards.append(Placed(owner, self._next_to(owner), placed.epoch + 1))
        self.losses.append(Loss(number, reason, tuple(lost)))
        self._change(shards=tuple(shards))

    def _without(self, beat: Beat) -> list[Envelope]:
        """Shards that went with their owner before the copy was made are lost."""
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
        self.losses.append(Loss(number, "had no copy yet when the owner went", tuple(held)))
        shards = [
            Placed(None, None, placed.epoch + 1) if shard in held else placed
            for shard, placed in enumerate(self.layout.shards)
        ]
        self._change(shards=tuple(shards))
        return self._say()

    def _next_to(self, owner: int | None) -> int | None:
        """Who holds the copy of a shard of this owner."""
        if owner is None or not self.replicas:
            return None
        others = [(owner + step) % self.servers for step in range(1, self.servers)]
        return next((other for other in others if self.alive(server(other))), None)

    # Workers

    def _give_up_worker(self, number: int) -> None:
        # What it computes for others comes to an end as well; another will do it.
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

    def _count(self, count: Count) -> None:
        placed = self.layout.shards[count.shard]
        if count.epoch == placed.epoch and count.life == self.layout.life(count.worker):
            self._counts[count.worker, count.shard] = count

    def _close(self) -> list[Envelope]:
        """Those of whom all servers have said what they have take part no more."""
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
        """A worker takes part no more. least, most: how many of its pushes the shards have."""
        number = self.layout.group_of(who)
        members = self.layout.groups[number]
        stop = members.end(who)
        if stop is None:
            stop = self._stop(least, most)
            members = members.without(who, stop)
        owed = list(self.layout.owed)
        heirs = [w for w in members.changes[-1].workers if self.alive(worker(w))]
        # Without a bound nobody waits for it, and what it had begun is dealt out again.
        if self.staleness is not None and least < stop and heirs:
            busy = [one.by for one in owed]
            owed.append(Owed(who, least, stop, min(heirs, key=busy.count)))
        groups = list(self.layout.groups)
        groups[number] = members
        self._change(
            groups=tuple(groups),
            owed=tuple(owed),
            closing=tuple(one for one in self.layout.closing if one != who),
        )

    def _stop(self, least: int, most: int) -> int:
        """From which clock on one that was given up takes part no more."""
        if not self.inherits:
            return least
        return most if self.staleness is None else most + self.staleness + 1

    # Restarts

    def state(self) -> dict[str, Any]:
        """What has to be written down before a new layout is said."""
        return {
            "layout": msgspec.to_builtins(self.layout),
            "dead": dict(self._dead),
            "left": sorted(self._left),
        }

    def restore(self, state: Mapping[str, Any]) -> None:
        """Goes on from what was written down. Nodes have time anew to be heard."""
        self.layout = msgspec.convert(state["layout"], Layout, strict=False)
        self._dead = dict(state["dead"])
        self._left = set(state["left"])
        self._heard = {}
        self._counts = {}
