"""Uploads of clients: updates in parts, failures, and evaluations.

A client first announces an update with all fields except its tensors, then sends the tensors in
parts. The update is on the disk, and in the journal, before the client's last part is acknowledged.
The tensors of an answer to a protocol step are sent the same way, without the journal.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field

from msgspec.structs import replace
from starlette.requests import Request
from starlette.responses import Response

from dure.deploy.journal import Journal
from dure.deploy.server.access import AccessControl, Admitted, RequestRefused
from dure.deploy.server.answers import answer
from dure.deploy.server.client_requests import (
    OpenRequest,
    UnprovenError,
    body_of,
    check_length,
    logged,
    session_of_client,
    signed_number,
    unsigned_number,
)
from dure.deploy.server.outbox import ClientOutbox, ClientSession
from dure.deploy.server.receiving import piece_of, receive
from dure.deploy.updates import OvertakenError, PartError, Updates, Upload
from dure.peer_text import one_line
from dure.wire.requests import (
    EvaluationReport,
    RequestError,
    TrainingFailure,
    UploadRequest,
    UploadState,
    to_json,
)
from dure.wire.tensors import size_of

PART = 4 << 20
"""Maximum bytes of a part, which is sent again if it does not arrive completely."""


@dataclass
class Uploads:
    """Routes of uploads.

    `clients` is the maximum number of clients. `samples` is a function of a client's number of
    examples, and returns the maximum number of examples that the client processes in a round.
    """

    clients: int
    outbox: ClientOutbox
    journal: Journal
    updates: Updates
    access: AccessControl
    samples: Callable[[int], int]
    reserved: dict[int, UploadRequest] = field(default_factory=dict)
    """Announcement of each client's upload in progress."""

    async def reserve(self, request: Request, admitted: Admitted) -> Response:
        said = await body_of(request, admitted, UploadRequest)
        session = session_of_client(self.outbox, admitted)
        with OpenRequest(self.outbox, session):
            async with session.sending:
                return await self._reserve(session, said)

    async def _reserve(self, session: ClientSession, said: UploadRequest) -> Response:
        if said.asking:
            return await self._reserve_answer(session, said)
        if session.train is not None and session.train.holds:
            why = (
                "updates of this run stay with their clients, and this one would be sent "
                "unprotected"
            )
            self.access.refuse(session.number, 422, "bare", why)
        if not self.outbox.wants(session, said.ticket):
            # A client that did not receive the acknowledgement asks again.
            if said.ticket in session.outcomes or said.ticket in session.sent:
                return answer(UploadState(str(said.ticket), said.bytes, PART, complete=True))
            raise unwanted()
        if said.failure is not None:
            said = replace(said, failure=one_line(said.failure))
            await self._complete(session, said)
            return answer(UploadState(str(said.ticket), 0, PART, complete=True))
        wrong = self._made_up(session, said)
        if wrong is not None:
            self.access.refuse(session.number, 422, "made up", f"the update is invalid: {wrong}")
        expected = size_of(session.forms)
        if said.bytes != expected:
            raise RequestError(
                f"the update has {said.bytes} bytes, but an update of this model has {expected}"
            )
        upload = await asyncio.to_thread(self._opened, said)
        self.reserved[session.number] = said
        return await self._received(session, said, upload)

    async def _reserve_answer(self, session: ClientSession, said: UploadRequest) -> Response:
        """Accept the announcement of an answer's tensors."""
        if said.asking in (session.uploaded_answer, session.answered[0]):
            return answer(UploadState(str(said.ticket), said.bytes, PART, complete=True))
        if not self.outbox.asks(session, said.ticket, said.asking):
            raise unwanted()
        expected = size_of(session.wants)
        if not session.wants or said.bytes != expected:
            raise RequestError(f"the answer has {said.bytes} bytes, but needs {expected}")
        upload = await asyncio.to_thread(self._opened, said)
        self.reserved[session.number] = said
        return await self._received(session, said, upload)

    def _made_up(self, session: ClientSession, said: UploadRequest) -> str | None:
        """Return why the announced numbers are impossible; None if they are possible.

        The mean weights updates by these numbers, so a malicious client must not choose them
        freely.
        """
        if not 1 <= said.examples <= session.examples:
            return (
                f"the update is of {said.examples:,} examples, "
                f"but its client has {session.examples:,}"
            )
        most = self.samples(said.examples)
        if not 1 <= said.samples <= most:
            return (
                f"it has processed {said.samples:,} samples, and of {said.examples:,} examples "
                f"{most:,} are asked for at most"
            )
        return None

    def _opened(self, said: UploadRequest) -> Upload:
        """Open the upload; complete it if all its bytes are here already."""
        upload = self.updates.open(said.ticket, said.bytes, said.digest)
        if not upload.left:
            upload.complete(lasts=not said.asking)
        return upload

    async def part(self, request: Request, admitted: Admitted) -> Response:
        name = request.path_params["upload"]
        session = session_of_client(self.outbox, admitted)
        with OpenRequest(self.outbox, session):
            check_length(request, PART)
            signed = signed_number(request, "offset")
            if signed is None:
                offset = unsigned_number(request.headers.get("upload-offset", ""))
            else:
                offset = signed
            said = self._wanted(session, name)
            upload = await asyncio.to_thread(
                self.updates.open, said.ticket, said.bytes, said.digest
            )
            if offset > upload.offset:
                return _go_on(name, upload)
            part = upload.part(offset)
            try:
                with _unproven():
                    await receive(request, part, PART, piece_of(self.clients))
                # Serialised, because a recorded update must not change.
                async with session.sending:
                    self._wanted(session, name)
                    with _unproven():
                        await asyncio.to_thread(part.done, admitted.digest)
                    # The digest of the whole is signed, and so is every part with a signed offset.
                    with nullcontext() if signed is not None else _unproven():
                        await asyncio.to_thread(_complete, upload, not said.asking)
                    return await self._received(session, said, upload)
            except OvertakenError:
                return _go_on(name, upload)

    def _wanted(self, session: ClientSession, name: str) -> UploadRequest:
        """Return the announcement of an upload. Raises Refused if it is no longer needed."""
        said = self.reserved.get(session.number)
        if said is None or name != str(said.ticket):
            raise unwanted()
        if said.asking:
            wanted = self.outbox.asks(session, said.ticket, said.asking)
        else:
            wanted = self.outbox.wants(session, said.ticket)
        if not wanted:
            raise unwanted()
        return said

    async def _received(
        self, session: ClientSession, said: UploadRequest, upload: Upload
    ) -> Response:
        """Acknowledge received bytes; record a complete upload first."""
        if upload.left:
            return answer(UploadState(str(said.ticket), upload.offset, PART))
        await self._complete(session, said)
        return answer(UploadState(str(said.ticket), said.bytes, PART, complete=True))

    async def _complete(self, session: ClientSession, said: UploadRequest) -> None:
        if said.asking:
            # The journal never has answers. The client sends the answer itself next.
            session.uploaded_answer = said.asking
            self.reserved.pop(session.number, None)
            return
        await logged(self.journal, "update", session.number, said.ticket, to_json(said))
        session.sent.append(said.ticket)
        self.reserved.pop(session.number, None)
        self.outbox.done(session.number, said.ticket)

    async def failed(self, request: Request, admitted: Admitted) -> Response:
        said = await body_of(request, admitted, TrainingFailure)
        session = session_of_client(self.outbox, admitted)
        if self.outbox.wants(session, said.ticket):
            where = f" ({said.file}:{said.line})" if said.file else ""
            told = f": {said.message}" if said.message else ""
            reason = one_line(f"its own code raised {said.kind}{where}{told}")
            await logged(self.journal, "failed", session.number, said.ticket, reason.encode())
            # Before the answer: the next request might come before the main thread reads the event,
            # and would get the same assignment again.
            self.outbox.done(session.number, said.ticket)
            # The client gets further work after its next request.
            session.available = False
        return Response(status_code=204)

    async def measured(self, request: Request, admitted: Admitted) -> Response:
        said = await body_of(request, admitted, EvaluationReport)
        session = session_of_client(self.outbox, admitted)
        if session.measure is not None and session.measure.round == said.round:
            await logged(self.journal, "measured", session.number, body=to_json(said))
            self.outbox.ask_measure(session.number, None)
        return Response(status_code=204)


def _complete(upload: Upload, lasts: bool) -> None:
    if not upload.left:
        upload.complete(lasts)


@contextmanager
def _unproven() -> Iterator[None]:
    """Context manager: mark errors in bytes whose digest is not compared yet as unsigned."""
    try:
        yield
    except PartError as error:
        raise UnprovenError("wrong bytes", str(error)) from error


def _go_on(name: str, upload: Upload) -> Response:
    """Return the refusal that states the expected offset."""
    response = answer(UploadState(name, upload.offset, PART))
    response.status_code = 409
    return response


def unwanted() -> RequestRefused:
    return RequestRefused(410, "not wanted", "this update is not needed any more")
