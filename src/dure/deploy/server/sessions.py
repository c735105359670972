"""HTTP routes of client sessions, and the detection of disconnected clients.

    enrol       a client exchanges an invitation for a client number
    check_in    a client introduces itself, and learns the run's task and settings
    next        a client waits for work (long polling)
    watch       a client at work waits for the news that its update is no longer needed

The journal logs every change of a session, so that a restarted server has the same sessions.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from msgspec.structs import replace
from starlette.requests import Request
from starlette.responses import Response

from dure.deploy.journal import Journal
from dure.deploy.server.access import NEW, AccessControl, Admitted
from dure.deploy.server.answers import answer
from dure.deploy.server.client_requests import (
    OpenRequest,
    address_of,
    body_of,
    connected,
    logged,
    session_of_client,
)
from dure.deploy.server.cohort import CheckInRecord, differences
from dure.deploy.server.outbox import ClientOutbox, ClientSession
from dure.deploy.server.server_metrics import ServerMetrics
from dure.errors import RunFolderWriteError
from dure.wire import requests
from dure.wire.requests import (
    CheckIn,
    Machine,
    NextRequest,
    RequestError,
    TaskDescription,
    WatchRequest,
    Welcome,
    to_json,
)

FIRST_VERSION_WITH_HELD_UPDATES = 2
"""First protocol version whose clients support held updates, as in secure aggregation.

A held update stays at its client: the server receives only the client's masked part of a sum.
"""


@dataclass
class ServedRun:
    """Description of the run for clients, and the checks of their check-ins.

    Args:
        run: Id of the run.
        clients: Number of clients.
        strategy: Strategy as JSON values, as in config.json.
        seed: Seed of the run.
        trains: Model and task of the run.
        machine: Properties of the server's machine.
        heartbeat: Seconds without a byte after which a connection counts as lost.
        patience: Maximum seconds after which a request `next` is answered without work.
        compare: Function of a client's task and the run's task; returns descriptions of their
            differences. A client with a difference is rejected.
        samples: Function of a client's number of examples; returns the maximum number of samples
            that the client may report as processed in a round (`Uploads`).
        holds: Whether updates are held: an update stays at its client, as in secure aggregation.
        roster: List of the federation's clients, signed by its owner, in JSON; empty without.
        cohort_objection: Function of a number of clients; returns the reason why the run cannot
            combine the updates of at least so many clients in each new model, or None.
    """

    run: str
    clients: int
    strategy: dict[str, Any]
    seed: int
    trains: TaskDescription
    machine: Machine
    heartbeat: float
    patience: float
    compare: Callable[[TaskDescription, TaskDescription], list[str]]
    samples: Callable[[int], int]
    holds: bool = False
    roster: str = ""
    cohort_objection: Callable[[int], str | None] = lambda asked: None

    def check(self, message: CheckIn, admitted: Admitted, access: AccessControl) -> None:
        """Check the protocol version and the task of a client. Raises RequestError or Refused."""
        if message.version not in (requests.VERSION, requests.VERSION - 1):
            raise RequestError(
                f"the client speaks version {message.version}, but the server {requests.VERSION}: "
                "install the same dure"
            )
        if self.holds and message.version < FIRST_VERSION_WITH_HELD_UPDATES:
            raise RequestError(
                f"the client speaks version {message.version}, which would send its updates, "
                "but in this run they stay with their clients: install the same dure"
            )
        if message.trains is not None:
            different = self.compare(message.trains, self.trains)
            if different:
                why = f"the client's task differs: {'; '.join(different[:5])}"
                access.refuse(admitted.client, 409, "another task", why)

    def check_cohort(
        self,
        message: CheckIn,
        admitted: Admitted,
        access: AccessControl,
        reason_to_wait: str | None = None,
    ) -> None:
        """Check that the run can meet the client's requirement of a smallest cohort.

        The requirement is the minimum number of clients of each new model. Raises Refused.
        `reason_to_wait` describes why a started run would have to wait for more clients; None if it
        would not.
        """
        why = self.cohort_objection(message.smallest_cohort) or reason_to_wait
        if why is not None:
            reason = (
                f"this site requires at least {message.smallest_cohort:,} clients in each new "
                f"model, and {why}"
            )
            access.refuse(admitted.client, 409, "smallest cohort", reason)

    def welcome(self, client: int, differs: list[str]) -> Welcome:
        """Return the answer to a check-in; `differs` names differences of the client's machine."""
        return Welcome(
            version=requests.VERSION,
            run=self.run,
            client=client,
            clients=self.clients,
            strategy=self.strategy,
            seed=self.seed,
            trains=self.trains,
            machine=self.machine,
            heartbeat=self.heartbeat,
            patience=self.patience,
            differs=differs,
            holds=self.holds,
            roster=self.roster,
        )

    def smallest_cohort_with(self, message: CheckIn, cohort: int) -> int:
        """Return the run's smallest cohort once this client has checked in.

        The smallest cohort is the minimum number of clients of a new model, and the maximum of the
        clients' requirements. `cohort` is the value before. A requirement that the run cannot meet
        does not count.
        """
        asked = message.smallest_cohort
        return max(cohort, asked) if self.cohort_objection(asked) is None else cohort


def check_in_record_of(session: ClientSession, smallest_cohort: int | None = None) -> CheckInRecord:
    """Return the journal's record of a check-in, made from the fields of a session.

    `smallest_cohort` replaces the client's requirement if it is not None.
    """
    asks = session.smallest_cohort if smallest_cohort is None else smallest_cohort
    return CheckInRecord(session.name, session.examples, session.held_out, session.machine, asks)


@dataclass
class SessionRoutes:
    """Routes of client sessions, and the detection of disconnected clients.

    Each request with a signature has an `Admitted`, the result of its authentication.
    """

    served: ServedRun
    outbox: ClientOutbox
    journal: Journal
    access: AccessControl
    server_metrics: ServerMetrics = field(default_factory=ServerMetrics)

    async def enrol(self, request: Request) -> Response:
        """Register a client's public key in exchange for the token of an invitation."""
        body = await body_of(request, None, requests.Enrol)
        return answer(await asyncio.to_thread(self.access.enrol, body, address_of(request)))

    async def check_in(self, request: Request, admitted: Admitted) -> Response:
        """Check a client, give it a number, mark it as available, and answer with the run's facts.

        A client that only observes (`CheckIn.looks`) gets the answer alone.
        """
        message = await body_of(request, admitted, CheckIn)
        self.served.check(message, admitted, self.access)
        if not message.looks:
            self.served.check_cohort(
                message, admitted, self.access, self._reason_to_wait(message, admitted)
            )
        # After the checks: a rejected client takes no client number.
        if not message.looks and (
            admitted.client == NEW or message.name or message.wants is not None
        ):
            admitted = await asyncio.to_thread(
                self.access.check_in, admitted, message.name, message.wants
            )
        # A client without examples has a number, but is not available.
        if message.examples and not message.looks:
            session = self.outbox.session(admitted.client)
            session.name = admitted.name or f"client {admitted.client}"
            examples, held_out = message.examples, message.held_out
            if self.served.holds:
                # The server must not store the numbers of examples of a client, even if the client
                # sends them: its update is held, and so are facts about its data.
                examples, held_out = 1, 0
            with OpenRequest(self.outbox, session):
                record = CheckInRecord(
                    session.name, examples, held_out, message.machine, message.smallest_cohort
                )
                await self._mark_available(session, record)
        differs = differences(message.machine, self.served.machine)
        welcome = self.served.welcome(admitted.client, differs)
        cohort = self.served.smallest_cohort_with(message, self.outbox.smallest_cohort)
        return answer(replace(welcome, smallest_cohort=cohort))

    def _reason_to_wait(self, message: CheckIn, admitted: Admitted) -> str | None:
        """Return the reason why a started run would have to wait for the client's requirement.

        None if the run has not started, or has enough available clients.
        """
        outbox = self.outbox
        if not outbox.begun or message.smallest_cohort <= outbox.smallest_cohort:
            return None
        others = sum(
            1 for one in outbox.everybody() if one.available and one.number != admitted.client
        )
        if message.smallest_cohort <= others + 1:
            return None
        return (
            f"the run has started and only {others + 1} of them are connected, including this "
            "one, so all would wait: retry when more are connected"
        )

    async def _mark_available(self, session: ClientSession, record: CheckInRecord) -> None:
        """Store the record of a check-in in the session, and log that the client is available."""
        session.available = True
        session.examples = record.examples
        session.held_out = record.held_out
        session.machine = record.machine
        session.smallest_cohort = record.smallest_cohort
        await logged(self.journal, "check_in", session.number, body=to_json(record))
        self.server_metrics.arrived(session)

    async def next(self, request: Request, admitted: Admitted) -> Response:
        """Wait for work for a client, for at most `ServedRun.patience` seconds."""
        ready = await body_of(request, admitted, NextRequest)
        session = session_of_client(self.outbox, admitted)
        self.outbox.confirm(session.number, ready.confirmed)
        with OpenRequest(self.outbox, session):
            await self._mark_returned(session)
            async with connected(request) as gone:
                reply = await self.outbox.next(session, self.served.patience, gone)
        # The client may have been revoked while it waited.
        if not self.access.may(session.number):
            self.access.refuse(
                session.number, 403, "revoked", f"client {session.number} was revoked"
            )
        return answer(reply)

    async def _mark_returned(self, session: ClientSession) -> None:
        """Record and log the return of a disconnected client.

        A client is missing if it has disconnected with an assignment, and unavailable after any
        disconnection.
        """
        if session.missing and session.train is not None:
            session.missing = False
            await logged(self.journal, "back", session.number, session.train.ticket)
            self.server_metrics.back(session)
        if not session.available:
            await self._mark_available(session, check_in_record_of(session))

    async def watch(self, request: Request, admitted: Admitted) -> Response:
        """Wait while a client's update is still needed, for at most `ServedRun.heartbeat` seconds.

        The open request also shows that the client is connected while it trains.
        """
        message = await body_of(request, admitted, WatchRequest)
        session = session_of_client(self.outbox, admitted)
        with OpenRequest(self.outbox, session):
            await self._mark_returned(session)
            async with connected(request) as gone:
                heartbeat = self.served.heartbeat
                watched = await self.outbox.watch(session, message.ticket, heartbeat, gone)
        return answer(watched)

    async def detect_disconnected(self) -> None:
        """Mark disconnected clients, and drop the cohort requirements of revoked clients.

        The server calls this method several times per second.
        """
        for session in self.outbox.everybody():
            if session.smallest_cohort > 1 and not self.access.may(session.number):
                await logged(
                    self.journal,
                    "asks",
                    session.number,
                    body=to_json(check_in_record_of(session, 1)),
                )
                session.smallest_cohort = 1
        for session in self.outbox.silent(time.monotonic()):
            session.available = False
            session.missing = session.train is not None
            try:
                if session.train is not None:
                    await logged(self.journal, "missing", session.number, session.train.ticket)
                else:
                    await logged(self.journal, "leave", session.number)
                self.server_metrics.left(session)
            # The disk is full: the next call tries again.
            except RunFolderWriteError:
                session.available = True
