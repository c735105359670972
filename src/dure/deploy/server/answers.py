"""Answers of the routes: JSON bodies, and refusals with a reason."""

from __future__ import annotations

from collections.abc import Mapping

from starlette.responses import Response

from dure.wire.requests import MessageBody, Refusal, to_json


def answer(said: MessageBody) -> Response:
    return Response(to_json(said), media_type="application/json")


def refusal(status: int, reason: str, headers: Mapping[str, str] | None = None) -> Response:
    """Return a refusal with its reason."""
    body = to_json(Refusal(reason))
    return Response(body, status, dict(headers or {}), media_type="application/json")
