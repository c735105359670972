"""Authentication of every request: whether the server is open, and which client sent the request.

An invalid request gets an answer with a reason, and changes nothing. Unknown routes are refused
after the same checks: a stranger does not learn which routes exist.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field

from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.routing import Route

from dure.deploy.server.access import NEW, AccessControl, Admitted, RequestRefused
from dure.deploy.server.answers import refusal
from dure.deploy.server.client_requests import UnprovenError, address_of, target_of
from dure.deploy.server.concurrency_limits import ConcurrencyLimits
from dure.deploy.server.server_metrics import ServerMetrics
from dure.deploy.updates import PartError
from dure.errors import RunFolderWriteError
from dure.peer_text import printable
from dure.wire.requests import RequestError

Handler = Callable[..., Awaitable[Response]]

ROOM_SECONDS = 5
"""Seconds until a retry of a client after a full disk."""


@dataclass
class RequestAuthenticator:
    """Authentication for the routes of a server.

    `is_open` returns whether clients are served yet.
    """

    access: AccessControl
    server_metrics: ServerMetrics
    is_open: Callable[[], bool]
    at_once: ConcurrencyLimits = field(default_factory=ConcurrencyLimits)

    def route(self, path: str, method: str | None, handler: Handler, known: bool = True) -> Route:
        """Return a route whose handler runs after the common checks.

        `method` is None for all methods. `known` is False for requests of unknown senders.
        """

        async def endpoint(request: Request) -> Response:
            if not self.is_open():
                return refusal(503, "the server is starting", {"retry-after": "1"})
            client = None

            def note(kind: str, reason: str) -> None:
                what = f"{method or request.method} {path}"
                self.server_metrics.refused(client, address_of(request), what, kind, reason)

            try:
                if not known:
                    with self.at_once.of_stranger(address_of(request)):
                        return await handler(request)
                admitted = self.access.admit(
                    request.headers, request.method, target_of(request), address_of(request)
                )
                if admitted.client == NEW:
                    with self.at_once.of_stranger(address_of(request)):
                        return await self._checked(handler, request, admitted)
                client = admitted.client
                with self.at_once.of_client(client):
                    return await self._checked(handler, request, admitted)
            except RequestRefused as refused:
                note(refused.kind, refused.reason)
                return refusal(refused.status, refused.reason, refused.headers)
            except RequestError as error:
                note("malformed", str(error))
                return refusal(400, str(error))
            except RunFolderWriteError as error:
                note("not written", str(error))
                return refusal(
                    507, f"the server cannot write: {error}", {"retry-after": str(ROOM_SECONDS)}
                )
            except ClientDisconnect:
                return Response(status_code=400)
            # An error of the server: details are logged, and not sent to the client.
            except Exception:
                self.server_metrics.mistake(f"{request.method} {request.scope['path']}")
                return refusal(500, "the server has made a mistake; its log says where")

        route = Route(path, endpoint, methods=[method or "GET"])
        if method is None:
            # Without methods, Starlette would accept only GET, and refuse others before these
            # checks.
            route.methods = set()
        return route

    async def _checked(self, handler: Handler, request: Request, admitted: Admitted) -> Response:
        """Run a handler, and count an invalid request against the client that signed it.

        Content that is not signed, such as bytes with another digest, may have been changed in
        transit, and counts against the address.
        """
        try:
            return await handler(request, admitted)
        except UnprovenError as error:
            self.access.refuse_unproven(address_of(request), 400, error.kind, str(error))
        except RequestError as error:
            self.access.refuse(admitted.client, 400, "malformed", str(error))
        except PartError as error:
            self.access.refuse(admitted.client, 400, "wrong bytes", str(error))

    def rest(self) -> Route:
        """Return the route of all unknown paths."""
        return self.route("/{anything:path}", None, _no_route)


async def _no_route(request: Request, admitted: Admitted) -> Response:
    place = printable(request.scope["path"], 200)
    raise RequestRefused(404, "no such route", f"nothing is served at {place!r}")
