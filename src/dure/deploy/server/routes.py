"""Routing: the first route whose path and method match handles a request.

Thousands of requests wait simultaneously. No layer is therefore between the server and a handler:
the middleware of Starlette's own application would take 5 KB per request.
"""

from __future__ import annotations

from collections.abc import Sequence

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Match, Route
from starlette.types import Receive, Scope, Send


class Routes:
    """ASGI application. Its endpoints handle every error, and the last route matches all paths."""

    def __init__(self, routes: Sequence[Route]) -> None:
        self._routes = routes

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        for route in self._routes:
            match, about = route.matches(scope)
            if match is Match.FULL:
                scope.update(about)
                response: Response = await route.endpoint(Request(scope, receive))
                await response(scope, receive, send)
                return
