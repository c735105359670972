"""A server: the shards that it answers for, and the copies that it holds of others.

With a replica an update is first sent there, and is applied here when the replica has it; only then
are its pushes acknowledged, and only what is applied is given to anybody:

    push -> step n -> Replicate(n) -> the copy applies it -> Replicated(n) -> applied here
                                                          -> Acknowledged, Values

Where steps are clipped, servers tell each other norms before that (`clipping`).

So whoever answers for a shard next has all that anybody was told of. Where a whole clock becomes
one step, one step is replicated for all its workers.

A server answers only while it has a lease: the manager gives it with every beat, and waits until it
is over before it gives the shards to another. A server that was stopped and wakes up finds its
lease over, and asks the manager first.

No I/O and no clock: `now` is an argument, in seconds of this server's own clock.

Source: Li et al. 2014, sections 4.3 and 4.4 (replication after aggregation); Gray and Cheriton 1989
(leases).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

from dure.parameter_server.clipping import PATIENCE, At, NormExchange, norms_at
from dure.parameter_server.layout import Layout
from dure.parameter_server.messages import (
    MANAGER,
    Acknowledged,
    Beat,
    Count,
    Envelope,
    Lease,
    Message,
    Norms,
    Pull,
    Push,
    Reason,
    Refused,
    Replicate,
    Replicated,
    Snapshot,
    Step,
    server,
    worker,
)
from dure.parameter_server.shard import Shard, Terms
from dure.parameter_server.table_shard import shard_of
from dure.parameter_server.worker import RETURN


@dataclass
class Owned:
    """A shard that this server answers for.

    waiting: steps that the replica does not have yet, by their number, the first of them
    `shard.version`; sent: when they, or the snapshot, went there last.
    """

    shard: Shard
    epoch: int
    replica: int | None = None
    snapshot: bool = False
    """Whether the replica still has to confirm the snapshot with which it begins."""
    waiting: dict[int, Step] = field(default_factory=dict)
    sent: float = -math.inf
    cut: bool = False
    """Whether what was said may have been lost since then: the way broke, or it was refused."""


@dataclass
class Copy:
    """A shard of which this server has the copy. early: steps that came before their turn."""

    epoch: int
    shard: Shard | None = None
    early: dict[int, Step] = field(default_factory=dict)


class Server:
    """Server `number`. Its shards come with snapshots.

    beat: seconds between two beats; None where nobody asks whether it lives. patience: seconds
    after which a message is said again; infinity where nothing is lost unless a connection breaks
    (`cut`).
    """

    def __init__(
        self,
        number: int,
        layout: Layout,
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
        self.owned: dict[int, Owned] = {}
        self.copies = {shard: Copy(layout.shards[shard].epoch) for shard in layout.held_by(number)}
        self.lease = math.inf
        """Until when it may answer; without a manager that has said so, for ever."""
        self._next_beat = -math.inf if beat is not None else math.inf
        self._norms = NormExchange()
        self._first_layout = layout.version
        self._speakers: dict[int, str] = {}
        """Who speaks for a worker: itself, or one that computes in its name."""
        self._receivers: dict[type, Callable[..., list[Envelope]]] = {
            Push: self._push,
            Pull: self._pull,
            Replicate: self._replicate,
            Replicated: self._replicated,
            Norms: self._hear_norms,
            Snapshot: self._snapshot,
            Refused: self._refused,
            Lease: self._leased,
            Layout: self._laid_out,
        }

    def receive(self, sender: str, message: Message, now: float) -> list[Envelope]:
        """What it says to a message. Raises ValueError for one that no server is sent."""
        receiver = self._receivers.get(type(message))
        if receiver is None:
            raise ValueError(f"a server has no use for a {type(message).__name__}")
        return receiver(sender, message, now)

    @property
    def wake(self) -> float:
        """When it is to be told that time has passed."""
        due = [self._due(one) for one in self.owned.values() if self._expects(one)]
        return min([self._next_beat, self._norms_due, *due])

    def tick(self, now: float) -> list[Envelope]:
        """What is due: a beat, and what was not answered in time."""
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
            # It came again because the acknowledgement was lost.
            said.append((sender, _acknowledged(one.shard, push.worker, push.start)))
        return said

    def _take(self, number: int, one: Owned, steps: Iterable[Step], now: float) -> list[Envelope]:
        """Steps that are ready: applied, or sent to the replica first."""
        said: list[Envelope] = []
        for step in steps:
            if one.replica is None:
                said += self._apply(one, step)
                continue
            place = one.shard.version + len(one.waiting)
            # By the first that the replica owes an answer to: later ones do not put it off.
            if not self._expects(one):
                one.sent = now
            one.waiting[place] = step
            said.append((server(one.replica), Replicate(number, one.epoch, place, step)))
        return said

    def _apply(self, one: Owned, step: Step) -> list[Envelope]:
        """Applies a step; tells whose pushes it contains, and who has waited for it."""
        one.shard.apply(step)
        said: list[Envelope] = [
            (
                self._speaker(made.worker),
                _acknowledged(one.shard, made.worker, step.start),
            )
            for made in step.pushes
        ]
        return said + self._answers(one)

    def _answers(self, one: Owned) -> list[Envelope]:
        """What pulls have waited for."""
        answers = one.shard.answers(self.layout)
        return [(self._speaker(values.worker), values) for values in answers]

    def _speaker(self, who: int) -> str:
        """To whom the words for a worker go."""
        return self._speakers.get(who, worker(who))

    # Norms

    def _clip(self, now: float) -> list[Envelope]:
        """Steps of which all norms are known now; others are told of those that are known here."""
        waiting: set[At] = set()
        for number, one in self.owned.items():
            for at, waited in one.shard.unclipped.items():
                self._norms.note(at, {number: waited.square})
                waiting.add(at)
        said: list[Envelope] = []
        for at in sorted(waiting):
            squares = self._squares(at)
            whole = len(squares) == len(self.layout.shards)
            if self._norms.is_new(at):
                # After a death others may have had norms before this one came into its place.
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
        """The last clock of each group of which a step was clipped here."""
        shards = [one.shard for one in self.owned.values()]
        last = sorted((norms.clock, group) for one in shards for group, norms in one.norms.items())
        return {group: clock for clock, group in last}

    def _squares(self, at: At) -> dict[int, float]:
        """The squared norms of a step that are known here, by shard."""
        squares = dict(self._norms.of(at))
        for one in self.owned.values():
            norms = one.shard.norms.get(at.group)
            if norms is not None and norms.clock == at.clock:
                squares |= norms.squares
        return squares

    def _to_owners(self, message: Norms) -> list[Envelope]:
        """A message to all other servers that answer for shards."""
        owners = {placed.owner for placed in self.layout.shards if placed.owner is not None}
        return [(server(owner), message) for owner in sorted(owners - {self.number})]

    def _hear_norms(self, sender: str, message: Norms, now: float) -> list[Envelope]:
        at = At(message.group, message.clock)
        said: list[Envelope] = []
        if at.clock > self._clipped().get(at.group, -1) or self._waits_for(at):
            self._norms.note(at, message.squares)
            said = self._clip(now)
        more = self._squares(at)
        if message.asks and more.keys() - message.squares.keys():
            said.append((sender, norms_at(at, more)))
        return said

    def _waits_for(self, at: At) -> bool:
        """Whether a step waits for norms."""
        return any(at in one.shard.unclipped for one in self.owned.values())

    @property
    def _norms_due(self) -> float:
        """Return when to ask again for norms that have not come."""
        patience = self.patience if self.beat is None else min(self.patience, PATIENCE)
        return self._norms.sent + patience

    def _ask_for_norms(self, now: float) -> list[Envelope]:
        """Asks the other servers for the norms of all steps that wait for some."""
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

    def _check(self, number: int, epoch: int, who: int, life: int, now: float) -> Refused | None:
        """Why a worker is not answered; None if it is."""
        one = self.owned.get(number)
        if now > self.lease:
            return self._no(number, "lease")
        if one is None or epoch != one.epoch:
            return self._no(number, "epoch")
        if who >= 0 and life != self.layout.life(who):
            return self._no(number, "life")
        return None

    def _no(self, number: int, reason: Reason) -> Refused:
        return Refused(number, self.layout.shards[number].epoch, reason)

    # Replicas

    @property
    def follows(self) -> set[str]:
        """The servers that answer for the shards of which this one has the copies."""
        owners = (self.layout.shards[number].owner for number in self.copies)
        return {server(owner) for owner in owners if owner is not None}

    def cut(self, node: str) -> None:
        """The connection to a node broke, which it may survive."""
        for one in self.owned.values():
            one.cut = one.cut or (one.replica is not None and server(one.replica) == node)

    def _due(self, one: Owned) -> float:
        """When to say again what the replica has not answered."""
        return one.sent + (min(self.patience, RETURN) if one.cut else self.patience)

    def _expects(self, one: Owned) -> bool:
        """Whether the replica owes an answer."""
        return one.replica is not None and (one.snapshot or bool(one.waiting))

    def _to_replica(self, number: int, one: Owned, now: float) -> list[Envelope]:
        """Everything that the replica does not have, as far as is known here."""
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
            # An owner of before, which does not know yet that it is none; or one of whom nothing
            # was heard here yet, which says it again.
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
        """The first weights of a shard: only the first to come counts."""
        if message.shard in self.owned:
            return [(MANAGER, self._replicated_by_me(message.shard))]
        placed = self.layout.shards[message.shard]
        one = Owned(shard_of(message.shard, message.state, self.terms), placed.epoch)
        self.owned[message.shard] = one
        said = self._with_replica(message.shard, one, placed.replica, now)
        return [*said, (MANAGER, self._replicated_by_me(message.shard))]

    def _replicated_by_me(self, number: int) -> Replicated:
        one = self.owned[number]
        return Replicated(number, one.epoch, one.shard.version)

    def _in_turn(self, number: int, copy: Copy, sender: str) -> list[Envelope]:
        """Applies to a copy what is its turn; says how far it is."""
        if copy.shard is None:
            return []
        while (place := copy.shard.version) in copy.early:
            copy.shard.apply(copy.early.pop(place))
        for place in [place for place in copy.early if place < copy.shard.version]:
            del copy.early[place]
        return [(sender, Replicated(number, copy.epoch, copy.shard.version))]

    def copied(self, number: int) -> None:
        """The copy of a shard has been made: it began with the same weights."""
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
        # Else something after this may still be lost.
        one.cut = one.cut and self._expects(one)
        return said

    def _refused(self, sender: str, message: Refused, now: float) -> list[Envelope]:
        # Whoever refuses knows another layout: the manager has the newest. Where that is the one of
        # this server, the other will hear of it, and is told again.
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
                counts.append(Count(number, one.epoch, who, life, least, most))
        # At the first epoch the weights of the beginning are still to come.
        without = tuple(
            number
            for number in self.layout.owned_by(self.number)
            if number not in self.owned and self.layout.shards[number].epoch > 0
        )
        beat = Beat(self.name, self.layout.version, now, tuple(counts), without=without)
        return [(MANAGER, beat)]

    def _leased(self, sender: str, message: Lease, now: float) -> list[Envelope]:
        until = message.sent + message.seconds
        # Infinite before the first: nobody can have been put into its place by then.
        self.lease = until if math.isinf(self.lease) else max(self.lease, until)
        return []

    def _laid_out(self, sender: str, layout: Layout, now: float) -> list[Envelope]:
        """Takes a newer layout: shards come, go, or get another replica."""
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
                # A copy of before may lack what came after it: it begins with a snapshot.
                if copy is None or copy.epoch != placed.epoch:
                    self.copies[number] = Copy(placed.epoch)
            else:
                self.copies.pop(number, None)
        for number, one in self.owned.items():
            said += self._take(number, one, one.shard.settled(layout), now)
            said += self._answers(one)
        if self.terms.clip_norm is not None:
            said += [*self._clip(now), *self._ask_for_norms(now)]
        # At once, since others wait for the counts.
        return [*said, *self._beats(now)]

    def _own(self, number: int, epoch: int, replica: int | None, now: float) -> list[Envelope]:
        """This server answers for a shard from now on, or goes on to."""
        one = self.owned.get(number)
        if one is None:
            copy = self.copies.pop(number, None)
            if copy is None or copy.shard is None:
                return []  # its first weights are still to come
            one = self.owned[number] = Owned(copy.shard, epoch)
        elif one.epoch == epoch:
            return []
        one.epoch = epoch
        return self._with_replica(number, one, replica, now)

    def _with_replica(
        self, number: int, one: Owned, replica: int | None, now: float
    ) -> list[Envelope]:
        """A shard has another replica, or none, from now on."""
        one.replica = replica
        one.snapshot = replica is not None
        if replica is not None:
            return self._to_replica(number, one, now)
        waiting = [one.waiting[place] for place in sorted(one.waiting)]
        one.waiting.clear()
        return self._take(number, one, waiting, now)


def _acknowledged(shard: Shard, who: int, start: int) -> Acknowledged:
    return Acknowledged(shard.number, who, start, shard.contains(who, start))
