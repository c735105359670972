"""Server: the shards that it owns, and its copies of other shards.

With a replica, an update is first sent to the replica, and applied here after the replica has
applied it; only then are its pushes acknowledged. Answers contain only applied updates:

    push -> step n -> Replicate(n) -> the copy applies it -> Replicated(n) -> applied here
                                                          -> Acknowledged, Values

If steps are clipped, servers first exchange norms (`clipping`).

The next owner of a shard therefore has all updates that any node has seen. If a whole clock becomes
a single step, a single step is replicated for all workers.

A server answers only while it has a lease. The manager grants the lease with every beat, and waits
for its end before it assigns the shards to another server. A stopped server that resumes finds its
lease expired, and asks the manager first.

No I/O and no clock: `now` is an argument, in seconds of this server's own clock.

Source: Li et al. 2014, sections 4.3 and 4.4 (replication after aggregation); Gray and Cheriton 1989
(leases).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

from dure.parameter_server.clipping import PATIENCE, GroupClock, NormExchange, norms_at
from dure.parameter_server.layout import ShardLayout
from dure.parameter_server.messages import (
    MANAGER,
    Acknowledged,
    Envelope,
    Lease,
    Message,
    Norms,
    Pull,
    Push,
    PushCount,
    PushRefused,
    Reason,
    Replicate,
    Replicated,
    ServerBeat,
    ShardStep,
    Snapshot,
    server,
    worker,
)
from dure.parameter_server.shard import Shard, Terms
from dure.parameter_server.table_shard import shard_of
from dure.parameter_server.worker import RETURN


@dataclass
class OwnedShard:
    """Shard that this server owns.

    Args:
        shard: the shard.
        epoch: epoch of the shard.
        replica: server with the copy; None without a copy.
        snapshot: as below.
        waiting: steps that the replica has not confirmed, by number; the first is `shard.version`.
        sent: time of the last transmission of these steps or of the snapshot.
        cut: as below.
    """

    shard: Shard
    epoch: int
    replica: int | None = None
    snapshot: bool = False
    """Whether the replica has not confirmed its initial snapshot yet."""
    waiting: dict[int, ShardStep] = field(default_factory=dict)
    sent: float = -math.inf
    cut: bool = False
    """Whether messages since then may be lost, by a broken connection or a rejection."""


@dataclass
class ShardCopy:
    """Copy of a shard at this server. `early` has steps that arrived out of order."""

    epoch: int
    shard: Shard | None = None
    early: dict[int, ShardStep] = field(default_factory=dict)


class ShardServer:
    """Server `number`. Its shards arrive as snapshots.

    Args:
        number: number of the server.
        layout: initial layout.
        terms: training terms of the shards.
        beat: seconds between heartbeats; None sends none.
        patience: seconds before a retry; infinity if messages are lost only by broken connections
            (`cut`).
    """

    def __init__(
        self,
        number: int,
        layout: ShardLayout,
        terms: Terms,
        beat: float | None = 0.5,
        patience: float = 1.0,
    ) -> None:
        self.number = number
        self.name = server(number)
        self.layout = layout
        self.terms = terms
        self.beat = beat
        self.patience = patience
        self.owned: dict[int, OwnedShard] = {}
        self.copies = {
            shard: ShardCopy(layout.shards[shard].epoch) for shard in layout.held_by(number)
        }
        self.lease = math.inf
        """End of the lease; infinity before the manager grants a first lease."""
        self._next_beat = -math.inf if beat is not None else math.inf
        self._norms = NormExchange()
        self._first_layout = layout.version
        self._speakers: dict[int, str] = {}
        """Node that sends for a worker.

        The worker itself, or the node that computes on its behalf.
        """
        self._receivers: dict[type, Callable[..., list[Envelope]]] = {
            Push: self._push,
            Pull: self._pull,
            Replicate: self._replicate,
            Replicated: self._replicated,
            Norms: self._hear_norms,
            Snapshot: self._snapshot,
            PushRefused: self._refused,
            Lease: self._leased,
            ShardLayout: self._laid_out,
        }

    def receive(self, sender: str, message: Message, now: float) -> list[Envelope]:
        """Return the messages that answer a message. Raises ValueError for other message types."""
        receiver = self._receivers.get(type(message))
        if receiver is None:
            raise ValueError(f"a server cannot process {type(message).__name__}")
        return receiver(sender, message, now)

    @property
    def wake(self) -> float:
        """Time of the next `tick`."""
        due = [self._due(one) for one in self.owned.values() if self._expects(one)]
        return min([self._next_beat, self._norms_due, *due])

    def tick(self, now: float) -> list[Envelope]:
        """Process due events: a heartbeat, and retries. Returns messages."""
        said: list[Envelope] = []
        if now >= self._next_beat:
            said += self._beats(now)
        for number, one in self.owned.items():
            if self._expects(one) and now >= self._due(one):
                said += self._to_replica(number, one, now)
        if now >= self._norms_due:
            said += self._ask_for_norms(now)
        return said

    # Pushes

    def _push(self, sender: str, push: Push, now: float) -> list[Envelope]:
        refused = self._check(push.shard, push.epoch, push.worker, push.life, now)
        if refused is not None:
            return [(sender, refused)]
        self._speakers[push.worker] = sender
        one = self.owned[push.shard]
        full = one.shard.full(push)
        if full is None:
            return [(sender, self._no(push.shard, "rows"))]
        steps = one.shard.push(full, self.layout)
        said = self._take(push.shard, one, steps, now)
        if one.shard.unclipped:
            return [*said, *self._clip(now)]
        if not steps and push.clock < one.shard.contains(push.worker, push.start):
            # A retry, since the acknowledgement was lost: acknowledge again.
            said.append((sender, _acknowledged(one.shard, push.worker, push.start)))
        return said

    def _take(
        self, number: int, one: OwnedShard, steps: Iterable[ShardStep], now: float
    ) -> list[Envelope]:
        """Apply steps, or send them to the replica first."""
        said: list[Envelope] = []
        for step in steps:
            if one.replica is None:
                said += self._apply(one, step)
                continue
            place = one.shard.version + len(one.waiting)
            # The retry timer starts at the first unconfirmed step; later steps do not delay it.
            if not self._expects(one):
                one.sent = now
            one.waiting[place] = step
            said.append((server(one.replica), Replicate(number, one.epoch, place, step)))
        return said

    def _apply(self, one: OwnedShard, step: ShardStep) -> list[Envelope]:
        """Apply a step; returns acknowledgements of its pushes, and answers to waiting pulls."""
        one.shard.apply(step)
        said: list[Envelope] = [
            (
                self._speaker(made.worker),
                _acknowledged(one.shard, made.worker, step.start),
            )
            for made in step.pushes
        ]
        return said + self._answers(one)

    def _answers(self, one: OwnedShard) -> list[Envelope]:
        """Return the answers to pulls that waited for the latest steps."""
        answers = one.shard.answers(self.layout)
        return [(self._speaker(values.worker), values) for values in answers]

    def _speaker(self, who: int) -> str:
        """Return the node that receives messages for a worker."""
        return self._speakers.get(who, worker(who))

    # Norms

    def _clip(self, now: float) -> list[Envelope]:
        """Clip the steps with complete norms, and send new norms to the other owners."""
        waiting: set[GroupClock] = set()
        for number, one in self.owned.items():
            for at, waited in one.shard.unclipped.items():
                self._norms.note(at, {number: waited.square})
                waiting.add(at)
        said: list[Envelope] = []
        for at in sorted(waiting):
            squares = self._squares(at)
            whole = len(squares) == len(self.layout.shards)
            if self._norms.is_new(at):
                # After a change of owners, other servers may have norms that this server lacks.
                asks = not whole and self.layout.version > self._first_layout
                said += self._to_owners(norms_at(at, squares, asks))
            if whole:
                waiting.discard(at)
                for number, one in self.owned.items():
                    said += self._take(number, one, one.shard.clip(at, squares), now)
        self._norms.keep(waiting, self._clipped())
        self._norms.sent = now if waiting else math.inf
        return said

    def _clipped(self) -> dict[int, int]:
        """Return the last clock of each group with a clipped step here."""
        shards = [one.shard for one in self.owned.values()]
        last = sorted((norms.clock, group) for one in shards for group, norms in one.norms.items())
        return {group: clock for clock, group in last}

    def _squares(self, at: GroupClock) -> dict[int, float]:
        """Return the known squared norms of a step, by shard."""
        squares = dict(self._norms.of(at))
        for one in self.owned.values():
            norms = one.shard.norms.get(at.group)
            if norms is not None and norms.clock == at.clock:
                squares |= norms.squares
        return squares

    def _to_owners(self, message: Norms) -> list[Envelope]:
        """Return a message as envelopes to all other owners of shards."""
        owners = {placed.owner for placed in self.layout.shards if placed.owner is not None}
        return [(server(owner), message) for owner in sorted(owners - {self.number})]

    def _hear_norms(self, sender: str, message: Norms, now: float) -> list[Envelope]:
        at = GroupClock(message.group, message.clock)
        said: list[Envelope] = []
        if at.clock > self._clipped().get(at.group, -1) or self._waits_for(at):
            self._norms.note(at, message.squares)
            said = self._clip(now)
        more = self._squares(at)
        if message.asks and more.keys() - message.squares.keys():
            said.append((sender, norms_at(at, more)))
        return said

    def _waits_for(self, at: GroupClock) -> bool:
        """Return whether a step waits for norms."""
        return any(at in one.shard.unclipped for one in self.owned.values())

    @property
    def _norms_due(self) -> float:
        """Time of the next request for missing norms."""
        patience = self.patience if self.beat is None else min(self.patience, PATIENCE)
        return self._norms.sent + patience

    def _ask_for_norms(self, now: float) -> list[Envelope]:
        """Request the norms of all waiting steps from the other servers."""
        waiting = {at for one in self.owned.values() for at in one.shard.unclipped}
        self._norms.sent = now if waiting else math.inf
        said: list[Envelope] = []
        for at in sorted(waiting):
            said += self._to_owners(norms_at(at, self._squares(at), asks=True))
        return said

    # Pulls

    def _pull(self, sender: str, pull: Pull, now: float) -> list[Envelope]:
        refused = self._check(pull.shard, pull.epoch, pull.worker, pull.life, now)
        if refused is not None:
            return [(sender, refused)]
        self._speakers[pull.worker] = sender
        shard = self.owned[pull.shard].shard
        full = shard.full(pull)
        if full is None:
            return [(sender, self._no(pull.shard, "rows"))]
        values = shard.pull(full, self.layout)
        return [] if values is None else [(sender, values)]

    def _check(
        self, number: int, epoch: int, who: int, life: int, now: float
    ) -> PushRefused | None:
        """Return the rejection of a worker's message; None to accept the message."""
        one = self.owned.get(number)
        if now > self.lease:
            return self._no(number, "lease")
        if one is None or epoch != one.epoch:
            return self._no(number, "epoch")
        if who >= 0 and life != self.layout.life(who):
            return self._no(number, "life")
        return None

    def _no(self, number: int, reason: Reason) -> PushRefused:
        return PushRefused(number, self.layout.shards[number].epoch, reason)

    # Replicas

    @property
    def follows(self) -> set[str]:
        """Owners of the shards of which this server has copies."""
        owners = (self.layout.shards[number].owner for number in self.copies)
        return {server(owner) for owner in owners if owner is not None}

    def cut(self, node: str) -> None:
        """Register a broken connection to a node, which may still be alive."""
        for one in self.owned.values():
            one.cut = one.cut or (one.replica is not None and server(one.replica) == node)

    def _due(self, one: OwnedShard) -> float:
        """Return the time of the next retry to the replica."""
        return one.sent + (min(self.patience, RETURN) if one.cut else self.patience)

    def _expects(self, one: OwnedShard) -> bool:
        """Return whether the replica owes a confirmation."""
        return one.replica is not None and (one.snapshot or bool(one.waiting))

    def _to_replica(self, number: int, one: OwnedShard, now: float) -> list[Envelope]:
        """Return all messages that the replica has not confirmed."""
        assert one.replica is not None
        to = server(one.replica)
        one.sent = now
        one.cut = False
        said: list[Envelope] = []
        if one.snapshot:
            shard = one.shard
            said.append((to, Snapshot(number, one.epoch, shard.version, shard.state())))
        said += [
            (to, Replicate(number, one.epoch, place, step)) for place, step in one.waiting.items()
        ]
        return said

    def _replicate(self, sender: str, message: Replicate, now: float) -> list[Envelope]:
        copy = self.copies.get(message.shard)
        if copy is None or message.epoch != copy.epoch:
            # A former owner that does not know the new layout yet; or a new owner, which will
            # retry, before the new layout has arrived here.
            return [(sender, self._no(message.shard, "epoch"))]
        if copy.shard is None or message.number >= copy.shard.version:
            copy.early[message.number] = message.step
        return self._in_turn(message.shard, copy, sender)

    def _snapshot(self, sender: str, message: Snapshot, now: float) -> list[Envelope]:
        placed = self.layout.shards[message.shard]
        if message.epoch != placed.epoch:
            return [(sender, self._no(message.shard, "epoch"))]
        if placed.owner == self.number:
            return self._begin(message, now)
        copy = self.copies.get(message.shard)
        if copy is None:
            return [(sender, self._no(message.shard, "epoch"))]
        if copy.shard is None:
            copy.shard = shard_of(message.shard, message.state, self.terms)
        return self._in_turn(message.shard, copy, sender)

    def _begin(self, message: Snapshot, now: float) -> list[Envelope]:
        """Take the initial weights of a shard; later snapshots only get a confirmation."""
        if message.shard in self.owned:
            return [(MANAGER, self._replicated_by_me(message.shard))]
        placed = self.layout.shards[message.shard]
        one = OwnedShard(shard_of(message.shard, message.state, self.terms), placed.epoch)
        self.owned[message.shard] = one
        said = self._with_replica(message.shard, one, placed.replica, now)
        return [*said, (MANAGER, self._replicated_by_me(message.shard))]

    def _replicated_by_me(self, number: int) -> Replicated:
        one = self.owned[number]
        return Replicated(number, one.epoch, one.shard.version)

    def _in_turn(self, number: int, copy: ShardCopy, sender: str) -> list[Envelope]:
        """Apply the next steps of a copy in order; returns the confirmation."""
        if copy.shard is None:
            return []
        while (place := copy.shard.version) in copy.early:
            copy.shard.apply(copy.early.pop(place))
        for place in [place for place in copy.early if place < copy.shard.version]:
            del copy.early[place]
        return [(sender, Replicated(number, copy.epoch, copy.shard.version))]

    def copied(self, number: int) -> None:
        """Mark the copy of a shard as complete, since it began with equal weights."""
        self.owned[number].snapshot = False

    def _replicated(self, sender: str, message: Replicated, now: float) -> list[Envelope]:
        one = self.owned.get(message.shard)
        if one is None or message.epoch != one.epoch:
            return []
        one.snapshot = False
        said: list[Envelope] = []
        while one.waiting and one.shard.version < message.number:
            said += self._apply(one, one.waiting.pop(one.shard.version))
        one.sent = now
        # Later messages may still be lost.
        one.cut = one.cut and self._expects(one)
        return said

    def _refused(self, sender: str, message: PushRefused, now: float) -> list[Envelope]:
        # The rejecting server has another layout: ask the manager for the newest. If this server
        # has the newest, the other will learn of it, and this server retries.
        one = self.owned.get(message.shard)
        if one is not None:
            one.cut = True
            one.sent = now
        return self._beats(now)

    # The manager

    def _beats(self, now: float) -> list[Envelope]:
        if self.beat is not None:
            self._next_beat = now + self.beat
        counts = []
        for who in self.layout.closing:
            for number, one in self.owned.items():
                least, most = one.shard.count(who)
                life = self.layout.life(who)
                counts.append(PushCount(number, one.epoch, who, life, least, most))
        # At the first epoch the initial weights have yet to arrive.
        without = tuple(
            number
            for number in self.layout.owned_by(self.number)
            if number not in self.owned and self.layout.shards[number].epoch > 0
        )
        beat = ServerBeat(self.name, self.layout.version, now, tuple(counts), without=without)
        return [(MANAGER, beat)]

    def _leased(self, sender: str, message: Lease, now: float) -> list[Envelope]:
        until = message.sent + message.seconds
        # Infinite before the first lease: no other server can have replaced this one by then.
        self.lease = until if math.isinf(self.lease) else max(self.lease, until)
        return []

    def _laid_out(self, sender: str, layout: ShardLayout, now: float) -> list[Envelope]:
        """Take a newer layout: shards arrive, leave, or get another replica."""
        if layout.version <= self.layout.version:
            return []
        self.layout = layout
        said: list[Envelope] = []
        for number, placed in enumerate(layout.shards):
            if placed.owner == self.number:
                said += self._own(number, placed.epoch, placed.replica, now)
            else:
                self.owned.pop(number, None)
            if placed.replica == self.number:
                copy = self.copies.get(number)
                # A copy of an earlier epoch may lack steps: the new copy begins with a snapshot.
                if copy is None or copy.epoch != placed.epoch:
                    self.copies[number] = ShardCopy(placed.epoch)
            else:
                self.copies.pop(number, None)
        for number, one in self.owned.items():
            said += self._take(number, one, one.shard.settled(layout), now)
            said += self._answers(one)
        if self.terms.clip_norm is not None:
            said += [*self._clip(now), *self._ask_for_norms(now)]
        # Sent at once, since the manager waits for the counts.
        return [*said, *self._beats(now)]

    def _own(self, number: int, epoch: int, replica: int | None, now: float) -> list[Envelope]:
        """Begin or continue to own a shard."""
        one = self.owned.get(number)
        if one is None:
            copy = self.copies.pop(number, None)
            if copy is None or copy.shard is None:
                return []  # the initial weights have yet to arrive
            one = self.owned[number] = OwnedShard(copy.shard, epoch)
        elif one.epoch == epoch:
            return []
        one.epoch = epoch
        return self._with_replica(number, one, replica, now)

    def _with_replica(
        self, number: int, one: OwnedShard, replica: int | None, now: float
    ) -> list[Envelope]:
        """Set the replica of a shard, or none."""
        one.replica = replica
        one.snapshot = replica is not None
        if replica is not None:
            return self._to_replica(number, one, now)
        waiting = [one.waiting[place] for place in sorted(one.waiting)]
        one.waiting.clear()
        return self._take(number, one, waiting, now)


def _acknowledged(shard: Shard, who: int, start: int) -> Acknowledged:
    return Acknowledged(shard.number, who, start, shard.contains(who, start))
