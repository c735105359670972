"""Who is there: clients enrol, check in and ask what to do, and are gone where they fall silent."""

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
    Ready,
    RequestError,
    Trains,
    Watch,
    Welcome,
    to_json,
)
from dure.worlds.network.journal import Journal
from dure.worlds.network.server.access import NEW, Access, Admitted
from dure.worlds.network.server.answers import answer
from dure.worlds.network.server.calls import Call, address_of, body_of, connected, known, logged
from dure.worlds.network.server.cohort import Here, differences
from dure.worlds.network.server.desk import Desk, Seat
from dure.worlds.network.server.watching import Watching

HOLDS = 2
"""The first version whose clients keep updates where they are to stay with them."""


@dataclass
class Served:
    """What clients are told of the run when they check in, and what of theirs cannot be.

    compare: in what a client's task differs, so that it cannot take part. samples: how many a
    client with so many examples processes in a round, at the most. holds: updates stay with their
    clients. roster: as `Welcome` has it. why_not: why the run cannot keep to so many clients in
    each new model, in words; None where it can.
    """

    run: str
    clients: int
    strategy: dict[str, Any]
    seed: int
    trains: Trains
    machine: Machine
    heartbeat: float
    patience: float
    compare: Callable[[Trains, Trains], list[str]]
    samples: Callable[[int], int]
    holds: bool = False
    roster: str = ""
    why_not: Callable[[int], str | None] = lambda asked: None

    def check(self, said: CheckIn, admitted: Admitted, access: Access) -> None:
        """Raises RequestError for a client of another version, Refused for one of another task."""
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
        self, said: CheckIn, admitted: Admitted, access: Access, under_way: str | None = None
    ) -> None:
        """Raises Refused for a client that asks for more clients in a new model than the run has.

        under_way: why a run that has begun would have to wait for others, in words.
        """
        why = self.why_not(said.smallest_cohort) or under_way
        if why is not None:
            reason = (
                f"this site asks for at least {said.smallest_cohort:,} clients in each new model, "
                f"and {why}"
            )
            access.refuse(admitted.client, 409, "smallest cohort", reason)

    def welcome(self, client: int, differs: list[str]) -> Welcome:
        """What a client of this number is told. differs: in what it computes differently."""
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
        """Of how many clients a new model is made from now on. cohort: before this check-in."""
        asked = said.smallest_cohort
        return max(cohort, asked) if self.why_not(asked) is None else cohort


def here_of(seat: Seat, smallest_cohort: int | None = None) -> Here:
    """What a client that was there before has said of itself. smallest_cohort: in place of its
    own."""
    asks = seat.smallest_cohort if smallest_cohort is None else smallest_cohort
    return Here(seat.name, seat.examples, seat.held_out, seat.machine, asks)


@dataclass
class Attendance:
    """The routes of who is there, and the look at who has gone."""

    served: Served
    desk: Desk
    journal: Journal
    access: Access
    watching: Watching = field(default_factory=Watching)

    async def enrol(self, request: Request) -> Response:
        body = await body_of(request, None, requests.Enrol)
        return answer(await asyncio.to_thread(self.access.enrol, body, address_of(request)))

    async def check_in(self, request: Request, admitted: Admitted) -> Response:
        said = await body_of(request, admitted, CheckIn)
        self.served.check(said, admitted, self.access)
        if not said.looks:
            self.served.check_cohort(said, admitted, self.access, self._holds_up(said, admitted))
        # After it is known to fit: whoever is refused takes nobody's place.
        if not said.looks and (admitted.client == NEW or said.name or said.wants is not None):
            admitted = await asyncio.to_thread(
                self.access.check_in, admitted, said.name, said.wants
            )
        # Without examples it has its number, and is not there yet.
        if said.examples and not said.looks:
            seat = self.desk.seat(admitted.client)
            seat.name = admitted.name or f"client {admitted.client}"
            examples, held_out = said.examples, said.held_out
            if self.served.holds:
                # Also of a client that says more: how many it has is nowhere written down.
                examples, held_out = 1, 0
            with Call(self.desk, seat):
                here = Here(seat.name, examples, held_out, said.machine, said.smallest_cohort)
                await self._arrives(seat, here)
        differs = differences(said.machine, self.served.machine)
        welcome = self.served.welcome(admitted.client, differs)
        cohort = self.served.keeps_to(said, self.desk.smallest_cohort)
        return answer(replace(welcome, smallest_cohort=cohort))

    def _holds_up(self, said: CheckIn, admitted: Admitted) -> str | None:
        """Why the run, which is under way, would have to wait if this client were taken."""
        desk = self.desk
        if not desk.begun or said.smallest_cohort <= desk.smallest_cohort:
            return None
        others = sum(1 for one in desk.everybody() if one.here and one.number != admitted.client)
        if said.smallest_cohort <= others + 1:
            return None
        return (
            f"the run is under way with {others + 1} of them, this one included, who would have to "
            f"wait: come again when more are there"
        )

    async def _arrives(self, seat: Seat, here: Here) -> None:
        """Logs that a client is there."""
        seat.here = True
        seat.examples = here.examples
        seat.held_out = here.held_out
        seat.machine = here.machine
        seat.smallest_cohort = here.smallest_cohort
        await logged(self.journal, "check_in", seat.number, body=to_json(here))
        self.watching.arrived(seat)

    async def next(self, request: Request, admitted: Admitted) -> Response:
        ready = await body_of(request, admitted, Ready)
        seat = known(self.desk, admitted)
        self.desk.confirm(seat.number, ready.confirmed)
        with Call(self.desk, seat):
            await self._comes_back(seat)
            async with connected(request) as gone:
                word = await self.desk.next(seat, self.served.patience, gone)
        # It may have been revoked while it waited.
        if not self.access.may(seat.number):
            self.access.refuse(seat.number, 403, "revoked", f"client {seat.number} was revoked")
        return answer(word)

    async def _comes_back(self, seat: Seat) -> None:
        """A client that was taken for gone calls again."""
        if seat.missing and seat.train is not None:
            seat.missing = False
            await logged(self.journal, "back", seat.number, seat.train.ticket)
            self.watching.back(seat)
        if not seat.here:
            await self._arrives(seat, here_of(seat))

    async def watch(self, request: Request, admitted: Admitted) -> Response:
        said = await body_of(request, admitted, Watch)
        seat = known(self.desk, admitted)
        with Call(self.desk, seat):
            await self._comes_back(seat)
            async with connected(request) as gone:
                heartbeat = self.served.heartbeat
                watched = await self.desk.watch(seat, said.ticket, heartbeat, gone)
        return answer(watched)

    async def look(self) -> None:
        """Notices who has gone, and what those who were revoked ask for no longer."""
        for seat in self.desk.everybody():
            if seat.smallest_cohort > 1 and not self.access.may(seat.number):
                await logged(self.journal, "asks", seat.number, body=to_json(here_of(seat, 1)))
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
            # The disk is full: it is noticed again at the next look.
            except RunFolderWriteError:
                seat.here = True
