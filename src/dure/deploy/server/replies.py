"""Routes for updates that stay at their clients: notices of readiness, and protocol steps.

The journal records that an update is ready, and nothing else of the update. Answers to protocol
steps go to the main thread through the outbox, in memory only.
"""

from __future__ import annotations

from dataclasses import dataclass

from msgspec.structs import replace
from starlette.requests import Request
from starlette.responses import Response

from dure.deploy.journal import Journal
from dure.deploy.server.access import AccessControl, Admitted, RequestRefused
from dure.deploy.server.client_requests import (
    OpenRequest,
    body_of,
    logged,
    session_of_client,
)
from dure.deploy.server.outbox import ClientOutbox, ClientSession
from dure.deploy.server.uploads import unwanted
from dure.peer_text import one_line
from dure.wire.requests import (
    MOST_STEP_BYTES,
    ProtocolAnswerBody,
    UpdateReady,
    UploadRequest,
    to_json,
)

MOST_KIND = 100
"""Maximum characters of an error's type."""


@dataclass
class Replies:
    """Routes of clients whose updates stay with them."""

    outbox: ClientOutbox
    journal: Journal
    access: AccessControl

    async def ready(self, request: Request, admitted: Admitted) -> Response:
        said = await body_of(request, admitted, UpdateReady)
        session = session_of_client(self.outbox, admitted)
        with OpenRequest(self.outbox, session):
            async with session.sending:
                await self._ready(session, said.ticket)
        return Response(status_code=204)

    async def _ready(self, session: ClientSession, ticket: int) -> None:
        if session.train is None or not self.outbox.wants(session, ticket):
            # A client that has not received the answer repeats the notice.
            if ticket in session.outcomes or ticket in session.sent:
                return
            raise unwanted()
        if not session.train.holds:
            why = "clients of this run send their updates, but this one was only announced"
            self.access.refuse(session.number, 422, "not sent", why)
        await logged(
            self.journal, "update", session.number, ticket, to_json(held_update_record(ticket))
        )
        session.sent.append(ticket)
        self.outbox.done(session.number, ticket)

    async def answered(self, request: Request, admitted: Admitted) -> Response:
        said = await body_of(request, admitted, ProtocolAnswerBody)
        session = session_of_client(self.outbox, admitted)
        with OpenRequest(self.outbox, session):
            # Waits for an upload of tensors in progress.
            async with session.sending:
                self._answered(session, said, admitted.digest)
        return Response(status_code=204)

    def _answered(self, session: ClientSession, said: ProtocolAnswerBody, digest: str) -> None:
        if session.answered == (said.asking, digest):
            return
        say = session.say
        if say is None or not self.outbox.asks(session, said.ticket, said.asking):
            raise RequestRefused(410, "not wanted", "this answer is not needed any more")
        if said.stage != say.stage:
            why = f"the answer is for step {said.stage}, but step {say.stage} was requested"
            self.access.refuse(session.number, 422, "another step", why)
        if said.body is not None and len(said.body) > MOST_STEP_BYTES:
            why = f"the answer has {len(said.body)} bytes, but may have at most {MOST_STEP_BYTES}"
            self.access.refuse(session.number, 413, "too long", why)
        if said.body is not None and session.wants and session.uploaded_answer != said.asking:
            why = "the tensors of the answer have to be sent before it"
            self.access.refuse(session.number, 422, "no tensors", why)
        kind = one_line(said.failure, MOST_KIND)
        self.outbox.answer(session, replace(said, failure=kind), digest)


def held_update_record(ticket: int) -> UploadRequest:
    """Return the record of an update that stays at its client."""
    return UploadRequest(ticket, bytes=0, digest="", examples=0, samples=0, loss=0.0)
