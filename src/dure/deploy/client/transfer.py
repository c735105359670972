"""Transfer of tensors from and to a client, over unreliable links.

Download: the stream of safetensors is read directly into the tensors. After an interruption the
download resumes at the byte reached (`Range`, `If-Range`); at the end the SHA-256 of the
stream must equal the digest that the server named. Memory: one copy of the model, and small
buffers.

Upload: the stream is sent from the tensors' own memory, in parts with a digest each. The server
accepts a part completely or not at all, and returns the number of stored bytes; the client resends
a part in transit during an interruption. The first parts are a tenth of the stream, and each
interruption halves the following parts: however often the link breaks, at most a fifth of the
stream is sent twice (or 2 MiB, if that is more), down to parts of 64 KiB.

Source of ranges: RFC 9110, section 14. Parts by offset are as in tus (https://tus.io), which has no
digest of the whole.
"""

from __future__ import annotations

import hashlib
import os
import threading
import time
import urllib.parse
from bisect import bisect_right
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, suppress
from itertools import accumulate
from pathlib import Path
from typing import BinaryIO

from torch import Tensor

from dure.deploy.client.connection import READ_AT_ONCE, SENT_AT_ONCE
from dure.deploy.client.link import (
    Backoff,
    BusyError,
    HttpAnswer,
    HttpLink,
    LinkLostError,
    OutgoingBody,
    RefusedError,
    StoppedError,
    StreamedAnswer,
    call_with_retries,
)
from dure.errors import DureError
from dure.record.disk import disk_errors, open_regular_file, sync_folder
from dure.record.weights import header_of
from dure.wire.requests import RequestError, UploadRequest, UploadState, from_json
from dure.wire.tensors import TensorsError, TensorSpec, bytes_of, forms_of, receive

LEAST_PART = 1 << 16
"""Minimum bytes of a part of an upload, unless the server accepts fewer."""

FIRST_PART = 1 << 20
"""Minimum bytes of the first part: a small update needs a single request."""

MOST_CORRECTIONS = 3
"""Maximum corrections of an upload by the server in a row, before the upload fails."""

_ASK_AGAIN = (400, 404, 409, 410, 422)
"""Status codes of a server that refuses a part and may accept another part."""


class TransferError(DureError):
    """The received bytes are not the requested bytes, or the server contradicts itself."""


Tell = Callable[[OSError, float], None]
"""Listener for interruptions, with the seconds until the next attempt."""

Progress = Callable[[int], None]
"""Listener for progress, in bytes of the stream."""


def _nothing(*_: object) -> None:
    pass


def _always() -> bool:
    return True


class _Pace:
    """Bandwidth limit in bytes per second, if set; checks for a stop after each piece."""

    def __init__(self, bytes_per_second: float | None, stop: threading.Event) -> None:
        self._rate = bytes_per_second
        self._stop = stop
        self._free = 0.0

    def at_once(self, most: int) -> int:
        """Return the bytes of a piece: at most `most`, and at most the bytes of a second."""
        return most if self._rate is None else max(1, min(most, int(self._rate)))

    def passed(self, count: int) -> None:
        """Wait until the limit allows the next bytes, after `count`. Raises StoppedError."""
        if self._rate is not None:
            now = time.monotonic()
            self._free = max(self._free, now) + count / self._rate
            self._stop.wait(self._free - now)
        if self._stop.is_set():
            raise StoppedError


# Download


def download(
    link: HttpLink,
    digest: str,
    size: int,
    expected: Mapping[str, TensorSpec] | None,
    stop: threading.Event,
    backoff: Backoff,
    keep: Path | None = None,
    *,
    tell: Tell = _nothing,
    progress: Progress = _nothing,
    bytes_per_second: float | None = None,
    limit: float | None = None,
) -> dict[str, Tensor]:
    """Download the tensors whose stream has this digest and size; retry damaged data once.

    Args:
        link: Link to the server.
        digest: SHA-256 of the stream.
        size: Bytes of the stream.
        expected: Required dtypes and shapes; None for any tensors.
        stop: Event that ends the download.
        backoff: Waits between attempts.
        keep: File that gets the complete stream; unchanged until then. None for no file.
        tell: Listener for interruptions.
        progress: Listener for progress.
        bytes_per_second: Bandwidth limit; None for no limit.
        limit: Seconds of retries before LinkLostError or BusyError; None for no limit.

    Raises:
        TransferError: The stream is damaged twice, or has other tensors.
        RefusedError: The server does not have the stream.
        NotTrustedError, StoppedError: As in `HttpLink`.
        RunFolderWriteError: The file cannot be written.
    """
    damage: Exception | None = None
    for _ in range(2):
        coming = _Coming(link, digest, size, stop, backoff, tell, progress, bytes_per_second)
        coming.limit = limit
        with coming, _Kept(keep) as kept:
            coming.copy = kept.write
            try:
                tensors = receive(coming.read, size, expected)
            except TensorsError as error:
                damage = error
                continue
            if coming.digest() == digest:
                kept.put_in_place()
                return tensors
            damage = TensorsError(f"its SHA-256 is {coming.digest()}")
    raise TransferError(f"the received data do not match {digest}: {damage}") from damage


class _Coming:
    """Stream that resumes after interruptions."""

    def __init__(
        self,
        link: HttpLink,
        digest: str,
        size: int,
        stop: threading.Event,
        backoff: Backoff,
        tell: Tell,
        progress: Progress,
        bytes_per_second: float | None,
    ) -> None:
        self._link = link
        self._name = digest
        self._size = size
        self._stop = stop
        self._backoff = backoff
        self._tell = tell
        self._progress = progress
        self._pace = _Pace(bytes_per_second, stop)
        self.copy: Callable[[memoryview], None] = _nothing
        self.limit: float | None = None
        self._sha = hashlib.sha256()
        self._at = 0
        self._answer: StreamedAnswer | None = None
        self._open = ExitStack()

    def __enter__(self) -> _Coming:
        return self

    def __exit__(self, *_: object) -> None:
        self._open.close()

    def digest(self) -> str:
        return self._sha.hexdigest()

    def read(self, memory: memoryview) -> int:
        """Fill the memory with the next bytes, as `Read` of dure.wire.tensors."""
        if self._at == self._size:
            return 0
        some = memory[: self._pace.at_once(READ_AT_ONCE)]
        # Every received byte resets the backoff for the next interruption.
        count = call_with_retries(
            lambda: self._some(some), self._backoff, self._stop, self._tell, self.limit
        )
        self._sha.update(some[:count])
        self.copy(some[:count])
        self._at += count
        self._progress(self._at)
        self._pace.passed(count)
        return count

    def _some(self, memory: memoryview) -> int:
        """Read at least one byte, without retries."""
        if self._answer is None:
            self._answer = self._asked()
        try:
            count = self._answer.read(memory)
            if count == 0:
                raise LinkLostError(f"the answer of {self._link.place} ends too early")
        except LinkLostError:
            self._answer = None
            self._open.close()
            raise
        return count

    def _asked(self) -> StreamedAnswer:
        """Request the stream from byte `_at` on."""
        headers = {}
        path = f"/v1/tensors/{self._name}"
        if self._at:
            # The signature covers the query, but not headers.
            path = f"{path}?from={self._at}"
            headers = {"range": f"bytes={self._at}-", "if-range": f'"{self._name}"'}
        asked = self._link.stream("GET", path, headers, most=self._size)
        with ExitStack() as opened:
            answer = opened.enter_context(asked)
            begin = self._begin(answer)
            length = answer.headers.get("content-length")
            if length is not None and length != str(self._size - begin):
                raise TransferError(f"{self._name} has {length} bytes, not {self._size - begin}")
            _skip(answer, self._at - begin)
            self._open = opened.pop_all()
        return answer

    def _begin(self, answer: StreamedAnswer) -> int:
        """Return the offset of the answer: 0 if a proxy ignores ranges and sends everything."""
        if answer.status != 206:
            return 0
        said = answer.headers.get("content-range", "")
        if not said.startswith(f"bytes {self._at}-"):
            raise TransferError(f"asked for bytes from {self._at} on, the server sends {said!r}")
        return self._at


def _skip(answer: StreamedAnswer, count: int) -> None:
    memory = memoryview(bytearray(min(count, READ_AT_ONCE)))
    while count:
        read = answer.read(memory[:count])
        if read == 0:
            raise LinkLostError("the answer ends too early")
        count -= read


class _Kept:
    """File that gets its name only when its content is complete."""

    def __init__(self, path: Path | None) -> None:
        self._path = path
        self._file: BinaryIO | None = None

    def __enter__(self) -> _Kept:
        if self._path is not None:
            self._beside = self._path.with_name(f".{self._path.name}.{os.getpid()}")
            with disk_errors(self._path):
                self._file = open(self._beside, "wb", buffering=0, opener=open_regular_file)
        return self

    def __exit__(self, *_: object) -> None:
        if self._file is not None:
            self._file.close()
            with suppress(OSError):
                self._beside.unlink(missing_ok=True)

    def write(self, some: memoryview) -> None:
        if self._file is None or self._path is None:
            return
        with disk_errors(self._path):
            while some:
                some = some[self._file.write(some) :]

    def put_in_place(self) -> None:
        if self._file is None or self._path is None:
            return
        with disk_errors(self._path):
            # Without the sync the name could reach the disk before the content in a power failure.
            os.fsync(self._file.fileno())
            os.replace(self._beside, self._path)
            sync_folder(self._path.parent)


# Upload


def upload(
    link: HttpLink,
    reserve: UploadRequest,
    tensors: Mapping[str, Tensor],
    stop: threading.Event,
    backoff: Backoff,
    wanted: Callable[[], bool] = _always,
    *,
    tell: Tell = _nothing,
    progress: Progress = _nothing,
    bytes_per_second: float | None = None,
    limit: float | None = None,
) -> bool:
    """Upload an update, and return whether the server has recorded it.

    Args:
        link: Link to the server.
        reserve: Announcement of the update.
        tensors: Tensors of the update.
        stop: Event that ends the upload.
        backoff: Waits between attempts.
        wanted: Function checked between pieces; returns False if the update is no longer needed.
        tell: Listener for interruptions.
        progress: Listener for progress.
        bytes_per_second: Bandwidth limit; None for no limit.
        limit: Seconds of retries before LinkLostError or BusyError; None for no limit.

    Returns:
        True if the server has recorded the update, and False if it is no longer needed.

    Raises:
        RefusedError: The server refuses the update.
        NotTrustedError, StoppedError: As in `HttpLink`.
        TransferError: The server contradicts itself.
        ValueError: The size in `reserve` is not the size of the tensors.
    """
    going = _Going(link, reserve, tensors, _Pace(bytes_per_second, stop), wanted, progress)
    try:
        while not call_with_retries(going.step, backoff, stop, tell, limit):
            pass
    except _UnwantedError:
        return False
    return True


class _UnwantedError(Exception):
    pass


class _Going:
    """Upload of an update, part by part."""

    def __init__(
        self,
        link: HttpLink,
        reserve: UploadRequest,
        tensors: Mapping[str, Tensor],
        pace: _Pace,
        wanted: Callable[[], bool],
        progress: Progress,
    ) -> None:
        self._stream = _Laid(tensors)
        # An update with a failure has no tensors.
        if reserve.failure is None and self._stream.size != reserve.bytes:
            raise ValueError(f"{reserve.bytes} bytes are reserved for {self._stream.size}")
        self._link = link
        self._reserve = reserve
        self._pace = pace
        self._wanted = wanted
        self._progress = progress
        self._largest = max(FIRST_PART, reserve.bytes // 10)
        self._corrections = 0
        # Server's state of the upload; None if the client has to request it.
        self._reserved: UploadState | None = None

    def step(self) -> bool:
        """Send the announcement or a part, and return whether the upload is complete.

        Raises LinkLostError and BusyError.
        """
        if self._reserved is None:
            self._take(self._link.ask("POST", "/v1/uploads", self._reserve, UploadState))
        else:
            self._send(self._reserved)
        return self._reserved is not None and self._reserved.complete

    def _take(self, reserved: UploadState) -> None:
        size = self._reserve.bytes
        if not 0 <= reserved.offset <= size or reserved.part < 1:
            raise TransferError(
                f"the server has {reserved.offset} of {size} bytes, and takes {reserved.part}"
            )
        self._reserved = reserved
        self._progress(reserved.offset)
        if reserved.offset == size and not reserved.complete:
            self._reserved = None
            self._count_correction("the server has all bytes, but has not stored them")
            raise BusyError(200, "the server has all bytes of the update, and stores them")

    def _send(self, reserved: UploadState) -> None:
        at = reserved.offset
        count = min(
            self._reserve.bytes - at,
            reserved.part,
            self._largest,
            self._link.most_part or self._largest,
        )
        # After any error the client requests the server's state.
        self._reserved = None
        try:
            answer = self._patch(reserved.upload, at, count)
        except LinkLostError:
            self._largest = max(LEAST_PART, self._largest // 2)
            raise
        except RefusedError as refused:
            self._correct(reserved, count, refused)
            return
        self._corrections = 0
        self._take(self._link.understood(answer, UploadState))

    def _patch(self, upload: str, at: int, count: int) -> HttpAnswer:
        digest = self._digest(at, count)
        headers = {
            "content-type": "application/octet-stream",
            "upload-offset": str(at),
            "dure-digest": digest,
        }
        # The signature covers the query, but not headers; a server of an earlier version reads the
        # header.
        path = f"/v1/uploads/{urllib.parse.quote(upload, safe='')}?offset={at}"
        body = OutgoingBody(count, digest, lambda: self._pieces(at, count))
        return self._link.send("PATCH", path, body, headers)

    def _digest(self, at: int, count: int) -> str:
        """Return the SHA-256 of a part; the digest of the whole stream is known."""
        if count == self._reserve.bytes:
            return self._reserve.digest
        sha = hashlib.sha256()
        for piece in self._stream.part(at, count):
            sha.update(piece)
        return sha.hexdigest()

    def _pieces(self, at: int, count: int) -> Iterator[memoryview]:
        for piece in _joined(self._stream.part(at, count), self._pace.at_once(SENT_AT_ONCE)):
            if not self._wanted():
                raise _UnwantedError
            yield piece
            at += len(piece)
            self._progress(at)
            self._pace.passed(len(piece))

    def _correct(self, reserved: UploadState, count: int, refused: RefusedError) -> None:
        """Handle a refused part: retry a smaller part, take the server's offset, or raise."""
        if refused.status == 413 and count > LEAST_PART:
            # A proxy before the server may have refused the part, and the server does not know of
            # it.
            self._link.most_part = max(LEAST_PART, count // 2)
            self._reserved = reserved
            return
        if refused.status not in _ASK_AGAIN:
            raise refused
        self._count_correction(refused.reason)
        if refused.status == 409:
            # The body has the server's state; otherwise the client requests it.
            with suppress(RequestError):
                self._take(from_json(refused.body, UploadState))

    def _count_correction(self, reason: str) -> None:
        self._corrections += 1
        if self._corrections > MOST_CORRECTIONS:
            raise TransferError(f"the update does not arrive: {reason}")


class _Laid:
    """Stream of tensors with random access."""

    def __init__(self, tensors: Mapping[str, Tensor]) -> None:
        self._header = memoryview(header_of(forms_of(tensors)))
        self._tensors = [each.detach() for each in tensors.values() if each.numel()]
        sizes = [len(self._header), *(each.numel() * each.element_size() for each in self._tensors)]
        self._begins = [0, *accumulate(sizes)]
        self.size = self._begins.pop()
        # Cache of the copy of a tensor that is not contiguous, for the last tensor only.
        self._last: tuple[int, memoryview] = (0, self._header)

    def part(self, at: int, count: int) -> Iterator[memoryview]:
        """Yield `count` bytes from offset `at`, as views."""
        end = at + count
        number = bisect_right(self._begins, at) - 1
        while at < end:
            begin = self._begins[number]
            view = self._view(number)[at - begin : end - begin]
            yield view
            at += len(view)
            number += 1

    def _view(self, number: int) -> memoryview:
        if number == 0:
            return self._header
        if self._last[0] != number:
            self._last = (0, self._header)
            tensor = self._tensors[number - 1].cpu().contiguous()
            self._last = (number, bytes_of(tensor))
        return self._last[1]


def _joined(views: Iterator[memoryview], most: int) -> Iterator[memoryview]:
    """Yield the same bytes in pieces of at most `most`; small views are copied together."""
    small = bytearray()
    for view in views:
        for at in range(0, len(view), most):
            piece = view[at : at + most]
            if len(small) + len(piece) > most:
                yield memoryview(small)
                small = bytearray()
            if len(piece) == most:
                yield piece
            else:
                small += piece
    if small:
        yield memoryview(small)
