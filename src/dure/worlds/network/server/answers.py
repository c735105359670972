"""What the routes answer: bodies of JSON, refusals with their reason, and what text is kept."""

from __future__ import annotations

from collections.abc import Mapping

from starlette.responses import Response

from dure.wire.requests import Refusal, Said, to_json

MOST_REASON = 500
"""Characters that are kept of what a client says about its failure."""


def answer(said: Said) -> Response:
    return Response(to_json(said), media_type="application/json")


def refusal(status: int, reason: str, headers: Mapping[str, str] | None = None) -> Response:
    """An answer that says why nothing was done."""
    body = to_json(Refusal(reason))
    return Response(body, status, dict(headers or {}), media_type="application/json")


def one_line(text: str) -> str:
    """What a client says is kept and shown: as a line, without characters that move a terminal."""
    return "".join(each if each.isprintable() else " " for each in text[:MOST_REASON])
