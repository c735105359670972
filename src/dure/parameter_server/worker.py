"""The worker's side: what to pull and to push, and when to say it again.

At its clock c a worker pulls its keys, computes a gradient, pushes it, and is at clock c + 1. A
push is kept until its server has acknowledged it; it is said again when that takes too long, or
when the shard has another owner. An answer says how many of the worker's own pushes it contains. A
worker sees all that it has done itself:

    plain SGD           what the answer lacks is applied here once more:  w <- w - lr · share · g
    other optimizers    the pull is answered when the worker's pushes are contained

No I/O and no clock: `now` is an argument, in seconds of the worker's own clock.

Source: Ho et al. 2013 (read-my-writes); Li et al. 2014 for tasks and their timestamps.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import msgspec
from torch import Tensor

from dure.parameter_server.compressed import PushCompressor
from dure.parameter_server.digests import MOST, digest_of
from dure.parameter_server.layout import Layout, Owed
from dure.parameter_server.messages import (
    MANAGER,
    Acknowledged,
    Beat,
    Envelope,
    Message,
    Pull,
    Push,
    Refused,
    Values,
    server,
    worker,
)
from dure.parameter_server.tables import Rows

RETURN = 0.3
"""Seconds until something is said again to a node whose connection broke, or that refused it."""

Again = Callable[[int, int, Tensor, Tensor, float], None]
"""again(shard, start, values, gradient, weight): applies an own push to values once more."""


@dataclass
class Portion:
    """The keys start … stop-1 of a shard, which this worker pulls and pushes.

    kept: pushes that are not acknowledged, by clock; or, where they are applied to answers once
    more (`again`), that the newest answer does not contain.
    rows: of a table, those that were asked for last. known: digests of the lists of rows that the
    server remembers, the one that was used last at the end. compressor: of its pushes.
    """

    shard: int
    start: int
    stop: int
    kept: dict[int, Push] = field(default_factory=dict)
    safe: int = 0
    """Pushes that are acknowledged."""
    sent: float = math.inf
    """When what is expected was said last."""
    cut: bool = False
    """Whether what was said may have been lost since then: the way broke, or it was refused."""
    answer: Values | None = None
    rows: Tensor | None = None
    known: dict[int, None] = field(default_factory=dict)
    compressor: PushCompressor | None = None

    def values(self) -> Tensor | Rows:
        """The values of the newest answer; of a table with their rows."""
        assert self.answer is not None
        rows = self.answer.rows if self.rows is None else self.rows
        return self.answer.values if rows is None else Rows(rows, self.answer.values)

    def gradient_of(self, push: Push) -> tuple[Tensor, float]:
        """The gradient of an own push, as the server has it, and its weight."""
        if self.compressor is None:
            return push.gradient, push.weight
        return self.compressor.decode(push.gradient), 1.0

    def heard(self, message: Pull | Push) -> None:
        """The server has got a message: it knows the list of rows in it."""
        if message.digest is not None:
            self.known.pop(int(message.digest), None)
            self.known[int(message.digest)] = None
            if len(self.known) > MOST:
                del self.known[next(iter(self.known))]

    def shortened(self, message: Pull | Push) -> Mapping[str, None]:
        """What can be left out of a message: the rows, or their digest."""
        if message.digest is None:
            return {}
        return {"rows": None} if int(message.digest) in self.known else {"digest": None}

    def forget(self, again: bool) -> None:
        """Lets go of what is safe, and seen where that matters."""
        seen = self.safe if self.answer is None or not again else self.answer.own
        for clock in [clock for clock in self.kept if clock < min(self.safe, seen)]:
            del self.kept[clock]


class WorkerSide:
    """What worker `number` has asked and said. clock: how many pushes it has made.

    portions: its keys, and then its rows. into: where the answers to the next question are to be
    written, by portion of keys; None: anywhere. again: how an own push is applied to pulled values;
    None waits for the servers to do it. patience: seconds after which something is said again;
    infinity where nothing is lost unless a connection breaks (`cut`). beat: seconds between beats;
    None leaves them to another, for a part that is computed in another's name. compressors: of its
    pushes, by portion; none where they are not compressed.
    """

    def __init__(
        self,
        number: int,
        layout: Layout,
        portions: Sequence[tuple[int, int, int]],
        again: Again | None = None,
        clock: int = 0,
        patience: float = 1.0,
        beat: float | None = 0.5,
        into: Callable[[], Sequence[Tensor]] | None = None,
        compressors: Sequence[PushCompressor] = (),
    ) -> None:
        self.number = number
        self.name = worker(number)
        self.into = into
        self.layout = layout
        self.life = layout.life(number)
        self.portions = [Portion(*portion, safe=clock) for portion in portions]
        if compressors:
            for portion, compressor in zip(self.portions, compressors, strict=True):
                portion.compressor = compressor
        self.again = again
        self.clock = clock
        self.patience = patience
        self.beat = beat
        self.asked: int | None = None
        """The number of the question whose answers are awaited."""
        self.staleness: dict[int, int] = {}
        """How often an answer was how many clocks behind."""
        self._questions = 0
        self._pulls: dict[int, Pull] = {}
        self._next_beat = -math.inf if beat is not None else math.inf

    def begin_at(self, clock: int) -> None:
        """So many pushes of this worker the servers have already; for one that has made none."""
        if self.clock < clock:
            self.clock = clock
            for portion in self.portions:
                portion.safe = clock

    @property
    def given_up(self) -> bool:
        """Whether the others go on without this worker."""
        return self.layout.life(self.number) != self.life

    @property
    def owed(self) -> list[Owed]:
        """Parts of others that this worker is to compute."""
        return [owed for owed in self.layout.owed if owed.by == self.number]

    # What it does

    def pull(self, now: float, clock: int | None, rows: Sequence[Tensor] = ()) -> list[Envelope]:
        """Asks for its keys as they have to be at a clock; None: as they are.

        rows: those that are wanted of the last portions, which are of tables, by portion; without
        them tables are asked for what was changed.
        """
        self._questions += 1
        self.asked = self._questions
        said: list[Envelope] = []
        rooms = [] if self.into is None else self.into()
        for portion, wanted, room in zip(
            self.portions, self._at_end(rows), self._at_front(rooms), strict=True
        ):
            portion.rows = wanted
            # Rows are not applied again here: the servers have to have done it.
            own = 0 if self.again is not None and wanted is None else self.clock
            pull = Pull(
                shard=portion.shard,
                epoch=0,
                worker=self.number,
                life=self.life,
                number=self._questions,
                start=portion.start,
                stop=portion.stop,
                clock=clock,
                own=own if clock is not None else 0,
                rows=wanted,
                digest=digest_of(wanted),
            )
            # Asked again it names no room: that may be in use when a second answer is written.
            self._pulls[portion.shard] = pull
            said += self._say(portion, msgspec.structs.replace(pull, into=room), now)
        return said

    def _at_end(self, rows: Sequence[Tensor]) -> list[Tensor | None]:
        """What belongs to the last portions, by portion."""
        return [*[None] * (len(self.portions) - len(rows)), *rows]

    def _at_front(self, rooms: Sequence[Tensor]) -> list[Tensor | None]:
        """What belongs to the first portions, by portion: rows have no rooms."""
        return [*rooms, *[None] * (len(self.portions) - len(rooms))]

    @property
    def arrived(self) -> bool:
        """Whether every answer to the newest question is there, and the layout of its givers."""
        if self.asked is None or self._pulls:
            return False
        given = (portion.answer.layout for portion in self.portions if portion.answer is not None)
        return self.layout.version >= max(given, default=0)

    def take(self) -> list[Tensor | Rows]:
        """The values that have arrived, by portion, with all of the worker's own pushes."""
        assert self.arrived
        self.asked = None
        found: list[Tensor | Rows] = []
        floors = []
        for portion in self.portions:
            answer = portion.answer
            assert answer is not None
            if answer.floor is not None:
                floors.append(answer.floor)
            if self.again is not None:
                for clock in range(answer.own, self.clock):
                    push = portion.kept[clock]
                    gradient, weight = portion.gradient_of(push)
                    self.again(portion.shard, push.start, answer.values, gradient, weight)
            found.append(portion.values())
        if floors:
            behind = self.clock - min(floors)
            self.staleness[behind] = self.staleness.get(behind, 0) + 1
        return found

    def push(
        self,
        gradients: Sequence[Tensor | Rows],
        weight: float,
        now: float,
        step: int | None = None,
        accrued: int = 1,
    ) -> list[Envelope]:
        """Says its gradients, by portion, which nobody may change until they are acknowledged.

        step: by which learning rates are scheduled; None is its clock. accrued: of how many
        gradients each is the sum.
        """
        said: list[Envelope] = []
        for portion, given in zip(self.portions, gradients, strict=True):
            rows = given.rows if isinstance(given, Rows) else None
            gradient = given.values if isinstance(given, Rows) else given
            compressor = portion.compressor
            if compressor is not None:
                gradient = compressor.encode(gradient, weight, self.clock)
            push = Push(
                shard=portion.shard,
                epoch=0,
                worker=self.number,
                life=self.life,
                clock=self.clock,
                start=portion.start,
                gradient=gradient,
                weight=weight,
                version=0 if portion.answer is None else portion.answer.version,
                rows=rows,
                digest=digest_of(rows),
                encoded=None if compressor is None else compressor.keys,
                step=self.clock if step is None else step,
                gradients=accrued,
            )
            portion.kept[self.clock] = push
            said += self._say(portion, push, now)
        self.clock += 1
        return said

    @property
    def unsent(self) -> list[Tensor]:
        """Copies of what compressed pushes have left out, by portion; none without feedback."""
        compressors = [portion.compressor for portion in self.portions]
        errors = [None if one is None else one.unsent for one in compressors]
        return [error.clone() for error in errors if error is not None]

    def take_unsent(self, errors: Sequence[Tensor]) -> None:
        """Takes copies of what `unsent` gave. Raises ValueError for what was of other keys."""
        for portion, error in zip(self.portions, errors, strict=True):
            assert portion.compressor is not None
            portion.compressor.take_unsent(error)

    @property
    def behind(self) -> int:
        """How many of its pushes are not acknowledged by some server."""
        return self.clock - min((portion.safe for portion in self.portions), default=self.clock)

    @property
    def unanswered(self) -> list[int]:
        """The shards whose servers owe it an answer."""
        return [portion.shard for portion in self.portions if self._awaits(portion)]

    # What it hears

    def receive(self, sender: str, message: Message, now: float) -> list[Envelope]:
        """What it says to a message. One that answers nothing it has asked is passed over."""
        if isinstance(message, Layout):
            return self._laid_out(message, now)
        if isinstance(message, Refused):
            if message.reason == "rows":
                return self._explain(message.shard, now)
            return self._refused(message.shard, now)
        if not isinstance(message, Values | Acknowledged):
            return []
        portion = self._portion(message.shard)
        if portion is None:
            return []
        if message.worker != self.number:
            return []
        if isinstance(message, Values):
            pull = self._pulls.get(message.shard)
            if pull is not None and pull.number == message.number:
                del self._pulls[message.shard]
                portion.answer = message
                portion.heard(pull)
        else:
            portion.safe = max(portion.safe, message.clock)
            for clock, push in portion.kept.items():
                if clock < portion.safe:
                    portion.heard(push)
        portion.forget(self.again is not None)
        self._look(portion, now)
        return []

    def _refused(self, shard: int, now: float) -> list[Envelope]:
        """One of both knows an older layout, or a lease is over. The manager has the newest of
        both; where this worker has it, the server is told again."""
        portion = self._portion(shard)
        if portion is not None:
            portion.cut = True
            self._look(portion, now)
        return self._beats(now)

    def _explain(self, shard: int, now: float) -> list[Envelope]:
        """Sends the rows that a server does not know by their digest."""
        portion = self._portion(shard)
        if portion is None:
            return []
        portion.known.clear()
        return self._again(portion, now)

    def _laid_out(self, layout: Layout, now: float) -> list[Envelope]:
        if layout.version <= self.layout.version:
            return []
        before = self.layout
        self.layout = layout
        if self.given_up:
            for portion in self.portions:
                self._look(portion, now)
            return []
        said: list[Envelope] = []
        for portion in self.portions:
            if layout.shards[portion.shard].epoch != before.shards[portion.shard].epoch:
                portion.known.clear()
                said += self._again(portion, now)
        return said

    # What it says again

    @property
    def wake(self) -> float:
        """When it is to be told that time has passed."""
        return min([self._next_beat, *map(self._due, self.portions)])

    def tick(self, now: float) -> list[Envelope]:
        """What is due: a beat, and what was not answered in time."""
        said: list[Envelope] = []
        if now >= self._next_beat:
            said += self._beats(now)
        for portion in self.portions:
            if now >= self._due(portion):
                said += self._again(portion, now)
        return said

    def cut(self, node: str) -> None:
        """The connection to a node broke, which it may survive."""
        for portion in self.portions:
            owner = self.layout.shards[portion.shard].owner
            portion.cut = portion.cut or (owner is not None and server(owner) == node)

    def _due(self, portion: Portion) -> float:
        """When to say again what was not answered."""
        return portion.sent + (min(self.patience, RETURN) if portion.cut else self.patience)

    def _beats(self, now: float) -> list[Envelope]:
        if self.beat is None:
            return []
        self._next_beat = now + self.beat
        return [(MANAGER, Beat(self.name, self.layout.version, now, clock=self.clock))]

    def _again(self, portion: Portion, now: float) -> list[Envelope]:
        portion.cut = False
        said: list[Envelope] = []
        for clock in sorted(portion.kept):
            if clock >= portion.safe:
                said += self._say(portion, portion.kept[clock], now)
        if portion.shard in self._pulls:
            said += self._say(portion, self._pulls[portion.shard], now)
        self._look(portion, now)
        return said

    def _say(self, portion: Portion, message: Push | Pull, now: float) -> list[Envelope]:
        placed = self.layout.shards[portion.shard]
        if math.isinf(portion.sent):
            portion.sent = now
        if placed.owner is None:
            return []
        left_out = portion.shortened(message)
        message = msgspec.structs.replace(message, epoch=placed.epoch, **left_out)
        return [(server(placed.owner), message)]

    def _look(self, portion: Portion, now: float) -> None:
        """From now on it waits, or waits for nothing."""
        waits = self._awaits(portion)
        # What is said of a life that is over counts for nothing.
        portion.sent = now if waits and not self.given_up else math.inf
        # Of several things one may be lost and another answered.
        portion.cut = portion.cut and waits

    def _awaits(self, portion: Portion) -> bool:
        """Whether a pull is to be answered, or a push acknowledged."""
        return portion.shard in self._pulls or any(c >= portion.safe for c in portion.kept)

    def _portion(self, shard: int) -> Portion | None:
        return next((portion for portion in self.portions if portion.shard == shard), None)
