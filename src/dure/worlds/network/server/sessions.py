"""Client sessions: enrolment, check-in, requests for work, detection of disconnected clients."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from msgspec.structs import replace
from starlette.requests import Request
from starlette.responses import Response

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
from dure.worlds.network.journal import Journal
from dure.worlds.network.server.access import NEW, AccessControl, Admitted
from dure.worlds.network.server.answers import answer
from dure.worlds.network.server.client_requests import (
    OpenRequest,
    address_of,
    body_of,
    connected,
    logged,
    session_of_client,
)
from dure.worlds.network.server.cohort import CheckInRecord, differences
from dure.worlds.network.server.outbox import ClientOutbox, ClientSession
from dure.worlds.network.server.server_metrics import ServerMetrics

HOLDS = 2
"""First protocol version whose clients support updates that stay at their clients."""


@dataclass
class ServedRun:
    """Description of the run for clients, and the checks of their check-ins.

    Args:
        run: Id of the run.
        clients: Number of clients.
        strategy: Strategy, in the form of run folders.
        seed: Seed of the run.
        trains: Model and task of the run.
        machine: Properties of the server's machine.
        heartbeat: Seconds without a byte after which a connection counts as lost.
        patience: Maximum seconds that a `next` waits.
        compare: Function that returns the differences of two tasks that exclude a client.
        samples: Function of a client's number of examples; returns the most examples that the
            client processes in a round.
        holds: Whether updates stay at their clients.
        roster: Owner's roster in JSON, as in `Welcome`.
        why_not: Function of a cohort size; returns the reason why the run cannot guarantee the size
            for each new model, or None.
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
    why_not: Callable[[int], str | None] = lambda asked: None

    def check(self, said: CheckIn, admitted: Admitted, access: AccessControl) -> None:
        """Check the version and the task of a client. Raises RequestError or Refused."""
        if said.version not in (requests.VERSION, requests.VERSION - 1):
            raise RequestError(
                f"the client speaks version {said.version}, and the server {requests.VERSION}: "
                f"install the same dure"
            )
        if self.holds and said.version < HOLDS:
            raise RequestError(
                f"the client speaks version {said.version}, which would send its updates, and in "
                f"this run they stay with their clients: install the same dure"
            )
        if said.trains is not None:
            different = self.compare(said.trains, self.trains)
            if different:
                why = f"the task is another: {'; '.join(different[:5])}"
                access.refuse(admitted.client, 409, "another task", why)

    def check_cohort(
        self, said: CheckIn, admitted: Admitted, access: AccessControl, under_way: str | None = None
    ) -> None:
        """Check that the run can guarantee the client's smallest cohort. Raises Refused.

        `under_way` is the reason why a started run would have to wait for more clients; None
        otherwise.
        """
        why = self.why_not(said.smallest_cohort) or under_way
        if why is not None:
            reason = (
                f"this site asks for at least {said.smallest_cohort:,} clients in each new model, "
                f"and {why}"
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

    def keeps_to(self, said: CheckIn, cohort: int) -> int:
        """Return the run's smallest cohort after this check-in; `cohort` is the value before."""
        asked = said.smallest_cohort
        return max(cohort, asked) if self.why_not(asked) is None else cohort


def check_in_record_of(session: ClientSession, smallest_cohort: int | None = None) -> CheckInRecord:
    """Return the stored introduction of a client that was available before.

    `smallest_cohort` replaces the client's own value if it is not None.
    """
    asks = session.smallest_cohort if smallest_cohort is None else smallest_cohort
    return CheckInRecord(session.name, session.examples, session.held_out, session.machine, asks)


@dataclass
class SessionRoutes:
    """Routes of client sessions, and the check for disconnected clients."""

    served: ServedRun
    outbox: ClientOutbox
    journal: Journal
    access: AccessControl
    watching: ServerMetrics = field(default_factory=ServerMetrics)

    async def enrol(self, request: Request) -> Response:
        body = await body_of(request, None, requests.Enrol)
        return answer(await asyncio.to_thread(self.access.enrol, body, address_of(request)))

    async def check_in(self, request: Request, admitted: Admitted) -> Response:
        said = await body_of(request, admitted, CheckIn)
        self.served.check(said, admitted, self.access)
        if not said.looks:
            self.served.check_cohort(said, admitted, self.access, self._holds_up(said, admitted))
        # After the checks of the task: a refused client takes no client number.
        if not said.looks and (admitted.client == NEW or said.name or said.wants is not None):
            admitted = await asyncio.to_thread(
                self.access.check_in, admitted, said.name, said.wants
            )
        # A client without examples has a number, but is not available.
        if said.examples and not said.looks:
            session = self.outbox.session(admitted.client)
            session.name = admitted.name or f"client {admitted.client}"
            examples, held_out = said.examples, said.held_out
            if self.served.holds:
                # Applies also to a client that reports its numbers: the server must not store them.
                examples, held_out = 1, 0
            with OpenRequest(self.outbox, session):
                here = CheckInRecord(
                    session.name, examples, held_out, said.machine, said.smallest_cohort
                )
                await self._arrives(session, here)
        differs = differences(said.machine, self.served.machine)
        welcome = self.served.welcome(admitted.client, differs)
        cohort = self.served.keeps_to(said, self.outbox.smallest_cohort)
        return answer(replace(welcome, smallest_cohort=cohort))

    def _holds_up(self, said: CheckIn, admitted: Admitted) -> str | None:
        """Return the reason why a started run would have to wait for this client's cohort."""
        outbox = self.outbox
        if not outbox.begun or said.smallest_cohort <= outbox.smallest_cohort:
            return None
        others = sum(1 for one in outbox.everybody() if one.here and one.number != admitted.client)
        if said.smallest_cohort <= others + 1:
            return None
        return (
            f"the run is under way with {others + 1} of them, this one included, who would have to "
            f"wait: come again when more are there"
        )

    async def _arrives(self, session: ClientSession, here: CheckInRecord) -> None:
        """Record and log that a client is available."""
        session.here = True
        session.examples = here.examples
        session.held_out = here.held_out
        session.machine = here.machine
        session.smallest_cohort = here.smallest_cohort
        await logged(self.journal, "check_in", session.number, body=to_json(here))
        self.watching.arrived(session)

    async def next(self, request: Request, admitted: Admitted) -> Response:
        ready = await body_of(request, admitted, NextRequest)
        session = session_of_client(self.outbox, admitted)
        self.outbox.confirm(session.number, ready.confirmed)
        with OpenRequest(self.outbox, session):
            await self._comes_back(session)
            async with connected(request) as gone:
                word = await self.outbox.next(session, self.served.patience, gone)
        # The client may have been revoked while it waited.
        if not self.access.may(session.number):
            self.access.refuse(
                session.number, 403, "revoked", f"client {session.number} was revoked"
            )
        return answer(word)

    async def _comes_back(self, session: ClientSession) -> None:
        """Record and log the return of a client that was marked as disconnected."""
        if session.missing and session.train is not None:
            session.missing = False
            await logged(self.journal, "back", session.number, session.train.ticket)
            self.watching.back(session)
        if not session.here:
            await self._arrives(session, check_in_record_of(session))

    async def watch(self, request: Request, admitted: Admitted) -> Response:
        said = await body_of(request, admitted, WatchRequest)
        session = session_of_client(self.outbox, admitted)
        with OpenRequest(self.outbox, session):
            await self._comes_back(session)
            async with connected(request) as gone:
                heartbeat = self.served.heartbeat
                watched = await self.outbox.watch(session, said.ticket, heartbeat, gone)
        return answer(watched)

    async def look(self) -> None:
        """Detect disconnected clients, and drop the cohort requirements of revoked clients."""
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
            session.here = False
            session.missing = session.train is not None
            try:
                if session.train is not None:
                    await logged(self.journal, "missing", session.number, session.train.ticket)
                else:
                    await logged(self.journal, "leave", session.number)
                self.watching.left(session)
            # The disk is full: the next check repeats the attempt.
            except RunFolderWriteError:
                session.here = True
