"""The application: which route goes where, and the gate that every request passes first.

`dure.wire.requests` lists the routes. Handlers check what they got, write it to the journal, and
answer; none of them knows the model or the coordinator:

    attendance.py   who is there, and what there is to do for them
    downloads.py    what they fetch
    uploads.py      what they send

A request that cannot be right is answered with a reason, and changes nothing. What is no route of
ours is refused behind the same gate: strangers do not learn what there is.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field

from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.routing import Route

from dure.errors import RunFolderWriteError
from dure.wire.requests import RequestError
from dure.worlds.network.journal import Journal
from dure.worlds.network.server.access import NEW, Access, Admitted, Refused
from dure.worlds.network.server.answers import refusal
from dure.worlds.network.server.attendance import Attendance, Served
from dure.worlds.network.server.calls import address_of, target_of
from dure.worlds.network.server.desk import GRACE, Desk
from dure.worlds.network.server.downloads import Downloads
from dure.worlds.network.server.routes import Routes
from dure.worlds.network.server.shelf import Shelf
from dure.worlds.network.server.uploads import Uploads
from dure.worlds.network.server.watching import Metered, Watching
from dure.worlds.network.updates import PartError, Updates

LOG = logging.getLogger("dure.server")

Handler = Callable[..., Awaitable[Response]]

ROOM_SECONDS = 5
"""Seconds until a client comes again for which the disk had no room."""


@dataclass
class App:
    """The routes, and what their handlers share."""

    served: Served
    desk: Desk
    shelf: Shelf
    journal: Journal
    updates: Updates
    access: Access
    every_moment: Callable[[], None] = lambda: None
    """Called several times a second, in the event loop."""
    watching: Watching = field(default_factory=Watching)

    def __post_init__(self) -> None:
        self.attendance = Attendance(
            self.served, self.desk, self.journal, self.access, self.watching
        )
        self.downloads = Downloads(self.desk, self.shelf)
        self.uploads = Uploads(
            self.served.clients,
            self.desk,
            self.journal,
            self.updates,
            self.access,
            self.served.samples,
        )

    def asgi(self) -> Metered:
        """The application."""
        here = self.attendance
        down = self.downloads
        up = self.uploads
        routed = Routes(
            [
                self._route("/v1/enrol", "POST", here.enrol, known=False),
                self._route("/v1/check-in", "POST", here.check_in),
                self._route("/v1/next", "POST", here.next),
                self._route("/v1/watch", "POST", here.watch),
                self._route("/v1/tensors/{digest}", "GET", down.tensors),
                self._route("/v1/uploads", "POST", up.reserve),
                self._route("/v1/uploads/{upload}", "PATCH", up.part),
                self._route("/v1/failures", "POST", up.failed),
                self._route("/v1/measured", "POST", up.measured),
                self._route("/{anything:path}", None, _no_route),
            ]
        )
        return Metered(routed, self.watching)

    def _route(self, path: str, method: str | None, handler: Handler, known: bool = True) -> Route:
        """The handler behind the checks that all share: is it open, and who calls?

        method: None for all.
        """

        async def endpoint(request: Request) -> Response:
            if not self.desk.open.is_set():
                return refusal(503, "the server is starting", {"retry-after": "1"})
            client = None

            def note(kind: str, reason: str) -> None:
                what = f"{method or request.method} {path}"
                self.watching.refused(client, address_of(request), what, kind, reason)

            try:
                if not known:
                    return await handler(request)
                admitted = self.access.admit(
                    request.headers, request.method, target_of(request), address_of(request)
                )
                client = admitted.client if admitted.client != NEW else None
                return await self._checked(handler, request, admitted)
            except Refused as refused:
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
            # A mistake of ours: said in the log, and nothing of it to strangers.
            except Exception:
                LOG.exception("%s %s", request.method, request.url.path)
                self.watching.mistake()
                return refusal(500, "the server has made a mistake; its log says where")

        route = Route(path, endpoint, methods=[method or "GET"])
        if method is None:
            # Given none, Starlette would take GET alone, and refuse others before the gate.
            route.methods = set()
        return route

    async def _checked(self, handler: Handler, request: Request, admitted: Admitted) -> Response:
        """What cannot be right is counted against the client that has sent it."""
        try:
            return await handler(request, admitted)
        except RequestError as error:
            self.access.refuse(admitted.client, 400, "malformed", str(error))
        except PartError as error:
            self.access.refuse(admitted.client, 400, "wrong bytes", str(error))

    def lives_in(self, loop: asyncio.AbstractEventLoop) -> None:
        """Called once, before the first request."""
        self.desk.lives_in(loop)
        self._listening = loop.create_task(self._listen())

    async def _listen(self) -> None:
        """Looks several times a second who has gone."""
        while True:
            await asyncio.sleep(GRACE / 8)
            self.every_moment()
            # Before, nobody can call.
            if self.desk.open.is_set():
                await self.attendance.look()


async def _no_route(request: Request, admitted: Admitted) -> Response:
    raise Refused(404, "no such route", f"nothing is served at {request.url.path[:200]!r}")
