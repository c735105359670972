"""The application: which route goes where, behind the gate that every request passes first.

`dure.wire.requests` lists the routes. Handlers check what they got, write it to the journal, and
answer; none of them knows the model or the coordinator:

    attendance.py   who is there, and what there is to do for them
    downloads.py    what they fetch
    uploads.py      what they send
    replies.py      what they say of updates that stay with them
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, field

from dure.worlds.network.journal import Journal
from dure.worlds.network.server.access import Access
from dure.worlds.network.server.attendance import Attendance, Served
from dure.worlds.network.server.desk import GRACE, Desk
from dure.worlds.network.server.downloads import Downloads
from dure.worlds.network.server.gate import Gate
from dure.worlds.network.server.replies import Replies
from dure.worlds.network.server.routes import Routes
from dure.worlds.network.server.shelf import Shelf
from dure.worlds.network.server.uploads import Uploads
from dure.worlds.network.server.watching import Metered, Watching
from dure.worlds.network.updates import Updates


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

        self.replies = Replies(self.desk, self.journal, self.access)

    def asgi(self) -> Metered:
        """The application."""
        here = self.attendance
        down = self.downloads
        up = self.uploads
        gate = Gate(self.access, self.watching, self.desk.open.is_set)
        routed = Routes(
            [
                gate.route("/v1/enrol", "POST", here.enrol, known=False),
                gate.route("/v1/check-in", "POST", here.check_in),
                gate.route("/v1/next", "POST", here.next),
                gate.route("/v1/watch", "POST", here.watch),
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
        return Metered(routed, self.watching)

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
