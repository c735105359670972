"""Part of an update, written from the request's body to the disk on arrival.

Since many clients send simultaneously, memory has a piece of a part, and never the whole part.
"""

from __future__ import annotations

import asyncio

from starlette.requests import Request

from dure.deploy.server.access import RequestRefused
from dure.deploy.updates import UploadPart

LEAST_PIECE = 128 << 10
"""Minimum bytes for which a write in another thread is worthwhile."""

MOST_PIECE = 1 << 20
"""Maximum bytes of a piece: each hand-over to the other thread takes time."""

ALL_PIECES = 8 << 20
"""Maximum bytes of all pieces in memory, if every client sends a piece."""


def piece_of(clients: int) -> int:
    """Return the bytes per write for this number of clients."""
    return max(LEAST_PIECE, min(MOST_PIECE, ALL_PIECES // clients))


async def receive(request: Request, part: UploadPart, most: int, piece: int) -> None:
    """Write a request's body to the part in pieces of at least `piece` bytes.

    Raises Refused for a body of more than `most` bytes, and the errors of `UploadPart.add`.
    """
    waiting = bytearray()
    size = 0
    async for some in request.stream():
        size += len(some)
        if size > most:
            raise RequestRefused(413, "too long", f"the body has more than {most} bytes")
        waiting += some
        if len(waiting) >= piece:
            await asyncio.to_thread(part.add, waiting)
            waiting = bytearray()
    if waiting:
        await asyncio.to_thread(part.add, waiting)
