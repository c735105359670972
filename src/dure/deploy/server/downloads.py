"""Downloads: the tensors of a model by the digest of their stream, in ranges.

The query has the first byte that the client wants, since the query is signed. The header
`Range` repeats it for proxies between client and server.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from dure.deploy.server.access import Admitted, RequestRefused
from dure.deploy.server.blob_cache import BlobCache
from dure.deploy.server.client_requests import (
    OpenRequest,
    UnprovenError,
    signed_number,
    unsigned_number,
)
from dure.deploy.server.outbox import ClientOutbox


@dataclass
class Downloads:
    """Route of downloads."""

    outbox: ClientOutbox
    cache: BlobCache

    async def tensors(self, request: Request, admitted: Admitted) -> Response:
        digest = request.path_params["digest"]
        stream = self.cache.get(digest)
        if stream is None:
            why = "this model is not available any more: ask for the next assignment"
            raise RequestRefused(410, "no such model", why)
        start = signed_number(request, "from")
        if start is None:
            start, end = range_of(request.headers, stream.size, digest)
        else:
            end = stream.size
            if start > end or start == end > 0:
                raise _no_such_range(end)
        session = self.outbox.session(admitted.client)
        headers = {
            "etag": f'"{digest}"',
            "content-length": str(end - start),
            "accept-ranges": "bytes",
        }
        status = 200
        if start or end < stream.size:
            status = 206
            headers["content-range"] = f"bytes {start}-{end - 1}/{stream.size}"

        return StreamResponse(
            stream.chunks(start, end), status, headers, OpenRequest(self.outbox, session)
        )


class StreamResponse(Response):
    """Response that sends the pieces of a cached stream, with `call` open meanwhile."""

    media_type = "application/octet-stream"

    def __init__(
        self,
        pieces: Iterator[memoryview],
        status: int,
        headers: Mapping[str, str],
        call: OpenRequest,
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


def range_of(headers: Mapping[str, str], size: int, digest: str) -> tuple[int, int]:
    """Return the requested bytes [start, end) of an unsigned Range header.

    Clients of earlier versions use the header. Raises UnprovenError.
    """
    asked = headers.get("range")
    # The range is of another stream: the answer is the whole stream.
    if asked is None or headers.get("if-range", f'"{digest}"') != f'"{digest}"':
        return 0, size
    unit, _, span = asked.partition("=")
    first, dash, last = span.partition("-")
    if unit != "bytes" or not dash or not first:
        raise UnprovenError("wrong header", "a range is bytes=FIRST- or bytes=FIRST-LAST")
    start = unsigned_number(first)
    end = unsigned_number(last) + 1 if last else size
    if not start < min(end, size):
        raise _no_such_range(size)
    return start, min(end, size)


def _no_such_range(size: int) -> RequestRefused:
    where = {"content-range": f"bytes */{size}"}
    return RequestRefused(416, "no such range", f"there are {size} bytes", where)
