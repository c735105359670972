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
                f"the client speaks version {said.version}, but the server {requests.VERSION}: "
                "install the same dure"
            )
        if self.holds and said.version < HOLDS:
            raise RequestError(
                f"the client speaks version {said.version}, which would send its updates, but in "
                "this run they stay with their clients: install the same dure"
            )
        if said.trains is not None:
            different = self.compare(said.trains, self.trains)
            if different:
                why = f"the client's task differs: {'; '.join(different[:5])}"
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
                f"this site requires at least {said.smallest_cohort:,} clients in each new model, "
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


def check_in_record_of(seat: ClientSession, smallest_cohort: int | None = None) -> CheckInRecord:
    """Return the stored introduction of a client that was available before.

    `smallest_cohort` replaces the client's own value if it is not None.
    """
    asks = seat.smallest_cohort if smallest_cohort is None else smallest_cohort
    return CheckInRecord(seat.name, seat.examples, seat.held_out, seat.machine, asks)


@dataclass
class SessionRoutes:
    """Routes of client sessions, and the check for disconnected clients."""

    served: ServedRun
    desk: ClientOutbox
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
            seat = self.desk.seat(admitted.client)
            seat.name = admitted.name or f"client {admitted.client}"
            examples, held_out = said.examples, said.held_out
            if self.served.holds:
                # Applies also to a client that reports its numbers: the server must not store them.
                examples, held_out = 1, 0
            with OpenRequest(self.desk, seat):
                here = CheckInRecord(
                    seat.name, examples, held_out, said.machine, said.smallest_cohort
                )
                await self._arrives(seat, here)
        differs = differences(said.machine, self.served.machine)
        welcome = self.served.welcome(admitted.client, differs)
        cohort = self.served.keeps_to(said, self.desk.smallest_cohort)
        return answer(replace(welcome, smallest_cohort=cohort))

    def _holds_up(self, said: CheckIn, admitted: Admitted) -> str | None:
        """Return the reason why a started run would have to wait for this client's cohort."""
        desk = self.desk
        if not desk.begun or said.smallest_cohort <= desk.smallest_cohort:
            return None
        others = sum(1 for one in desk.everybody() if one.here and one.number != admitted.client)
        if said.smallest_cohort <= others + 1:
            return None
        return (
            f"the run has started and only {others + 1} of them are connected, including this "
            "one, so all would wait: retry when more are connected"
        )

    async def _arrives(self, seat: ClientSession, here: CheckInRecord) -> None:
        """Record and log that a client is available."""
        seat.here = True
        seat.examples = here.examples
        seat.held_out = here.held_out
        seat.machine = here.machine
        seat.smallest_cohort = here.smallest_cohort
        await logged(self.journal, "check_in", seat.number, body=to_json(here))
        self.watching.arrived(seat)

    async def next(self, request: Request, admitted: Admitted) -> Response:
        ready = await body_of(request, admitted, NextRequest)
        seat = session_of_client(self.desk, admitted)
        self.desk.confirm(seat.number, ready.confirmed)
        with OpenRequest(self.desk, seat):
            await self._comes_back(seat)
            async with connected(request) as gone:
                word = await self.desk.next(seat, self.served.patience, gone)
        # The client may have been revoked while it waited.
        if not self.access.may(seat.number):
            self.access.refuse(seat.number, 403, "revoked", f"client {seat.number} was revoked")
        return answer(word)

    async def _comes_back(self, seat: ClientSession) -> None:
        """Record and log the return of a client that was marked as disconnected."""
        if seat.missing and seat.train is not None:
            seat.missing = False
            await logged(self.journal, "back", seat.number, seat.train.ticket)
            self.watching.back(seat)
        if not seat.here:
            await self._arrives(seat, check_in_record_of(seat))

    async def watch(self, request: Request, admitted: Admitted) -> Response:
        said = await body_of(request, admitted, WatchRequest)
        seat = session_of_client(self.desk, admitted)
        with OpenRequest(self.desk, seat):
            await self._comes_back(seat)
            async with connected(request) as gone:
                heartbeat = self.served.heartbeat
                watched = await self.desk.watch(seat, said.ticket, heartbeat, gone)
        return answer(watched)

    async def look(self) -> None:
        """Detect disconnected clients, and drop the cohort requirements of revoked clients."""
        for seat in self.desk.everybody():
            if seat.smallest_cohort > 1 and not self.access.may(seat.number):
                await logged(
                    self.journal, "asks", seat.number, body=to_json(check_in_record_of(seat, 1))
                )
                seat.smallest_cohort = 1
        for seat in self.desk.silent(time.monotonic()):
            seat.here = False
            seat.missing = seat.train is not None
            try:
                if seat.train is not None:
                    await logged(self.journal, "missing", seat.number, seat.train.ticket)
                else:
                    await logged(self.journal, "leave", seat.number)
                self.watching.left(seat)
            # The disk is full: the next check repeats the attempt.
            except RunFolderWriteError:
                seat.here = True
