"""Outbox: sessions of clients, and the messages that wait for each client's next request.

Only clients send requests. A message of the coordinator to a client waits in the outbox for the
client's `next`: outcomes of its updates, then work. Two threads use the outbox: the event loop
answers clients, and the main thread, which drives the coordinator, adds messages. A lock protects
each change, and the changes are short.

A client is *available* from its check-in until no request of it has been open for `GRACE` seconds.
A broken connection leaves an open request that no peer reads; since the server answers requests
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
        available: Whether the client is available.
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
    available: bool = False
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
        self.sessions: dict[int, ClientSession] = {}
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

    def session(self, number: int) -> ClientSession:
        """Return the client's session; create it at the first call."""
        with self._lock:
            if number not in self.sessions:
                self.sessions[number] = ClientSession(number, f"client {number}")
            return self.sessions[number]

    def everybody(self) -> list[ClientSession]:
        """Return all sessions, safely while others are created."""
        with self._lock:
            return list(self.sessions.values())

    def begin(self, seconds: float) -> None:
        """Open the server; earlier clients have `seconds` to reconnect."""
        for session in self.everybody():
            session.seen = time.monotonic() + seconds
        self.open.set()

    # Methods of the main thread

    def assign(
        self, client: int, train: Train, deadline: float | None, forms: dict[str, TensorSpec]
    ) -> None:
        """Give the client an assignment."""
        session = self.session(client)
        with self._lock:
            session.train = train
            session.deadline = deadline
            session.forms = forms
            session.missing = False
        self._ring(session)

    def done(self, client: int, ticket: int) -> None:
        """End the client's assignment."""
        session = self.session(client)
        with self._lock:
            if session.train is not None and session.train.ticket == ticket:
                session.train = None
                session.missing = False
        self._ring(session)

    def tell(self, client: int, outcome: UpdateOutcome) -> None:
        """Send the outcome of an update until the client confirms it."""
        session = self.session(client)
        with self._lock:
            session.outcomes[outcome.ticket] = outcome
        self._ring(session)

    def ask_measure(self, client: int, measure: EvaluationTask | None) -> None:
        """Request an evaluation of this model; None withdraws the request."""
        session = self.session(client)
        with self._lock:
            session.measure = measure
        self._ring(session)

    def ask(self, client: int, say: ProtocolStepBody | None, wants: dict[str, TensorSpec]) -> None:
        """Request an answer with such tensors; None withdraws the request."""
        session = self.session(client)
        with self._lock:
            session.say = say
            session.wants = wants
        self._ring(session)

    def end(self, reason: str) -> None:
        """Report to all clients that the run has ended."""
        self.over = reason
        for session in self.everybody():
            self._ring(session)

    def pause(self) -> None:
        """Answer all waiting requests without work, because the server stops for a while."""
        self.paused = True
        for session in self.everybody():
            self._ring(session)

    def has_to_tell(self, until: float) -> bool:
        """Return whether an available client still needs the end of the run or the last model.

        Clients that have not received the end are waited for until `until`; clients that have
        received it get `LAST_CALL` seconds to start fetching the model.
        """
        now = time.monotonic()
        return any(
            session.calls or (now - session.seen < LAST_CALL if session.heard else now < until)
            for session in self.everybody()
            if session.available
        )

    def _ring(self, session: ClientSession) -> None:
        """Wake the handlers that wait for a message to this client."""
        if self._loop is not None and not self._loop.is_closed():
            self._loop.call_soon_threadsafe(_wake, session)

    # Methods of the handlers, in the event loop

    def confirm(self, client: int, tickets: list[int]) -> None:
        """Remove outcomes that the client has stored."""
        session = self.session(client)
        with self._lock:
            for ticket in tickets:
                session.outcomes.pop(ticket, None)

    def word(self, session: ClientSession) -> NextAnswer | None:
        """Return the messages to a client; None without messages."""
        with self._lock:
            outcomes = list(session.outcomes.values())
            train = session.train
            if train is not None and session.deadline is not None:
                left = max(0.0, session.deadline - self.now())
                train = replace(train, left=left)
            if self.over is not None:
                session.heard = True
                return NextAnswer(outcomes=outcomes, over=self.over, final=self.final)
            if not (outcomes or train or session.measure or session.say):
                return None
            return NextAnswer(
                outcomes=outcomes, train=train, measure=session.measure, say=session.say
            )

    async def next(
        self, session: ClientSession, seconds: float, gone: DisconnectFuture
    ) -> NextAnswer:
        """Wait for messages to the client; return an empty message after `seconds`."""
        until = time.monotonic() + seconds
        while True:
            word = self.word(session)
            left = 0.0 if self.paused or gone.done() else until - time.monotonic()
            if word is not None and not (word.train or word.measure or word.say or word.over):
                await _rung(session, gone, MOMENT)
                word = self.word(session)
            if word is not None or left <= 0:
                return word if word is not None else NextAnswer()
            await _rung(session, gone, left)

    async def watch(
        self, session: ClientSession, ticket: int, seconds: float, gone: DisconnectFuture
    ) -> WatchAnswer:
        """Wait while the update, or an answer about it, is still needed, for at most `seconds`."""
        until = time.monotonic() + seconds
        while True:
            asked = session.say is not None and session.say.ticket == ticket
            if not (asked or self.wants(session, ticket)):
                why = self.over or "the update is not needed any more"
                return WatchAnswer(wanted=False, reason=why, over=self.over)
            left = 0.0 if self.paused or gone.done() else until - time.monotonic()
            if left <= 0:
                return WatchAnswer(wanted=True)
            await _rung(session, gone, left)

    def wants(self, session: ClientSession, ticket: int) -> bool:
        """Return whether the server waits for an update with this assignment id."""
        return self.over is None and session.train is not None and session.train.ticket == ticket

    def asks(self, session: ClientSession, ticket: int, asking: str) -> bool:
        """Return whether this is the question that the client has to answer now."""
        say = session.say
        return say is not None and (say.ticket, say.asking) == (ticket, asking)

    def answer(self, session: ClientSession, said: ProtocolAnswerBody, digest: str) -> None:
        """Record the client's answer to its question; `digest` is that of the answer."""
        with self._lock:
            session.say = None
            session.answered = said.asking, digest
        self.answers.put(ClientAnswer(session.number, said))

    def called(self, session: ClientSession) -> None:
        """Record the start of a request."""
        session.calls += 1
        session.seen = time.monotonic()

    def hung_up(self, session: ClientSession) -> None:
        """Record the end of a request, or a broken connection."""
        session.calls -= 1
        session.seen = time.monotonic()

    def silent(self, now: float) -> Iterator[ClientSession]:
        """Yield sessions of available clients without a request for `GRACE` seconds."""
        for session in self.everybody():
            if session.available and not session.calls and now - session.seen > GRACE:
                yield session


def _wake(session: ClientSession) -> None:
    """Wake all waiting requests of a session."""
    for bell in session.bells:
        if not bell.done():
            bell.set_result(None)


async def _rung(session: ClientSession, gone: DisconnectFuture, seconds: float) -> None:
    """Wait for news for the client or its disconnection, for at most `seconds`.

    No event is missed: futures are completed in the event loop, and the caller has checked the
    session since its last wait.
    """
    loop = asyncio.get_running_loop()
    bell: asyncio.Future[None] = loop.create_future()

    def ring(gone: DisconnectFuture | None = None) -> None:
        if not bell.done():
            bell.set_result(None)

    session.bells.append(bell)
    gone.add_done_callback(ring)
    # Neither a task nor asyncio.wait, which would take 1 KB more per client, and thousands wait
    # here.
    late = loop.call_later(seconds, ring)
    try:
        await bell
    finally:
        late.cancel()
        gone.remove_done_callback(ring)
        session.bells.remove(bell)
