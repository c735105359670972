"""Frames: a message as a header, with tensors in the frame or in shared memory.

    bytes 0 to 3     H, the bytes of the header, little-endian
    4 to 11          D, the bytes of the data
    then the header  the message in MessagePack, with (dtype, shape, place) for each tensor
    then the data    the tensors outside of shared memory, in the header's order

The place of a tensor is None if the data contain it, or the name of a process and an offset in its
shared memory (`memory`). The decoder checks each frame: dtypes are in a list, sizes are
non-negative, places are within the owner's shared memory, and the data have exactly the bytes of
their tensors. Nothing is unpickled, and nothing is allocated for a frame beyond the length limit.

The owner of shared memory may write any elements there. Processes of a job trust each other's
elements, and nothing else: a wrong length or place raises an error.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Callable
from typing import Any, NamedTuple

import msgspec
import torch
from torch import Tensor

from dure.parameter_server.processes.messages import ProcessMessage
from dure.protocol.encoding import DTYPES, NAMES
from dure.tensors.elements import element_bytes

HEAD = struct.Struct("<IQ")
MOST_HEADER = 1 << 24
"""Largest length of a header in bytes: a layout, or the clock of a shard, with a margin."""
_MOST_EXTENT = 1 << 48
"""Upper bound of a dimension's elements, beyond any memory."""


class EndpointFrameError(ValueError):
    """The bytes are no frame of this job."""


class BufferRange(NamedTuple):
    """Location of a tensor: offset in bytes in the shared memory of a process."""

    owner: str
    offset: int


class Frame(NamedTuple):
    """Encoded message. `data` has pieces without copies."""

    head: bytes
    data: list[memoryview]

    @property
    def nbytes(self) -> int:
        """Bytes of the data."""
        return sum(len(piece) for piece in self.data)


PlaceOf = Callable[[Tensor], BufferRange | None]
BufferLookup = Callable[[BufferRange, torch.dtype, int], Tensor | None]


class FrameEncoder:
    """Encoder of frames. Use one for each thread; its creation takes longer than a frame."""

    def __init__(self) -> None:
        self._encoder = msgspec.msgpack.Encoder(enc_hook=self._described)
        self._place_of: PlaceOf | None = None
        self._pieces: list[memoryview] = []

    def encode(self, message: ProcessMessage, place_of: PlaceOf | None) -> Frame:
        """Return the frame of a message.

        `place_of` returns a tensor's location in memory that the receiver shares, or None; a
        `place_of` of None shares no memory. Raises TypeError for a tensor of an unsupported dtype.
        """
        self._place_of = place_of
        self._pieces = []
        header = self._encoder.encode(message)
        size = sum(len(piece) for piece in self._pieces)
        return Frame(HEAD.pack(len(header), size) + header, self._pieces)

    def _described(self, node: Any) -> Any:
        if not isinstance(node, Tensor):
            raise TypeError(f"a frame cannot have a {type(node).__name__}")
        name = NAMES.get(node.dtype)
        if name is None:
            raise TypeError(f"a frame cannot have tensors of {node.dtype}")
        if not node.numel():
            return name, tuple(node.shape), None
        place = self._place_of(node) if self._place_of is not None else None
        if place is None:
            flat: Any = element_bytes(node.cpu()).numpy()
            self._pieces.append(memoryview(flat))
        return name, tuple(node.shape), place


class FrameDecoder:
    """Decoder of frames. Use one for each thread.

    `look` returns the vector at a place with this dtype and number of elements, or None.

    The tensors of a message are views of its data, or of shared memory.
    """

    def __init__(self, look: BufferLookup) -> None:
        self._look = look
        self._decoder: msgspec.msgpack.Decoder[ProcessMessage] = msgspec.msgpack.Decoder(
            ProcessMessage, dec_hook=self._tensor
        )
        self._data = torch.empty(0, dtype=torch.uint8)
        self._at = 0

    def decode(self, header: bytes | memoryview, data: Tensor) -> ProcessMessage:
        """Return the message of a header and its data. Raises FrameError for other bytes."""
        self._data = data
        self._at = 0
        try:
            message = self._decoder.decode(header)
        except (msgspec.MsgspecError, ValueError, TypeError, OverflowError, RuntimeError) as error:
            raise EndpointFrameError(f"it is no message: {error}") from error
        if self._at != len(data):
            raise EndpointFrameError(
                f"the frame has {len(data) - self._at} bytes that belong to nothing"
            )
        return message

    def _tensor(self, kind: type, node: Any) -> Tensor:
        name, shape, place = _description(node)
        dtype = DTYPES[name]
        count = math.prod(shape)
        if count == 0:
            return torch.empty(shape, dtype=dtype)
        if place is not None:
            found = self._look(place, dtype, count)
            if found is None:
                raise EndpointFrameError(
                    f"there is no {name} {list(shape)} at {place.offset} of {place.owner}"
                )
        else:
            found = self._inside(count * dtype.itemsize, dtype)
        return found if len(shape) == 1 else found.view(shape)

    def _inside(self, size: int, dtype: torch.dtype) -> Tensor:
        """Return the next bytes of the data as a vector."""
        found = self._data[self._at : self._at + size]
        if len(found) != size:
            raise EndpointFrameError(f"a tensor of {size} bytes is not there as a whole")
        self._at += size
        if found.data_ptr() % dtype.itemsize or found.storage_offset() % dtype.itemsize:
            found = found.clone()
        return found.view(dtype)


def _description(node: Any) -> tuple[str, tuple[int, ...], BufferRange | None]:
    """Return the checked dtype name, shape and place of a tensor from a header."""
    # Checked by hand: this runs for every push and pull, and a schema takes ten times as long.
    if not isinstance(node, list | tuple) or len(node) != 3:
        raise EndpointFrameError("a tensor is described by its dtype, its shape and its place")
    name, shape, place = node
    if not isinstance(name, str) or name not in DTYPES:
        raise EndpointFrameError(f"there is no tensor of {str(name)[:40]}")
    if not isinstance(shape, list | tuple) or len(shape) > 8:
        raise EndpointFrameError("a tensor has up to eight dimensions")
    if not all(type(extent) is int and 0 <= extent <= _MOST_EXTENT for extent in shape):
        raise EndpointFrameError(f"there is no tensor of {name} {list(shape)}")
    if place is None:
        return name, tuple(shape), None
    if not isinstance(place, list | tuple) or len(place) != 2:
        raise EndpointFrameError("a place is the name of a process and an offset")
    owner, offset = place
    if not isinstance(owner, str) or type(offset) is not int:
        raise EndpointFrameError("a place is the name of a process and an offset")
    return name, tuple(shape), BufferRange(owner, offset)
