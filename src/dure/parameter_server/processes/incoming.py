"""Assembly of frames from received bytes, without a socket.

Small frames share a buffer. The data of a large frame go to their final memory: the part in the
buffer is copied there, and the rest is read there directly (`BlockAllocator`).
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from dure.parameter_server.processes.frames import HEAD, MOST_HEADER, EndpointFrameError
from dure.tensors.block_allocator import BlockAllocator

_BUFFER = 1 << 16
_NOTHING = torch.empty(0, dtype=torch.uint8)


class ReceivedFrame(NamedTuple):
    """Complete frame."""

    header: bytes
    data: Tensor


class Incoming:
    """Frames of a connection. `most` is the largest length of a frame's data in bytes."""

    def __init__(self, most: int, blocks: BlockAllocator) -> None:
        self._most = most
        self._blocks = blocks
        self._buffer = memoryview(bytearray(_BUFFER))
        self._start = 0
        self._end = 0
        """Bytes from `_start` to `_end` of the buffer belong to no complete frame yet."""
        self._header = b""
        self._data = torch.empty(0, dtype=torch.uint8)
        self._missing = memoryview(b"")
        """Memory for the rest of a frame's data."""

    def room(self) -> memoryview:
        """Return the memory for the next bytes; never empty."""
        return self._missing if len(self._missing) else self._buffer[self._end :]

    def came(self, count: int) -> list[ReceivedFrame]:
        """Return the complete frames after `count` more bytes were written to `room`.

        Raises FrameError for a frame beyond the length limit.
        """
        if len(self._missing):
            self._missing = self._missing[count:]
            return [] if len(self._missing) else [ReceivedFrame(self._header, self._data)]
        self._end += count
        found = []
        while (frame := self._next()) is not None:
            found.append(frame)
        return found

    def _next(self) -> ReceivedFrame | None:
        """Return the next complete frame in the buffer; None if it is incomplete."""
        there = self._end - self._start
        if there < HEAD.size:
            self._make_room(HEAD.size)
            return None
        header, data = HEAD.unpack_from(self._buffer, self._start)
        if header > MOST_HEADER or data > self._most:
            raise EndpointFrameError(
                f"a frame of {header} and {data} bytes is longer than any here"
            )
        if there < HEAD.size + header:
            self._make_room(HEAD.size + header)
            return None
        begins = self._start + HEAD.size
        self._start = begins + header
        self._header = bytes(self._buffer[begins : self._start])
        if not data:
            return ReceivedFrame(self._header, _NOTHING)
        self._data = self._blocks.empty(data)
        inside: Any = self._data.numpy()
        here = min(data, self._end - self._start)
        memoryview(inside)[:here] = self._buffer[self._start : self._start + here]
        self._start += here
        if here < data:
            self._missing = memoryview(inside)[here:]
            self._make_room(HEAD.size)
            return None
        return ReceivedFrame(self._header, self._data)

    def _make_room(self, wanted: int) -> None:
        """Move the unread bytes to the front of a buffer with room for `wanted` bytes."""
        there = self._end - self._start
        if self._start + wanted > len(self._buffer) or there == 0:
            size = max(_BUFFER, wanted)
            # A larger buffer for a long header, and the usual size afterwards.
            target = self._buffer if size == len(self._buffer) else memoryview(bytearray(size))
            target[:there] = bytes(self._buffer[self._start : self._end])
            self._buffer = target
            self._start = 0
            self._end = there
