"""Requests of clients: body, limits, and presence of a client while its request is open."""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import TypeVar

from starlette.requests import Request

from dure.deploy.journal import Journal
from dure.deploy.server.access import Admitted, RequestRefused
from dure.deploy.server.outbox import ClientOutbox, ClientSession, DisconnectFuture
from dure.wire.requests import (
    MOST_BODY,
    Enrol,
    MessageBody,
    NextRequest,
    RequestError,
    TrainingFailure,
    UpdateReady,
    WatchRequest,
    from_json,
)

Body = TypeVar("Body", bound=MessageBody)

MOST_OF: dict[type[MessageBody], int] = {
    Enrol: 16 << 10,
    NextRequest: 64 << 10,
    WatchRequest: 4 << 10,
    UpdateReady: 4 << 10,
    TrainingFailure: 64 << 10,
}
"""Maximum bytes of the bodies with a limit below `MOST_BODY`, by type."""


class UnprovenError(RequestError):
    """The error of a request is outside its signed content. `kind` is a category, for counters."""

    def __init__(self, kind: str, reason: str) -> None:
        super().__init__(reason)
        self.kind = kind


def target_of(request: Request) -> str:
    """Return the path with its query, as received."""
    raw: str = request.scope.get("raw_path", b"").decode("ascii", "replace")
    query = request.scope.get("query_string", b"").decode("ascii", "replace")
    return raw + (f"?{query}" if query else "")


def address_of(request: Request) -> str:
    return request.client.host if request.client is not None else ""


def session_of_client(outbox: ClientOutbox, admitted: Admitted) -> ClientSession:
    """Return the session of a client that has checked in. Raises Refused for other clients."""
    session = outbox.session(admitted.client)
    if not session.examples:
        raise RequestRefused(409, "check in first", "the server wants to know who calls: check in")
    return session


async def body_of(request: Request, admitted: Admitted | None, kind: type[Body]) -> Body:
    """Read and decode the JSON body.

    Raises UnprovenError if the body is not the signed body, and RequestError if it is invalid.
    """
    body = await read(request, MOST_OF.get(kind, MOST_BODY))
    if admitted is not None and hashlib.sha256(body).hexdigest() != admitted.digest:
        raise UnprovenError("another body", "the body is not the signed one")
    return from_json(body, kind)


async def read(request: Request, most: int) -> bytearray:
    """Read the body. Raises Refused before buffering more than `most` bytes."""
    announced = check_length(request, most)
    # Allocated once, because many clients send simultaneously. Pages without received bytes take no
    # memory.
    body = bytearray(announced)
    size = 0
    async for part in request.stream():
        end = size + len(part)
        if end > most:
            raise RequestRefused(413, "too long", f"the body has more than {most} bytes")
        body[size:end] = part
        size = end
    del body[size:]
    return body


def check_length(request: Request, most: int) -> int:
    """Return the announced length of the body in bytes; 0 if unknown. Raises Refused."""
    length = request.headers.get("content-length")
    announced = 0 if length is None else unsigned_number(length)
    if announced > most:
        raise RequestRefused(
            413, "too long", f"the body has {length} bytes, but may have at most {most}"
        )
    return announced


def whole_number(text: str) -> int:
    if not (text.isdecimal() and len(text) < 20):
        raise RequestError(f"{text[:20]!r} is not a number of bytes")
    return int(text)


def unsigned_number(text: str) -> int:
    """Parse a number of bytes from a header that is not signed. Raises UnprovenError."""
    try:
        return whole_number(text)
    except RequestError as error:
        raise UnprovenError("wrong header", str(error)) from error


def signed_number(request: Request, name: str) -> int | None:
    """Parse a number of bytes from the signed query; None if absent. Raises RequestError."""
    texts = request.query_params.getlist(name)
    if len(texts) > 1:
        raise RequestError(f"{name} occurs more than once")
    return whole_number(texts[0]) if texts else None


async def logged(
    journal: Journal, kind: str, client: int, ticket: int = -1, body: bytes = b""
) -> None:
    """Append an event to the journal and wait for its sync. Raises RunFolderWriteError."""
    await asyncio.wrap_future(journal.append(kind, client, ticket, body))


class OpenRequest:
    """Context manager: mark a client as connected while its request is open."""

    def __init__(self, outbox: ClientOutbox, session: ClientSession) -> None:
        self.outbox = outbox
        self.session = session

    def __enter__(self) -> None:
        self.outbox.called(self.session)

    def __exit__(self, *error: object) -> None:
        self.outbox.hung_up(self.session)


@asynccontextmanager
async def connected(request: Request) -> AsyncIterator[DisconnectFuture]:
    """Context manager: yield a future that is done once the client has disconnected."""
    gone = asyncio.ensure_future(_gone(request))
    try:
        yield gone
    finally:
        gone.cancel()


async def _gone(request: Request) -> None:
    """Return when the connection is closed; call this after the body has been read."""
    while True:
        message = await request.receive()
        if message["type"] == "http.disconnect":
            return
