"""What has come over a connection, until it is a frame: bytes in, frames out, and no socket.

Small frames come into a buffer, many at a time. The data of a large one go where they stay: what
the buffer has of them is copied there, and the rest is read into their place (`Blocks`).
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from dure.parameter_server.processes.frames import HEAD, MOST_HEADER, FrameError
from dure.tensors.blocks import Blocks

_BUFFER = 1 << 16
_NOTHING = torch.empty(0, dtype=torch.uint8)


class Came(NamedTuple):
    """A frame that has come as a whole."""

    header: bytes
    data: Tensor


class Incoming:
    """The frames of one connection. most: bytes that a frame's data may have."""

    def __init__(self, most: int, blocks: Blocks) -> None:
        self._most = most
        self._blocks = blocks
        self._buffer = memoryview(bytearray(_BUFFER))
        self._start = 0
        self._end = 0
        """What has come and is part of no frame yet lies in between, in the buffer."""
        self._header = b""
        self._data = torch.empty(0, dtype=torch.uint8)
        self._missing = memoryview(b"")
        """Where the rest of a frame's data belongs."""

    def room(self) -> memoryview:
        """Where the next bytes are to be written; never empty."""
        return self._missing if len(self._missing) else self._buffer[self._end :]

    def came(self, count: int) -> list[Came]:
        """The frames that are there as a whole, now that `room` has so many more bytes.

        Raises FrameError for one that is longer than any that is expected.
        """
        if len(self._missing):
            self._missing = self._missing[count:]
            return [] if len(self._missing) else [Came(self._header, self._data)]
        self._end += count
        found = []
        while (frame := self._next()) is not None:
            found.append(frame)
        return found

    def _next(self) -> Came | None:
        """The next frame that is in the buffer; None where that is not there as a whole."""
        there = self._end - self._start
        if there < HEAD.size:
            self._make_room(HEAD.size)
            return None
        header, data = HEAD.unpack_from(self._buffer, self._start)
        if header > MOST_HEADER or data > self._most:
            raise FrameError(f"a frame of {header} and {data} bytes is longer than any here")
        if there < HEAD.size + header:
            self._make_room(HEAD.size + header)
            return None
        begins = self._start + HEAD.size
        self._start = begins + header
        self._header = bytes(self._buffer[begins : self._start])
        if not data:
            return Came(self._header, _NOTHING)
        self._data = self._blocks.empty(data)
        inside: Any = self._data.numpy()
        here = min(data, self._end - self._start)
        memoryview(inside)[:here] = self._buffer[self._start : self._start + here]
        self._start += here
        if here < data:
            self._missing = memoryview(inside)[here:]
            self._make_room(HEAD.size)
            return None
        return Came(self._header, self._data)

    def _make_room(self, wanted: int) -> None:
        """Moves what has come to the front of a buffer that has room for so many bytes."""
        there = self._end - self._start
        if self._start + wanted > len(self._buffer) or there == 0:
            size = max(_BUFFER, wanted)
            # Larger for a long header, and as it was for the next.
            target = self._buffer if size == len(self._buffer) else memoryview(bytearray(size))
            target[:there] = bytes(self._buffer[self._start : self._end])
            self._buffer = target
            self._start = 0
            self._end = there
