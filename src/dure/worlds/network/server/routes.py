"""Which handler answers a request: the first whose path and method fit.

Thousands of calls wait here at the same time. So nothing lies between the server and a handler:
the layers of Starlette's own application, which pages of the web need, would hold 5 KB of each.
"""

from __future__ import annotations

from collections.abc import Sequence

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Match, Route
from starlette.types import Receive, Scope, Send


class Routes:
    """An ASGI application. Its endpoints answer every error themselves, and the last fits all."""

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
