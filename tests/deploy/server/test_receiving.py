"""A part goes to the disk as it comes: what lies in memory does not grow with it."""

from __future__ import annotations

import asyncio
import hashlib
from pathlib import Path
from typing import Any

import pytest
from starlette.requests import Request

from dure.deploy.server.access import RequestRefused
from dure.deploy.server.receiving import LEAST_PIECE, piece_of, receive
from dure.deploy.updates import Updates, UploadPart

SOME = 10_000
BODY = bytes(range(250)) * 8_000


def request_of(body: bytes) -> Request:
    """A request whose body comes in small messages."""
    begins = iter(range(0, len(body), SOME))

    async def receives() -> dict[str, Any]:
        at = next(begins)
        more = at + SOME < len(body)
        return {"type": "http.request", "body": body[at : at + SOME], "more_body": more}

    return Request({"type": "http", "method": "PATCH", "headers": []}, receives)


def test_a_part_of_any_length_is_in_memory_a_piece_at_a_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sizes: list[int] = []
    add = UploadPart.add

    def noted(part: UploadPart, piece: bytes) -> None:
        sizes.append(len(piece))
        add(part, piece)

    monkeypatch.setattr(UploadPart, "add", noted)
    digest = hashlib.sha256(BODY).hexdigest()
    upload = Updates(tmp_path).open(1, len(BODY), digest)
    part = upload.part(0)
    asyncio.run(receive(request_of(BODY), part, len(BODY), LEAST_PIECE))
    assert part.done(digest) == len(BODY) == sum(sizes)
    assert max(sizes) < LEAST_PIECE + SOME
    upload.complete()


def test_a_body_without_an_end_is_refused_on_the_way(tmp_path: Path) -> None:
    part = Updates(tmp_path).open(1, len(BODY), "").part(0)
    with pytest.raises(RequestRefused) as refused:
        asyncio.run(receive(request_of(BODY), part, len(BODY) // 2, LEAST_PIECE))
    assert refused.value.status == 413
    assert part.size <= len(BODY) // 2


def test_pieces_are_smaller_where_more_clients_send() -> None:
    sizes = [piece_of(clients) for clients in (1, 8, 32, 1000)]
    assert sizes == [1 << 20, 1 << 20, 1 << 18, LEAST_PIECE]
