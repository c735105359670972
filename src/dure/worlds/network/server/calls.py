"""A client's call: what it asks and says, and that it is there for as long as the call is open."""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import TypeVar

from starlette.requests import Request

from dure.wire.requests import (
    MOST_BODY,
    Enrol,
    Failed,
    Holds,
    Ready,
    RequestError,
    Said,
    Watch,
    from_json,
)
from dure.worlds.network.journal import Journal
from dure.worlds.network.server.access import Admitted, Refused
from dure.worlds.network.server.desk import Desk, Gone, Seat

Body = TypeVar("Body", bound=Said)

MOST_OF: dict[type[Said], int] = {
    Enrol: 16 << 10,
    Ready: 64 << 10,
    Watch: 4 << 10,
    Holds: 4 << 10,
    Failed: 64 << 10,
}
"""Bytes of the bodies that are shorter than `MOST_BODY`, by what they say."""


class UnprovenError(RequestError):
    """What is wrong with a request is nothing that its client has signed. kind: to be counted."""

    def __init__(self, kind: str, reason: str) -> None:
        super().__init__(reason)
        self.kind = kind


def target_of(request: Request) -> str:
    """The path with its query, as it was sent."""
    raw: str = request.scope.get("raw_path", b"").decode("ascii", "replace")
    query = request.scope.get("query_string", b"").decode("ascii", "replace")
    return raw + (f"?{query}" if query else "")


def address_of(request: Request) -> str:
    return request.client.host if request.client is not None else ""


def known(desk: Desk, admitted: Admitted) -> Seat:
    """The seat of who has checked in. Raises Refused for others."""
    seat = desk.seat(admitted.client)
    if not seat.examples:
        raise Refused(409, "check in first", "the server wants to know who calls: check in")
    return seat


async def body_of(request: Request, admitted: Admitted | None, kind: type[Body]) -> Body:
    """The JSON body. Raises RequestError where it is not what was signed, or what it has to be."""
    body = await read(request, MOST_OF.get(kind, MOST_BODY))
    if admitted is not None and hashlib.sha256(body).hexdigest() != admitted.digest:
        raise UnprovenError("another body", "the body is not the one that was signed")
    return from_json(body, kind)


async def read(request: Request, most: int) -> bytearray:
    """The body. Raises Refused where it is longer than `most`, before it lies in memory."""
    announced = check_length(request, most)
    # In one piece from the beginning: many clients send at the same time. What does not come
    # takes no memory.
    body = bytearray(announced)
    size = 0
    async for part in request.stream():
        end = size + len(part)
        if end > most:
            raise Refused(413, "too long", f"the body has more than {most} bytes")
        body[size:end] = part
        size = end
    del body[size:]
    return body


def check_length(request: Request, most: int) -> int:
    """Bytes that the body is said to have, 0 where nothing is said. Raises Refused."""
    length = request.headers.get("content-length")
    announced = 0 if length is None else unsigned_number(length)
    if announced > most:
        raise Refused(413, "too long", f"the body has {length} bytes, and may have {most}")
    return announced


def whole_number(text: str) -> int:
    if not (text.isdecimal() and len(text) < 20):
        raise RequestError(f"{text[:20]!r} is no number of bytes")
    return int(text)


def unsigned_number(text: str) -> int:
    """A number of bytes from a header that no signature covers. Raises UnprovenError."""
    try:
        return whole_number(text)
    except RequestError as error:
        raise UnprovenError("wrong header", str(error)) from error


def signed_number(request: Request, name: str) -> int | None:
    """A number of bytes from the query, which is signed; None without it. Raises RequestError."""
    texts = request.query_params.getlist(name)
    if len(texts) > 1:
        raise RequestError(f"{name} is said more than once")
    return whole_number(texts[0]) if texts else None


async def logged(
    journal: Journal, kind: str, client: int, ticket: int = -1, body: bytes = b""
) -> None:
    """Returns once it is on the disk. Raises RunFolderWriteError."""
    await asyncio.wrap_future(journal.append(kind, client, ticket, body))


class Call:
    """While a call of a client is open, it is there."""

    def __init__(self, desk: Desk, seat: Seat) -> None:
        self.desk = desk
        self.seat = seat

    def __enter__(self) -> None:
        self.desk.called(self.seat)

    def __exit__(self, *error: object) -> None:
        self.desk.hung_up(self.seat)


@asynccontextmanager
async def connected(request: Request) -> AsyncIterator[Gone]:
    """While a call waits: a future that is done once the client has hung up."""
    gone = asyncio.ensure_future(_gone(request))
    try:
        yield gone
    finally:
        gone.cancel()


async def _gone(request: Request) -> None:
    """Returns when the connection is closed. The body has been read by then."""
    while True:
        message = await request.receive()
        if message["type"] == "http.disconnect":
            return
