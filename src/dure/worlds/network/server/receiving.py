"""A part of an update, from a request's body to the disk as it comes.

Many clients send at the same time, so a part never lies in memory: a piece of it does.
"""

from __future__ import annotations

import asyncio

from starlette.requests import Request

from dure.worlds.network.server.access import Refused
from dure.worlds.network.updates import Part

PIECE = 128 << 10
"""Bytes that are worth the way to another thread, which writes them."""


async def receive(request: Request, part: Part, most: int) -> None:
    """Adds the body to the part. Raises Refused where it is longer than `most`, and as `add`."""
    waiting = bytearray()
    size = 0
    async for some in request.stream():
        size += len(some)
        if size > most:
            raise Refused(413, "too long", f"the body has more than {most} bytes")
        waiting += some
        if len(waiting) >= PIECE:
            await asyncio.to_thread(part.add, waiting)
            waiting = bytearray()
    if waiting:
        await asyncio.to_thread(part.add, waiting)
