"""The routes of the server: each checks what it got, writes it to the journal, and answers.

`dure.wire.requests` lists them. Nothing here knows the model or the coordinator. A request that
cannot be right is answered with a reason, and changes nothing.
"""

from __future__ import annotations

import asyncio
import hashlib
import logging
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any, TypeVar

from msgspec.structs import replace
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import Receive, Scope, Send

from dure.errors import RunFolderWriteError
from dure.wire import requests
from dure.wire.requests import (
    MOST_BODY,
    CheckIn,
    Failed,
    Machine,
    MeasuredThis,
    Ready,
    Refusal,
    RequestError,
    Reserve,
    Reserved,
    Said,
    Trains,
    Watch,
    Welcome,
    from_json,
    to_json,
)
from dure.wire.tensors import size_of
from dure.worlds.network.journal import Journal
from dure.worlds.network.server.access import NEW, Access, Admitted, Refused
from dure.worlds.network.server.carrier import Here, differences
from dure.worlds.network.server.desk import GRACE, Desk, Gone, Seat
from dure.worlds.network.server.routes import Routes
from dure.worlds.network.server.shelf import Shelf
from dure.worlds.network.server.watching import Metered, Watching
from dure.worlds.network.updates import PartError, Updates, Upload

Body = TypeVar("Body", bound=Said)

LOG = logging.getLogger("dure.server")

Handler = Callable[..., Awaitable[Response]]

MOST_REASON = 500
"""Characters that are kept of what a client says about its failure."""

ROOM_SECONDS = 5
"""Seconds until a client comes again for which the disk had no room."""

ALL_PARTS = 32 << 20
"""Bytes of parts that may lie in memory, where every client sends one."""

LEAST_PART = 256 << 10
"""Bytes of a part, however many clients there are."""

PART = 4 << 20
"""Bytes of an upload that are taken at once; each part lies in memory until it is checked."""


@dataclass
class Served:
    """What clients are told of the run when they check in.

    compare: in what a client's task differs, so that it cannot take part.
    """

    run: str
    clients: int
    strategy: dict[str, Any]
    seed: int
    trains: Trains
    machine: Machine
    heartbeat: float
    patience: float
    compare: Callable[[Trains, Trains], list[str]]


@dataclass
class App:
    """The handlers and what they share."""

    served: Served
    desk: Desk
    shelf: Shelf
    journal: Journal
    updates: Updates
    access: Access
    every_moment: Callable[[], None] = lambda: None
    """Called several times a second, in the event loop."""
    watching: Watching = field(default_factory=Watching)
    reserved: dict[int, Reserve] = field(default_factory=dict)
    """What each client has said of the update that it is sending."""

    @property
    def most_part(self) -> int:
        """Bytes of a part, so that those of all clients together are not too many."""
        return max(LEAST_PART, min(PART, ALL_PARTS // self.served.clients))

    def asgi(self) -> Metered:
        """The application."""
        routed = Routes(
            [
                self._route("/v1/enrol", "POST", self.enrol, known=False),
                self._route("/v1/check-in", "POST", self.check_in),
                self._route("/v1/next", "POST", self.next),
                self._route("/v1/watch", "POST", self.watch),
                self._route("/v1/tensors/{digest}", "GET", self.tensors),
                self._route("/v1/uploads", "POST", self.reserve),
                self._route("/v1/uploads/{upload}", "PATCH", self.part),
                self._route("/v1/failures", "POST", self.failed),
                self._route("/v1/measured", "POST", self.measured),
            ]
        )
        return Metered(routed, self.watching)

    def _route(self, path: str, method: str, handler: Handler, known: bool = True) -> Route:
        """The handler behind the checks that all share: is it open, and who calls?"""

        async def endpoint(request: Request) -> Response:
            if not self.desk.open.is_set():
                return refusal(503, "the server is starting", {"retry-after": "1"})
            client = None

            def note(kind: str, reason: str) -> None:
                what = f"{method} {path}"
                self.watching.refused(client, _address(request), what, kind, reason)

            try:
                if not known:
                    return await handler(request)
                admitted = self.access.admit(
                    request.headers, request.method, _target(request), _address(request)
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

        return Route(path, endpoint, methods=[method])

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
        """Notices who has gone."""
        while True:
            await asyncio.sleep(GRACE / 8)
            self.every_moment()
            # Before, nobody can call.
            if not self.desk.open.is_set():
                continue
            for seat in self.desk.silent(time.monotonic()):
                seat.here = False
                seat.missing = seat.train is not None
                try:
                    if seat.train is not None:
                        await self._log("missing", seat.number, seat.train.ticket)
                    else:
                        await self._log("leave", seat.number)
                    self.watching.left(seat)
                # The disk is full: it is noticed again at the next look.
                except RunFolderWriteError:
                    seat.here = True

    # Who is there

    async def enrol(self, request: Request) -> Response:
        body = await self._body(request, None, requests.Enrol)
        return answer(await asyncio.to_thread(self.access.enrol, body, _address(request)))

    async def check_in(self, request: Request, admitted: Admitted) -> Response:
        said = await self._body(request, admitted, CheckIn)
        if said.version not in (requests.VERSION, requests.VERSION - 1):
            raise RequestError(
                f"the client speaks version {said.version}, and the server {requests.VERSION}: "
                f"install the same dure"
            )
        if said.trains is not None:
            different = self.served.compare(said.trains, self.served.trains)
            if different:
                why = f"the task is another: {'; '.join(different[:5])}"
                self.access.refuse(admitted.client, 409, "another task", why)
        # After it is known to fit: whoever is refused takes nobody's place.
        if not said.looks and (admitted.client == NEW or said.name or said.wants is not None):
            admitted = await asyncio.to_thread(
                self.access.check_in, admitted, said.name, said.wants
            )
        # Without examples it has its number, and is not there yet.
        if said.examples and not said.looks:
            seat = self.desk.seat(admitted.client)
            seat.name = admitted.name or f"client {admitted.client}"
            with _call(self.desk, seat):
                await self._arrives(
                    seat, Here(seat.name, said.examples, said.held_out, said.machine)
                )
        served = self.served
        return answer(
            Welcome(
                version=requests.VERSION,
                run=served.run,
                client=admitted.client,
                clients=served.clients,
                strategy=served.strategy,
                seed=served.seed,
                trains=served.trains,
                machine=served.machine,
                heartbeat=served.heartbeat,
                patience=served.patience,
                differs=differences(said.machine, served.machine),
            )
        )

    async def _arrives(self, seat: Seat, here: Here) -> None:
        """Logs that a client is there."""
        seat.here = True
        seat.examples = here.examples
        seat.held_out = here.held_out
        seat.machine = here.machine
        await self._log("check_in", seat.number, body=to_json(here))
        self.watching.arrived(seat)

    async def next(self, request: Request, admitted: Admitted) -> Response:
        ready = await self._body(request, admitted, Ready)
        seat = self._known(admitted)
        self.desk.confirm(seat.number, ready.confirmed)
        with _call(self.desk, seat):
            await self._comes_back(seat)
            async with _connected(request) as gone:
                word = await self.desk.next(seat, self.served.patience, gone)
        # It may have been revoked while it waited.
        if not self.access.may(seat.number):
            self.access.refuse(seat.number, 403, "revoked", f"client {seat.number} was revoked")
        return answer(word)

    async def _comes_back(self, seat: Seat) -> None:
        """A client that was taken for gone calls again."""
        if seat.missing and seat.train is not None:
            seat.missing = False
            await self._log("back", seat.number, seat.train.ticket)
            self.watching.back(seat)
        if not seat.here:
            await self._arrives(seat, Here(seat.name, seat.examples, seat.held_out, seat.machine))

    async def watch(self, request: Request, admitted: Admitted) -> Response:
        said = await self._body(request, admitted, Watch)
        seat = self._known(admitted)
        with _call(self.desk, seat):
            await self._comes_back(seat)
            async with _connected(request) as gone:
                heartbeat = self.served.heartbeat
                watched = await self.desk.watch(seat, said.ticket, heartbeat, gone)
        return answer(watched)

    def _known(self, admitted: Admitted) -> Seat:
        seat = self.desk.seat(admitted.client)
        if not seat.examples:
            raise Refused(409, "check in first", "the server wants to know who calls: check in")
        return seat

    # What they fetch

    async def tensors(self, request: Request, admitted: Admitted) -> Response:
        digest = request.path_params["digest"]
        stream = self.shelf.get(digest)
        if stream is None:
            why = "there is no such model any more: ask again what to do"
            raise Refused(410, "no such model", why)
        start, end = _range(request.headers, stream.size, digest)
        seat = self.desk.seat(admitted.client)
        headers = {
            "etag": f'"{digest}"',
            "content-length": str(end - start),
            "accept-ranges": "bytes",
        }
        status = 200
        if start or end < stream.size:
            status = 206
            headers["content-range"] = f"bytes {start}-{end - 1}/{stream.size}"

        return _Pieces(stream.chunks(start, end), status, headers, _call(self.desk, seat))

    # What they send

    async def reserve(self, request: Request, admitted: Admitted) -> Response:
        said = await self._body(request, admitted, Reserve)
        seat = self._known(admitted)
        with _call(self.desk, seat):
            async with seat.sending:
                return await self._reserve(seat, said)

    async def _reserve(self, seat: Seat, said: Reserve) -> Response:
        if not self.desk.wants(seat, said.ticket):
            # A client that did not hear that all has arrived asks again.
            if said.ticket in seat.outcomes or said.ticket in seat.sent:
                return answer(Reserved(str(said.ticket), said.bytes, self.most_part, complete=True))
            raise _unwanted()
        if said.failure is not None:
            said = replace(said, failure=one_line(said.failure))
            await self._complete(seat, said)
            return answer(Reserved(str(said.ticket), 0, self.most_part, complete=True))
        expected = size_of(seat.forms)
        if said.bytes != expected:
            raise RequestError(
                f"the update has {said.bytes} bytes, and this model's has {expected}"
            )
        upload = await asyncio.to_thread(self._opened, said)
        self.reserved[seat.number] = said
        return await self._received(seat, said, upload)

    def _opened(self, said: Reserve) -> Upload:
        """What lies here of an update; on the disk, where that is all of it."""
        upload = self.updates.open(said.ticket, said.bytes, said.digest)
        if not upload.left:
            upload.complete()
        return upload

    async def part(self, request: Request, admitted: Admitted) -> Response:
        name = request.path_params["upload"]
        seat = self._known(admitted)
        with _call(self.desk, seat):
            body = await _read(request, PART)
            offset = _whole_number(request.headers.get("upload-offset", ""))
            # One after another: what is written down as whole stays as it is.
            async with seat.sending:
                return await self._take(seat, name, offset, body, admitted.digest)

    async def _take(
        self, seat: Seat, name: str, offset: int, body: bytearray, digest: str
    ) -> Response:
        said = self.reserved.get(seat.number)
        if said is None or name != str(said.ticket) or not self.desk.wants(seat, said.ticket):
            raise _unwanted()
        upload = await asyncio.to_thread(self._written, said, offset, body, digest)
        if offset > upload.offset:
            response = answer(Reserved(name, upload.offset, self.most_part))
            response.status_code = 409
            return response
        return await self._received(seat, said, upload)

    def _written(self, said: Reserve, offset: int, body: bytearray, digest: str) -> Upload:
        """The update with this part, unless some is missing before it."""
        upload = self.updates.open(said.ticket, said.bytes, said.digest)
        if offset <= upload.offset:
            upload.write(offset, body, digest)
            if not upload.left:
                upload.complete()
        return upload

    async def _received(self, seat: Seat, said: Reserve, upload: Upload) -> Response:
        """Once all bytes are here, and synced: the journal, then the client is told."""
        if upload.left:
            return answer(Reserved(str(said.ticket), upload.offset, self.most_part))
        await self._complete(seat, said)
        return answer(Reserved(str(said.ticket), said.bytes, self.most_part, complete=True))

    async def _complete(self, seat: Seat, said: Reserve) -> None:
        await self._log("update", seat.number, said.ticket, to_json(said))
        seat.sent.append(said.ticket)
        self.reserved.pop(seat.number, None)
        self.desk.done(seat.number, said.ticket)

    async def failed(self, request: Request, admitted: Admitted) -> Response:
        said = await self._body(request, admitted, Failed)
        seat = self._known(admitted)
        if self.desk.wants(seat, said.ticket):
            where = f" ({said.file}:{said.line})" if said.file else ""
            told = f": {said.message}" if said.message else ""
            reason = one_line(f"its own code raised {said.kind}{where}{told}")
            await self._log("failed", seat.number, said.ticket, reason.encode())
            # It is asked again after its next call.
            seat.here = False
        return Response(status_code=204)

    async def measured(self, request: Request, admitted: Admitted) -> Response:
        said = await self._body(request, admitted, MeasuredThis)
        seat = self._known(admitted)
        if seat.measure is not None and seat.measure.round == said.round:
            await self._log("measured", seat.number, body=to_json(said))
            self.desk.ask_measure(seat.number, None)
        return Response(status_code=204)

    # What they share

    async def _log(self, kind: str, client: int, ticket: int = -1, body: bytes = b"") -> None:
        """Returns once it is on the disk. Raises RunFolderWriteError."""
        await asyncio.wrap_future(self.journal.append(kind, client, ticket, body))

    async def _body(self, request: Request, admitted: Admitted | None, kind: type[Body]) -> Body:
        """The JSON body. Raises RequestError where it is not what was signed, or what it has to
        be."""
        body = await _read(request, MOST_BODY)
        if admitted is not None and hashlib.sha256(body).hexdigest() != admitted.digest:
            raise RequestError("the body is not the one that was signed")
        return from_json(body, kind)


def answer(said: Said) -> Response:
    return Response(to_json(said), media_type="application/json")


def refusal(status: int, reason: str, headers: Mapping[str, str] | None = None) -> Response:
    """An answer that says why nothing was done."""
    body = to_json(Refusal(reason))
    return Response(body, status, dict(headers or {}), media_type="application/json")


class _Pieces(Response):
    """Pieces of a stream that is there: sent by the task that answers, while `call` is open."""

    media_type = "application/octet-stream"

    def __init__(
        self, pieces: Iterator[memoryview], status: int, headers: Mapping[str, str], call: _call
    ) -> None:
        super().__init__(None, status, headers)
        self._pieces = pieces
        self._call = call

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        start = {"status": self.status_code, "headers": self.raw_headers}
        with self._call:
            await send({"type": "http.response.start", **start})
            for piece in self._pieces:
                await send({"type": "http.response.body", "body": piece, "more_body": True})
            await send({"type": "http.response.body", "body": b""})


def one_line(text: str) -> str:
    """What a client says is kept and shown: as a line, without characters that move a terminal."""
    return "".join(each if each.isprintable() else " " for each in text[:MOST_REASON])


def _unwanted() -> Refused:
    return Refused(410, "not wanted", "nobody waits for this update any more")


def _target(request: Request) -> str:
    """The path with its query, as it was sent."""
    raw: str = request.scope.get("raw_path", b"").decode("ascii", "replace")
    query = request.scope.get("query_string", b"").decode("ascii", "replace")
    return raw + (f"?{query}" if query else "")


def _address(request: Request) -> str:
    return request.client.host if request.client is not None else ""


async def _read(request: Request, most: int) -> bytearray:
    """The body. Raises Refused where it is longer than `most`, before it lies in memory."""
    length = request.headers.get("content-length")
    announced = 0 if length is None else _whole_number(length)
    if announced > most:
        raise Refused(413, "too long", f"the body has {length} bytes, and may have {most}")
    # In one piece from the beginning: many clients send at the same time. What does not come
    # takes no memory.
    body = bytearray(announced)
    size = 0
    async for part in request.stream():
        end = size + len(part)
        if end > most:
            raise Refused(413, "too long", f"the body has more than {most} bytes")
        body[size:end] = part
        size = end
    del body[size:]
    return body


def _whole_number(text: str) -> int:
    if not (text.isdecimal() and len(text) < 20):
        raise RequestError(f"{text[:20]!r} is no number of bytes")
    return int(text)


def _range(headers: Mapping[str, str], size: int, digest: str) -> tuple[int, int]:
    """Which bytes are asked for: [start, end). Raises RequestError."""
    asked = headers.get("range")
    # Of something else than the client began with: all of it.
    if asked is None or headers.get("if-range", f'"{digest}"') != f'"{digest}"':
        return 0, size
    unit, _, span = asked.partition("=")
    first, dash, last = span.partition("-")
    if unit != "bytes" or not dash or not first:
        raise RequestError("a range is bytes=FIRST- or bytes=FIRST-LAST")
    start = _whole_number(first)
    end = _whole_number(last) + 1 if last else size
    if not start < min(end, size):
        where = {"content-range": f"bytes */{size}"}
        raise Refused(416, "no such range", f"there are {size} bytes", where)
    return start, min(end, size)


class _call:  # noqa: N801
    """While a call of a client is open, it is there."""

    def __init__(self, desk: Desk, seat: Seat) -> None:
        self.desk = desk
        self.seat = seat

    def __enter__(self) -> None:
        self.desk.called(self.seat)

    def __exit__(self, *error: object) -> None:
        self.desk.hung_up(self.seat)


@asynccontextmanager
async def _connected(request: Request) -> AsyncIterator[Gone]:
    """While a call waits: a future that is done once the client has hung up."""
    gone = asyncio.ensure_future(_gone(request))
    try:
        yield gone
    finally:
        gone.cancel()


async def _gone(request: Request) -> None:
    """Returns when the connection is closed. The body has been read by then."""
    while True:
        message = await request.receive()
        if message["type"] == "http.disconnect":
            return
