"""The desk: who is there, and what waits for each client until it asks.

Clients call, the server never does. What the coordinator wants said to a client lies here until its
next `next`: what became of its updates, then something to do. Two threads meet at the desk. The
event loop answers clients; the main thread, which drives the coordinator, puts things down. Each
change is short and under one lock.

A client is *here* from its check-in on, until no call of its has been open for `grace` seconds. A
cut link leaves a call open that nobody hears: calls are answered after `heartbeat` seconds at the
latest, and a client that then does not call again is gone.
"""

from __future__ import annotations

import asyncio
import queue
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import NamedTuple

from msgspec.structs import replace

from dure.wire.requests import (
    AnswerTo,
    Machine,
    MeasureThis,
    Outcome,
    SayThis,
    Train,
    Watched,
    Word,
)
from dure.wire.tensors import Form

LAST_CALL = 0.3
"""Seconds within which a client that has heard that the run is over begins to fetch the model."""

GRACE = 2.0
"""Seconds without an open call after which a client is taken for gone."""


MOMENT = 0.05
"""Seconds for which outcomes alone wait for something to do: the next round often begins at once,
and then one answer says both."""


Gone = asyncio.Future[None]
"""Done once a caller has hung up."""


class Newest(list[int]):
    """The last eight tickets. (An empty deque takes 760 bytes, and there may be thousands.)"""

    __slots__ = ()

    def append(self, ticket: int) -> None:
        super().append(ticket)
        del self[:-8]


@dataclass(slots=True)
class Seat:
    """What is known of a client, and what waits for it.

    smallest_cohort: the fewest clients in a new model, as it asks for it. calls: how many are open.
    seen: when the last one was, by time.monotonic. missing: it was at
    work and is gone. forms: of the update that is wanted. sent: the newest tickets that it has
    answered. sending: held while some of an update is taken. heard: that the run is over. bells: of
    the calls that wait.
    say: a step of a protocol that the client has to answer, with tensors like `wants`. lies: the
    asking of which all tensors of the answer lie here. answered: the newest asking that it has
    answered, and the digest of what it has answered.
    """

    number: int
    name: str
    examples: int = 0
    held_out: int = 0
    machine: Machine | None = None
    smallest_cohort: int = 1
    here: bool = False
    calls: int = 0
    seen: float = 0.0
    missing: bool = False
    heard: bool = False
    train: Train | None = None
    deadline: float | None = None
    forms: dict[str, Form] = field(default_factory=dict)
    outcomes: dict[int, Outcome] = field(default_factory=dict)
    measure: MeasureThis | None = None
    say: SayThis | None = None
    wants: dict[str, Form] = field(default_factory=dict)
    lies: str = ""
    answered: tuple[str, str] = ("", "")
    sent: Newest = field(default_factory=Newest)
    sending: asyncio.Lock = field(default_factory=asyncio.Lock)
    bells: list[asyncio.Future[None]] = field(default_factory=list)


class Answered(NamedTuple):
    """What a client has answered to a step of a protocol."""

    client: int
    said: AnswerTo


class Desk:
    """The seats of all clients. now: the federation's clock, for what is left until deadlines."""

    def __init__(self, now: Callable[[], float]) -> None:
        self.now = now
        self.seats: dict[int, Seat] = {}
        self.over: str | None = None
        """Why the run has ended, once it has."""
        self.paused = False
        """Whether the server goes away for a while."""
        self.begun = False
        """Whether the first round has begun."""
        self.smallest_cohort = 1
        """The fewest clients in a new model, for all clients."""
        self.open = threading.Event()
        """Set once all that was logged before a restart has been gone through."""
        self.newest: str | None = None
        """The digest of the model that was handed out last."""
        self.final: MeasureThis | None = None
        """The last model, once the run has ended."""
        self.answers: queue.SimpleQueue[Answered] = queue.SimpleQueue()
        """What clients answer to steps of a protocol: here alone, and gone once it is taken."""
        self._lock = threading.Lock()
        self._loop: asyncio.AbstractEventLoop | None = None

    def lives_in(self, loop: asyncio.AbstractEventLoop) -> None:
        """The event loop whose handlers wait here."""
        self._loop = loop

    def seat(self, number: int) -> Seat:
        """That client's, made when it is first named."""
        with self._lock:
            if number not in self.seats:
                self.seats[number] = Seat(number, f"client {number}")
            return self.seats[number]

    def everybody(self) -> list[Seat]:
        """All seats, while others are made."""
        with self._lock:
            return list(self.seats.values())

    def begin(self, seconds: float) -> None:
        """Clients may come. Those who were there before have so long to notice that."""
        for seat in self.everybody():
            seat.seen = time.monotonic() + seconds
        self.open.set()

    # The main thread puts things down

    def assign(
        self, client: int, train: Train, deadline: float | None, forms: dict[str, Form]
    ) -> None:
        """The client is to train this."""
        seat = self.seat(client)
        with self._lock:
            seat.train = train
            seat.deadline = deadline
            seat.forms = forms
            seat.missing = False
        self._ring(seat)

    def done(self, client: int, ticket: int) -> None:
        """Nothing is wanted of the client for this ticket any more."""
        seat = self.seat(client)
        with self._lock:
            if seat.train is not None and seat.train.ticket == ticket:
                seat.train = None
                seat.missing = False
        self._ring(seat)

    def tell(self, client: int, outcome: Outcome) -> None:
        """What became of an update, told until the client confirms it."""
        seat = self.seat(client)
        with self._lock:
            seat.outcomes[outcome.ticket] = outcome
        self._ring(seat)

    def ask_measure(self, client: int, measure: MeasureThis | None) -> None:
        """The client is to measure this model; None: not any more."""
        seat = self.seat(client)
        with self._lock:
            seat.measure = measure
        self._ring(seat)

    def ask(self, client: int, say: SayThis | None, wants: dict[str, Form]) -> None:
        """The client is to answer this, with such tensors; None: not any more."""
        seat = self.seat(client)
        with self._lock:
            seat.say = say
            seat.wants = wants
        self._ring(seat)

    def end(self, reason: str) -> None:
        """The run is over: everybody is told so."""
        self.over = reason
        for seat in self.everybody():
            self._ring(seat)

    def pause(self) -> None:
        """The server stops, and may go on later: calls that wait are answered with nothing."""
        self.paused = True
        for seat in self.everybody():
            self._ring(seat)

    def has_to_tell(self, until: float) -> bool:
        """Whether somebody who is there has not heard that the run is over, which is waited for
        until then; or fetches the last model, or has not had the time to begin with that."""
        now = time.monotonic()
        return any(
            seat.calls or (now - seat.seen < LAST_CALL if seat.heard else now < until)
            for seat in self.everybody()
            if seat.here
        )

    def _ring(self, seat: Seat) -> None:
        """Wakes the handlers that wait for something to say to this client."""
        if self._loop is not None and not self._loop.is_closed():
            self._loop.call_soon_threadsafe(_wake, seat)

    # Handlers, in the event loop

    def confirm(self, client: int, tickets: list[int]) -> None:
        """The client has written these outcomes down."""
        seat = self.seat(client)
        with self._lock:
            for ticket in tickets:
                seat.outcomes.pop(ticket, None)

    def word(self, seat: Seat) -> Word | None:
        """What there is to say to a client now; None where that is nothing."""
        with self._lock:
            outcomes = list(seat.outcomes.values())
            train = seat.train
            if train is not None and seat.deadline is not None:
                left = max(0.0, seat.deadline - self.now())
                train = replace(train, left=left)
            if self.over is not None:
                seat.heard = True
                return Word(outcomes=outcomes, over=self.over, final=self.final)
            if not (outcomes or train or seat.measure or seat.say):
                return None
            return Word(outcomes=outcomes, train=train, measure=seat.measure, say=seat.say)

    async def next(self, seat: Seat, seconds: float, gone: Gone) -> Word:
        """What there is to say to the client, at the latest after so many seconds nothing."""
        until = time.monotonic() + seconds
        while True:
            word = self.word(seat)
            left = 0.0 if self.paused or gone.done() else until - time.monotonic()
            if word is not None and not (word.train or word.measure or word.say or word.over):
                await _rung(seat, gone, MOMENT)
                word = self.word(seat)
            if word is not None or left <= 0:
                return word if word is not None else Word()
            await _rung(seat, gone, left)

    async def watch(self, seat: Seat, ticket: int, seconds: float, gone: Gone) -> Watched:
        """Whether the update with this ticket, or an answer about it, is still wanted; waits while
        it is."""
        until = time.monotonic() + seconds
        while True:
            asked = seat.say is not None and seat.say.ticket == ticket
            if not (asked or self.wants(seat, ticket)):
                why = self.over or "nobody waits for the update any more"
                return Watched(wanted=False, reason=why, over=self.over)
            left = 0.0 if self.paused or gone.done() else until - time.monotonic()
            if left <= 0:
                return Watched(wanted=True)
            await _rung(seat, gone, left)

    def wants(self, seat: Seat, ticket: int) -> bool:
        """Whether an update with this ticket is waited for."""
        return self.over is None and seat.train is not None and seat.train.ticket == ticket

    def asks(self, seat: Seat, ticket: int, asking: str) -> bool:
        """Whether this question about the update is one that the client has to answer now."""
        say = seat.say
        return say is not None and (say.ticket, say.asking) == (ticket, asking)

    def answer(self, seat: Seat, said: AnswerTo, digest: str) -> None:
        """The client has answered what it was asked. digest: of its answer."""
        with self._lock:
            seat.say = None
            seat.answered = said.asking, digest
        self.answers.put(Answered(seat.number, said))

    def called(self, seat: Seat) -> None:
        """A call of the client's has begun."""
        seat.calls += 1
        seat.seen = time.monotonic()

    def hung_up(self, seat: Seat) -> None:
        """It has ended, or was cut off."""
        seat.calls -= 1
        seat.seen = time.monotonic()

    def silent(self, now: float) -> Iterator[Seat]:
        """Those who were here and have not called for too long."""
        for seat in self.everybody():
            if seat.here and not seat.calls and now - seat.seen > GRACE:
                yield seat


def _wake(seat: Seat) -> None:
    """Wakes all calls that wait at the seat."""
    for bell in seat.bells:
        if not bell.done():
            bell.set_result(None)


async def _rung(seat: Seat, gone: Gone, seconds: float) -> None:
    """Waits until there is something new for the client, or it has gone; at most so long.

    Nothing is missed: the bell is rung in the event loop, and the caller has looked at the seat
    since it last waited.
    """
    loop = asyncio.get_running_loop()
    bell: asyncio.Future[None] = loop.create_future()

    def ring(gone: Gone | None = None) -> None:
        if not bell.done():
            bell.set_result(None)

    seat.bells.append(bell)
    gone.add_done_callback(ring)
    # Neither a task nor asyncio.wait, which would hold 1 KB more: thousands of clients wait here.
    late = loop.call_later(seconds, ring)
    try:
        await bell
    finally:
        late.cancel()
        gone.remove_done_callback(ring)
        seat.bells.remove(bell)
