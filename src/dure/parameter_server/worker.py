"""Worker's side of the protocol: pulls, pushes and retries.

At its clock c a worker pulls its keys, computes a gradient, pushes it, and moves to clock c + 1.
The worker stores a push until its server acknowledges it; it retries after a timeout, or when the
shard has another owner. An answer states the number of the worker's own pushes in its values. A
worker sees all its own updates:

    plain SGD           missing updates are applied here once more:  w <- w - lr · share · g
    other optimizers    the pull is answered when the worker's pushes are contained

No I/O and no clock: `now` is an argument, in seconds of the worker's own clock.

Source: Ho et al. 2013 (read-my-writes); Li et al. 2014 for tasks and their timestamps.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import msgspec
from torch import Tensor

from dure.parameter_server.compressed import PushCompressor
from dure.parameter_server.digests import MOST, digest_of
from dure.parameter_server.layout import ReassignedWork, ShardLayout
from dure.parameter_server.messages import (
    MANAGER,
    Acknowledged,
    Envelope,
    Message,
    Pull,
    Push,
    PushRefused,
    ServerBeat,
    Values,
    server,
    worker,
)
from dure.parameter_server.tables import SparseRows

RETURN = 0.3
"""Seconds before a retry to a node whose connection broke, or that rejected a message."""

Reapply = Callable[[int, int, Tensor, Tensor, float], None]
"""Function (shard, start, values, gradient, weight) that applies an own push once more."""


@dataclass
class Portion:
    """Keys start … stop-1 of a shard, which this worker pulls and pushes.

    Args:
        shard: number of the shard.
        start: first key.
        stop: last key + 1.
        kept: unacknowledged pushes, by clock; with `again`, also pushes that the newest answer
            lacks.
        safe: as below.
        sent: as below.
        cut: as below.
        answer: newest answer; None before the first.
        rows: table rows of the newest request.
        known: digests of the row lists that the server caches, the most recently used last.
        compressor: compressor of the pushes; None without compression.
    """

    shard: int
    start: int
    stop: int
    kept: dict[int, Push] = field(default_factory=dict)
    safe: int = 0
    """Number of acknowledged pushes."""
    sent: float = math.inf
    """Time of the last transmission of unanswered messages; infinity if there are none."""
    cut: bool = False
    """Whether messages since then may be lost, by a broken connection or a rejection."""
    answer: Values | None = None
    rows: Tensor | None = None
    known: dict[int, None] = field(default_factory=dict)
    compressor: PushCompressor | None = None

    def values(self) -> Tensor | SparseRows:
        """Return the values of the newest answer; for a table with their rows."""
        assert self.answer is not None
        rows = self.answer.rows if self.rows is None else self.rows
        return self.answer.values if rows is None else SparseRows(rows, self.answer.values)

    def gradient_of(self, push: Push) -> tuple[Tensor, float]:
        """Return the gradient of an own push as the server decodes it, and its weight."""
        if self.compressor is None:
            return push.gradient, push.weight
        return self.compressor.decode(push.gradient), 1.0

    def heard(self, message: Pull | Push) -> None:
        """Register that the server has received a message, and caches its list of rows."""
        if message.digest is not None:
            self.known.pop(int(message.digest), None)
            self.known[int(message.digest)] = None
            if len(self.known) > MOST:
                del self.known[next(iter(self.known))]

    def shortened(self, message: Pull | Push) -> Mapping[str, None]:
        """Return the fields to leave out of a message: the rows, or their digest."""
        if message.digest is None:
            return {}
        return {"rows": None} if int(message.digest) in self.known else {"digest": None}

    def forget(self, again: bool) -> None:
        """Drop the pushes that are acknowledged and, with `again`, contained in the answer."""
        seen = self.safe if self.answer is None or not again else self.answer.own
        for clock in [clock for clock in self.kept if clock < min(self.safe, seen)]:
            del self.kept[clock]


class RetryTimes(NamedTuple):
    """Times of a worker's retries.

    patience: seconds before a retry; infinity if messages are lost only by broken connections
    (`cut`). beat: seconds between heartbeats; None sends none.
    """

    patience: float = 1.0
    beat: float | None = 0.5


LOSSY = RetryTimes()
"""Times for a network that loses messages."""

CONNECTED = RetryTimes(math.inf, None)
"""Times for connections, which lose messages only by breaking, so retries need no timeout."""


class WorkerProtocol:
    """Protocol state of worker `number`.

    Args:
        number: number of the worker.
        layout: initial layout.
        portions: (shard, start, stop) of its keys, followed by its table rows.
        again: applies an own push to pulled values; None waits for the servers to apply it.
        clock: number of its pushes so far.
        times: times of retries and heartbeats.
        into: returns memory for the next answers, by portion of keys; None allocates.
        compressors: compressors of the pushes, by portion; empty without compression.
    """

    def __init__(
        self,
        number: int,
        layout: ShardLayout,
        portions: Sequence[tuple[int, int, int]],
        again: Reapply | None = None,
        clock: int = 0,
        times: RetryTimes = LOSSY,
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
        self.patience, self.beat = times
        self.asked: int | None = None
        """Number of the request in progress; None without."""
        self.staleness: dict[int, int] = {}
        """Histogram of staleness: clocks behind -> number of pulls."""
        self._questions = 0
        self._pulls: dict[int, Pull] = {}
        self._next_beat = -math.inf if self.beat is not None else math.inf

    def begin_at(self, clock: int) -> None:
        """Set the number of pushes that the servers have already, for a new worker."""
        if self.clock < clock:
            self.clock = clock
            for portion in self.portions:
                portion.safe = clock

    @property
    def given_up(self) -> bool:
        """Whether this worker was dropped."""
        return self.layout.life(self.number) != self.life

    @property
    def owed(self) -> list[ReassignedWork]:
        """Parts of dropped workers that this worker is to compute."""
        return [owed for owed in self.layout.owed if owed.by == self.number]

    # Requests

    def pull(self, now: float, clock: int | None, rows: Sequence[Tensor] = ()) -> list[Envelope]:
        """Request the keys as required at a clock; None accepts the current values.

        `rows` are the requested rows of the last portions, which are tables; without `rows`, the
        changed rows of tables are requested.
        """
        self._questions += 1
        self.asked = self._questions
        said: list[Envelope] = []
        rooms = [] if self.into is None else self.into()
        for portion, wanted, room in zip(
            self.portions, self._at_end(rows), self._at_front(rooms), strict=True
        ):
            portion.rows = wanted
            # Own pushes of rows are not applied here, so the servers must have applied them.
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
            # A retry names no memory, which may be in use when a second answer is written.
            self._pulls[portion.shard] = pull
            said += self._say(portion, msgspec.structs.replace(pull, into=room), now)
        return said

    def _at_end(self, rows: Sequence[Tensor]) -> list[Tensor | None]:
        """Return values for the last portions, and None for the others, by portion."""
        return [*[None] * (len(self.portions) - len(rows)), *rows]

    def _at_front(self, rooms: Sequence[Tensor]) -> list[Tensor | None]:
        """Return memory for the first portions, and None for tables, by portion."""
        return [*rooms, *[None] * (len(self.portions) - len(rooms))]

    @property
    def arrived(self) -> bool:
        """Whether all answers to the newest request, and their layout, have arrived."""
        if self.asked is None or self._pulls:
            return False
        given = (portion.answer.layout for portion in self.portions if portion.answer is not None)
        return self.layout.version >= max(given, default=0)

    def take(self) -> list[Tensor | SparseRows]:
        """Return the arrived values, by portion, with all own pushes."""
        assert self.arrived
        self.asked = None
        found: list[Tensor | SparseRows] = []
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
        gradients: Sequence[Tensor | SparseRows],
        weight: float,
        now: float,
        step: int | None = None,
        accrued: int = 1,
    ) -> list[Envelope]:
        """Push gradients, by portion, which must stay unchanged until the acknowledgement.

        `step` is the step for learning rate schedules; None takes the clock. `accrued` is the
        number of gradients in each sum.
        """
        said: list[Envelope] = []
        for portion, given in zip(self.portions, gradients, strict=True):
            rows = given.rows if isinstance(given, SparseRows) else None
            gradient = given.values if isinstance(given, SparseRows) else given
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
        """Copies of the residuals of compressed pushes, by portion.

        Empty without error feedback.
        """
        compressors = [portion.compressor for portion in self.portions]
        errors = [None if one is None else one.unsent for one in compressors]
        return [error.clone() for error in errors if error is not None]

    def take_unsent(self, errors: Sequence[Tensor]) -> None:
        """Restore copies of residuals. Raises ValueError for residuals of other keys."""
        for portion, error in zip(self.portions, errors, strict=True):
            assert portion.compressor is not None
            portion.compressor.take_unsent(error)

    @property
    def behind(self) -> int:
        """Number of own pushes that some server has not acknowledged."""
        return self.clock - min((portion.safe for portion in self.portions), default=self.clock)

    @property
    def unanswered(self) -> list[int]:
        """Shards whose servers owe an answer."""
        return [portion.shard for portion in self.portions if self._awaits(portion)]

    # Received messages

    def receive(self, sender: str, message: Message, now: float) -> list[Envelope]:
        """Return the messages that answer a message; stale answers are ignored."""
        if isinstance(message, ShardLayout):
            return self._laid_out(message, now)
        if isinstance(message, PushRefused):
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
        """Ask the manager for the layout after a rejection, and retry.

        Either side has an older layout, or the server's lease has expired.
        """
        portion = self._portion(shard)
        if portion is not None:
            portion.cut = True
            self._look(portion, now)
        return self._beats(now)

    def _explain(self, shard: int, now: float) -> list[Envelope]:
        """Send the rows of a digest that a server does not know."""
        portion = self._portion(shard)
        if portion is None:
            return []
        portion.known.clear()
        return self._again(portion, now)

    def _laid_out(self, layout: ShardLayout, now: float) -> list[Envelope]:
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

    # Retries

    @property
    def wake(self) -> float:
        """Time of the next `tick`."""
        return min([self._next_beat, *map(self._due, self.portions)])

    def tick(self, now: float) -> list[Envelope]:
        """Process due events: a heartbeat, and retries. Returns messages."""
        said: list[Envelope] = []
        if now >= self._next_beat:
            said += self._beats(now)
        for portion in self.portions:
            if now >= self._due(portion):
                said += self._again(portion, now)
        return said

    def cut(self, node: str) -> None:
        """Register a broken connection to a node, which may still be alive."""
        for portion in self.portions:
            owner = self.layout.shards[portion.shard].owner
            portion.cut = portion.cut or (owner is not None and server(owner) == node)

    def _due(self, portion: Portion) -> float:
        """Return the time of the next retry of a portion."""
        return portion.sent + (min(self.patience, RETURN) if portion.cut else self.patience)

    def _beats(self, now: float) -> list[Envelope]:
        if self.beat is None:
            return []
        self._next_beat = now + self.beat
        return [(MANAGER, ServerBeat(self.name, self.layout.version, now, clock=self.clock))]

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
        """Start or stop the retry timer of a portion."""
        waits = self._awaits(portion)
        # Servers reject the messages of a dropped worker, so retries are useless.
        portion.sent = now if waits and not self.given_up else math.inf
        # Messages may still be lost while others were answered.
        portion.cut = portion.cut and waits

    def _awaits(self, portion: Portion) -> bool:
        """Return whether a pull lacks its answer, or a push its acknowledgement."""
        return portion.shard in self._pulls or any(c >= portion.safe for c in portion.kept)

    def _portion(self, shard: int) -> Portion | None:
        return next((portion for portion in self.portions if portion.shard == shard), None)
