"""Outbox: sessions of clients, and the messages that wait for each client's next request.

Only clients send requests. A message of the coordinator to a client waits in the outbox for the
client's `next`: outcomes of its updates, then work. Two threads use the outbox: the event loop
answers clients, and the main thread, which drives the coordinator, adds messages. A lock protects
each change, and the changes are short.

A client is *here* from its check-in until no request of it has been open for `GRACE` seconds. A
broken connection leaves an open request that no peer reads; since the server answers requests
within `heartbeat` seconds, a client that sends no further request counts as disconnected.
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
    EvaluationTask,
    Machine,
    NextAnswer,
    ProtocolAnswerBody,
    ProtocolStepBody,
    Train,
    UpdateOutcome,
    WatchAnswer,
)
from dure.wire.tensors import TensorSpec

LAST_CALL = 0.3
"""Seconds in which a client that knows the end of the run starts to fetch the last model."""

GRACE = 2.0
"""Seconds without an open request after which a client counts as disconnected."""


MOMENT = 0.05
"""Seconds for which outcomes wait for new work.

The next round often begins at once, and a single answer then has both.
"""


DisconnectFuture = asyncio.Future[None]
"""Future that is done once the client has disconnected."""


class RecentIds(list[int]):
    """The last eight assignment ids.

    (An empty deque takes 760 bytes, and there may be thousands.)
    """

    __slots__ = ()

    def append(self, ticket: int) -> None:
        super().append(ticket)
        del self[:-8]


@dataclass(slots=True)
class ClientSession:
    """Session of a client: its known facts, and its waiting messages.

    Args:
        number: Number of the client.
        name: Name of the client.
        examples: Number of training examples.
        held_out: Number of held-out examples.
        machine: Properties of the client's machine.
        smallest_cohort: Minimum number of clients of a new model that the client requires.
        here: Whether the client is available.
        calls: Number of open requests.
        seen: Time of the last request, on the clock time.monotonic.
        missing: Whether the client has disconnected while at work.
        heard: Whether the client has received the end of the run.
        train: Current assignment.
        deadline: Deadline of the assignment on the federation's clock.
        forms: Dtypes and shapes of the expected update.
        outcomes: Unconfirmed outcomes by assignment id.
        measure: Model to evaluate.
        say: Step of a protocol that the client has to answer.
        wants: Dtypes and shapes of the tensors of that answer.
        uploaded_answer: Question whose answer's tensors have been uploaded completely.
        answered: Newest answered question, and the digest of the answer.
        sent: Newest assignment ids that the client has answered.
        sending: Lock of the upload in progress.
        bells: Futures of the waiting requests.
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
    forms: dict[str, TensorSpec] = field(default_factory=dict)
    outcomes: dict[int, UpdateOutcome] = field(default_factory=dict)
    measure: EvaluationTask | None = None
    say: ProtocolStepBody | None = None
    wants: dict[str, TensorSpec] = field(default_factory=dict)
    uploaded_answer: str = ""
    answered: tuple[str, str] = ("", "")
    sent: RecentIds = field(default_factory=RecentIds)
    sending: asyncio.Lock = field(default_factory=asyncio.Lock)
    bells: list[asyncio.Future[None]] = field(default_factory=list)


class ClientAnswer(NamedTuple):
    """Answer of a client to a step of a protocol."""

    client: int
    said: ProtocolAnswerBody


class ClientOutbox:
    """Sessions of all clients. `now` returns the federation's clock, for deadlines."""

    def __init__(self, now: Callable[[], float]) -> None:
        self.now = now
        self.seats: dict[int, ClientSession] = {}
        self.over: str | None = None
        """Reason why the run has ended; None while it runs."""
        self.paused = False
        """Whether the server is about to stop and may restart later."""
        self.begun = False
        """Whether the first round has begun."""
        self.smallest_cohort = 1
        """Minimum number of clients of a new model in this run."""
        self.open = threading.Event()
        """Set after all events from before a restart are applied."""
        self.newest: str | None = None
        """Digest of the model assigned last."""
        self.final: EvaluationTask | None = None
        """Last model, once the run has ended."""
        self.answers: queue.SimpleQueue[ClientAnswer] = queue.SimpleQueue()
        """Answers of clients to steps of a protocol, in memory only until taken."""
        self._lock = threading.Lock()
        self._loop: asyncio.AbstractEventLoop | None = None

    def lives_in(self, loop: asyncio.AbstractEventLoop) -> None:
        """Set the event loop in which handlers wait."""
        self._loop = loop

    def seat(self, number: int) -> ClientSession:
        """Return the client's session; create it at the first call."""
        with self._lock:
            if number not in self.seats:
                self.seats[number] = ClientSession(number, f"client {number}")
            return self.seats[number]

    def everybody(self) -> list[ClientSession]:
        """Return all sessions, safely while others are created."""
        with self._lock:
            return list(self.seats.values())

    def begin(self, seconds: float) -> None:
        """Open the server; earlier clients have `seconds` to reconnect."""
        for seat in self.everybody():
            seat.seen = time.monotonic() + seconds
        self.open.set()

    # Methods of the main thread

    def assign(
        self, client: int, train: Train, deadline: float | None, forms: dict[str, TensorSpec]
    ) -> None:
        """Give the client an assignment."""
        seat = self.seat(client)
        with self._lock:
            seat.train = train
            seat.deadline = deadline
            seat.forms = forms
            seat.missing = False
        self._ring(seat)

    def done(self, client: int, ticket: int) -> None:
        """End the client's assignment."""
        seat = self.seat(client)
        with self._lock:
            if seat.train is not None and seat.train.ticket == ticket:
                seat.train = None
                seat.missing = False
        self._ring(seat)

    def tell(self, client: int, outcome: UpdateOutcome) -> None:
        """Send the outcome of an update until the client confirms it."""
        seat = self.seat(client)
        with self._lock:
            seat.outcomes[outcome.ticket] = outcome
        self._ring(seat)

    def ask_measure(self, client: int, measure: EvaluationTask | None) -> None:
        """Request an evaluation of this model; None withdraws the request."""
        seat = self.seat(client)
        with self._lock:
            seat.measure = measure
        self._ring(seat)

    def ask(self, client: int, say: ProtocolStepBody | None, wants: dict[str, TensorSpec]) -> None:
        """Request an answer with such tensors; None withdraws the request."""
        seat = self.seat(client)
        with self._lock:
            seat.say = say
            seat.wants = wants
        self._ring(seat)

    def end(self, reason: str) -> None:
        """Report to all clients that the run has ended."""
        self.over = reason
        for seat in self.everybody():
            self._ring(seat)

    def pause(self) -> None:
        """Answer all waiting requests without work, because the server stops for a while."""
        self.paused = True
        for seat in self.everybody():
            self._ring(seat)

    def has_to_tell(self, until: float) -> bool:
        """Return whether an available client still needs the end of the run or the last model.

        Clients that have not received the end are waited for until `until`; clients that have
        received it get `LAST_CALL` seconds to start fetching the model.
        """
        now = time.monotonic()
        return any(
            seat.calls or (now - seat.seen < LAST_CALL if seat.heard else now < until)
            for seat in self.everybody()
            if seat.here
        )

    def _ring(self, seat: ClientSession) -> None:
        """Wake the handlers that wait for a message to this client."""
        if self._loop is not None and not self._loop.is_closed():
            self._loop.call_soon_threadsafe(_wake, seat)

    # Methods of the handlers, in the event loop

    def confirm(self, client: int, tickets: list[int]) -> None:
        """Remove outcomes that the client has stored."""
        seat = self.seat(client)
        with self._lock:
            for ticket in tickets:
                seat.outcomes.pop(ticket, None)

    def word(self, seat: ClientSession) -> NextAnswer | None:
        """Return the messages to a client; None without messages."""
        with self._lock:
            outcomes = list(seat.outcomes.values())
            train = seat.train
            if train is not None and seat.deadline is not None:
                left = max(0.0, seat.deadline - self.now())
                train = replace(train, left=left)
            if self.over is not None:
                seat.heard = True
                return NextAnswer(outcomes=outcomes, over=self.over, final=self.final)
            if not (outcomes or train or seat.measure or seat.say):
                return None
            return NextAnswer(outcomes=outcomes, train=train, measure=seat.measure, say=seat.say)

    async def next(self, seat: ClientSession, seconds: float, gone: DisconnectFuture) -> NextAnswer:
        """Wait for messages to the client; return an empty message after `seconds`."""
        until = time.monotonic() + seconds
        while True:
            word = self.word(seat)
            left = 0.0 if self.paused or gone.done() else until - time.monotonic()
            if word is not None and not (word.train or word.measure or word.say or word.over):
                await _rung(seat, gone, MOMENT)
                word = self.word(seat)
            if word is not None or left <= 0:
                return word if word is not None else NextAnswer()
            await _rung(seat, gone, left)

    async def watch(
        self, seat: ClientSession, ticket: int, seconds: float, gone: DisconnectFuture
    ) -> WatchAnswer:
        """Wait while the update, or an answer about it, is still needed, for at most `seconds`."""
        until = time.monotonic() + seconds
        while True:
            asked = seat.say is not None and seat.say.ticket == ticket
            if not (asked or self.wants(seat, ticket)):
                why = self.over or "the update is not needed any more"
                return WatchAnswer(wanted=False, reason=why, over=self.over)
            left = 0.0 if self.paused or gone.done() else until - time.monotonic()
            if left <= 0:
                return WatchAnswer(wanted=True)
            await _rung(seat, gone, left)

    def wants(self, seat: ClientSession, ticket: int) -> bool:
        """Return whether the server waits for an update with this assignment id."""
        return self.over is None and seat.train is not None and seat.train.ticket == ticket

    def asks(self, seat: ClientSession, ticket: int, asking: str) -> bool:
        """Return whether this is the question that the client has to answer now."""
        say = seat.say
        return say is not None and (say.ticket, say.asking) == (ticket, asking)

    def answer(self, seat: ClientSession, said: ProtocolAnswerBody, digest: str) -> None:
        """Record the client's answer to its question; `digest` is that of the answer."""
        with self._lock:
            seat.say = None
            seat.answered = said.asking, digest
        self.answers.put(ClientAnswer(seat.number, said))

    def called(self, seat: ClientSession) -> None:
        """Record the start of a request."""
        seat.calls += 1
        seat.seen = time.monotonic()

    def hung_up(self, seat: ClientSession) -> None:
        """Record the end of a request, or a broken connection."""
        seat.calls -= 1
        seat.seen = time.monotonic()

    def silent(self, now: float) -> Iterator[ClientSession]:
        """Yield sessions of available clients without a request for `GRACE` seconds."""
        for seat in self.everybody():
            if seat.here and not seat.calls and now - seat.seen > GRACE:
                yield seat


def _wake(seat: ClientSession) -> None:
    """Wake all waiting requests of a session."""
    for bell in seat.bells:
        if not bell.done():
            bell.set_result(None)


async def _rung(seat: ClientSession, gone: DisconnectFuture, seconds: float) -> None:
    """Wait for news for the client or its disconnection, for at most `seconds`.

    No event is missed: futures are completed in the event loop, and the caller has checked the
    session since its last wait.
    """
    loop = asyncio.get_running_loop()
    bell: asyncio.Future[None] = loop.create_future()

    def ring(gone: DisconnectFuture | None = None) -> None:
        if not bell.done():
            bell.set_result(None)

    seat.bells.append(bell)
    gone.add_done_callback(ring)
    # Neither a task nor asyncio.wait, which would take 1 KB more per client, and thousands wait
    # here.
    late = loop.call_later(seconds, ring)
    try:
        await bell
    finally:
        late.cancel()
        gone.remove_done_callback(ring)
        seat.bells.remove(bell)
