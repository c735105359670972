"""Application: the routes, behind the authentication of every request.

`dure.wire.requests` lists the routes. Handlers check the request, write it to the journal, and
answer; they depend on neither the model nor the coordinator:

    sessions.py     sessions of clients, and their work
    downloads.py    tensors for clients
    uploads.py      updates of clients
    replies.py      messages about updates that stay at their clients
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, field

from dure.deploy.journal import Journal
from dure.deploy.server.access import AccessControl
from dure.deploy.server.blob_cache import BlobCache
from dure.deploy.server.downloads import Downloads
from dure.deploy.server.outbox import GRACE, ClientOutbox
from dure.deploy.server.replies import Replies
from dure.deploy.server.request_authentication import RequestAuthenticator
from dure.deploy.server.routes import Routes
from dure.deploy.server.server_metrics import MeteredApp, ServerMetrics
from dure.deploy.server.sessions import ServedRun, SessionRoutes
from dure.deploy.server.uploads import Uploads
from dure.deploy.updates import Updates


@dataclass
class App:
    """Application with its routes and the shared state of the handlers."""

    served: ServedRun
    outbox: ClientOutbox
    cache: BlobCache
    journal: Journal
    updates: Updates
    access: AccessControl
    every_moment: Callable[[], None] = lambda: None
    """Function called several times per second in the event loop."""
    server_metrics: ServerMetrics = field(default_factory=ServerMetrics)

    def __post_init__(self) -> None:
        self.session_routes = SessionRoutes(
            self.served, self.outbox, self.journal, self.access, self.server_metrics
        )
        self.downloads = Downloads(self.outbox, self.cache)
        self.uploads = Uploads(
            self.served.clients,
            self.outbox,
            self.journal,
            self.updates,
            self.access,
            self.served.samples,
        )

        self.replies = Replies(self.outbox, self.journal, self.access)

    def asgi(self) -> MeteredApp:
        """Return the ASGI application."""
        sessions = self.session_routes
        down = self.downloads
        up = self.uploads
        gate = RequestAuthenticator(self.access, self.server_metrics, self.outbox.open.is_set)
        routed = Routes(
            [
                gate.route("/v1/enrol", "POST", sessions.enrol, known=False),
                gate.route("/v1/check-in", "POST", sessions.check_in),
                gate.route("/v1/next", "POST", sessions.next),
                gate.route("/v1/watch", "POST", sessions.watch),
                gate.route("/v1/tensors/{digest}", "GET", down.tensors),
                gate.route("/v1/uploads", "POST", up.reserve),
                gate.route("/v1/uploads/{upload}", "PATCH", up.part),
                gate.route("/v1/failures", "POST", up.failed),
                gate.route("/v1/measured", "POST", up.measured),
                gate.route("/v1/ready", "POST", self.replies.ready),
                gate.route("/v1/answers", "POST", self.replies.answered),
                gate.rest(),
            ]
        )
        return MeteredApp(routed, self.server_metrics)

    def lives_in(self, loop: asyncio.AbstractEventLoop) -> None:
        """Attach the application to its event loop; called once before the first request."""
        self.outbox.lives_in(loop)
        self._listening = loop.create_task(self._listen())

    async def _listen(self) -> None:
        """Check several times per second for clients that have disconnected."""
        while True:
            await asyncio.sleep(GRACE / 8)
            self.every_moment()
            # Before the server is open, no client can call.
            if self.outbox.open.is_set():
                await self.session_routes.detect_disconnected()
