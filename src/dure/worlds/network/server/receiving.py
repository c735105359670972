"""A part of an update, from a request's body to the disk as it comes.

Many clients send at the same time, so a part never lies in memory: a piece of it does.
"""

from __future__ import annotations

import asyncio

from starlette.requests import Request

from dure.worlds.network.server.access import Refused
from dure.worlds.network.updates import Part

LEAST_PIECE = 128 << 10
"""Bytes that are worth the way to another thread, which writes them."""

MOST_PIECE = 1 << 20
"""Bytes of a piece where few clients send: each way to the other thread costs time."""

ALL_PIECES = 8 << 20
"""Bytes of pieces that may lie in memory, where every client sends one."""


def piece_of(clients: int) -> int:
    """Bytes that are written at once, where there are so many clients."""
    return max(LEAST_PIECE, min(MOST_PIECE, ALL_PIECES // clients))


async def receive(request: Request, part: Part, most: int, piece: int) -> None:
    """Adds the body to the part, so many bytes at a time.

    Raises Refused where it is longer than `most`, and as `add`.
    """
    waiting = bytearray()
    size = 0
    async for some in request.stream():
        size += len(some)
        if size > most:
            raise Refused(413, "too long", f"the body has more than {most} bytes")
        waiting += some
        if len(waiting) >= piece:
            await asyncio.to_thread(part.add, waiting)
            waiting = bytearray()
    if waiting:
        await asyncio.to_thread(part.add, waiting)
