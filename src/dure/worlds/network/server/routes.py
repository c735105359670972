"""Which handler answers a request: the first whose path and method fit.

Thousands of calls wait here at the same time. So nothing lies between the server and a handler:
the layers of Starlette's own application, which pages of the web need, would hold 5 KB of each.
"""

from __future__ import annotations

from collections.abc import Sequence

from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response
from starlette.routing import Match, Route
from starlette.types import Receive, Scope, Send


class Routes:
    """An ASGI application. Its endpoints answer every error themselves."""

    def __init__(self, routes: Sequence[Route]) -> None:
        self._routes = routes

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        response = await self._answer(scope, receive)
        await response(scope, receive, send)

    async def _answer(self, scope: Scope, receive: Receive) -> Response:
        methods: set[str] = set()
        for route in self._routes:
            match, about = route.matches(scope)
            if match is Match.FULL:
                scope.update(about)
                response: Response = await route.endpoint(Request(scope, receive))
                return response
            if match is Match.PARTIAL:
                methods |= route.methods or set()
        if methods:
            allowed = {"allow": ", ".join(sorted(methods))}
            return PlainTextResponse("Method Not Allowed", 405, allowed)
        return PlainTextResponse("Not Found", 404)
