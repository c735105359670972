"""A message as a frame: a header, and the tensors next to it or in memory that both see.

    bytes 0 to 3     H, the bytes of the header, little-endian
    4 to 11          D, the bytes of the data
    then the header  the message in MessagePack, with (dtype, shape, place) for each tensor
    then the data    the tensors that have no place elsewhere, in the header's order

A tensor's place is None where it lies in the data, or the name of a process and an offset in the
memory that it shares (`memory`). What comes is checked: every dtype is one of a list, sizes are
non-negative, what has a place lies within the memory that its owner has shown, and the data have as
many bytes as the tensors in them. Nothing is unpickled, and nothing is allocated for a frame that
is longer than any that is expected.

The elements of shared memory are whatever its owner writes there. Processes of one job trust each
other with that, and with nothing else: a wrong length or place is refused.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Callable
from typing import Any, NamedTuple

import msgspec
import torch
from torch import Tensor

from dure.parameter_server.processes.said import Said

HEAD = struct.Struct("<IQ")
MOST_HEADER = 1 << 24
"""Bytes of the longest header: a layout, or the clock of a shard, with room."""

_DTYPES = {
    str(dtype).removeprefix("torch."): dtype
    for dtype in (
        torch.float64,
        torch.float32,
        torch.float16,
        torch.bfloat16,
        torch.int64,
        torch.int32,
        torch.int16,
        torch.int8,
        torch.uint8,
        torch.bool,
    )
}
_NAMES = {dtype: name for name, dtype in _DTYPES.items()}


class FrameError(ValueError):
    """The bytes are no frame of this job."""


class Place(NamedTuple):
    """Where a tensor lies: in the memory of this process, from this byte on."""

    owner: str
    offset: int


class Frame(NamedTuple):
    """What is sent. data: in pieces, of which nothing is copied."""

    head: bytes
    data: list[memoryview]

    @property
    def nbytes(self) -> int:
        """Of the data."""
        return sum(len(piece) for piece in self.data)


def encode(message: Said, place_of: Callable[[Tensor], Place | None]) -> Frame:
    """A frame of a message. place_of: where the receiver sees a tensor, if it does.

    Raises TypeError for a tensor of a dtype that no frame can have.
    """
    pieces: list[memoryview] = []

    def described(node: Any) -> Any:
        if not isinstance(node, Tensor):
            raise TypeError(f"a frame cannot have a {type(node).__name__}")
        if node.dtype not in _NAMES:
            raise TypeError(f"a frame cannot have tensors of {node.dtype}")
        place = place_of(node) if node.numel() else None
        if place is None and node.numel():
            flat: Any = node.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy()
            pieces.append(memoryview(flat))
        return _NAMES[node.dtype], tuple(node.shape), place

    header = msgspec.msgpack.Encoder(enc_hook=described).encode(message)
    size = sum(len(piece) for piece in pieces)
    return Frame(HEAD.pack(len(header), size) + header, pieces)


def decode(
    header: bytes | memoryview, data: Tensor, look: Callable[[Place, int], Tensor | None]
) -> Said:
    """The message of a header and its data, which its tensors are views of.

    look: the bytes at a place, so many; None where there is no such place. Raises FrameError for
    what is no message.
    """
    at = 0

    def tensor(kind: type, node: Any) -> Tensor:
        nonlocal at
        name, shape, place = msgspec.convert(
            node, tuple[str, tuple[int, ...], tuple[str, int] | None]
        )
        dtype = _DTYPES.get(name)
        if dtype is None or any(extent < 0 for extent in shape) or len(shape) > 8:
            raise FrameError(f"there is no tensor of {name} {list(shape[:8])}")
        size = math.prod(shape) * dtype.itemsize
        if size == 0:
            return torch.empty(shape, dtype=dtype)
        if place is not None:
            found = look(Place(*place), size)
            if found is None:
                raise FrameError(f"there are no {size} bytes at {place[1]} of {place[0]}")
        else:
            found = data[at : at + size]
            at += size
            if len(found) != size:
                raise FrameError(f"the tensor of {name} {list(shape)} is not there as a whole")
            if (found.storage_offset() + found.untyped_storage().data_ptr()) % dtype.itemsize:
                found = found.clone()
        return found.view(dtype).view(shape)

    try:
        message: Said = _decoder(tensor).decode(header)
    except (msgspec.DecodeError, ValueError, RuntimeError) as error:
        raise FrameError(f"it is no message: {error}") from error
    if at != len(data):
        raise FrameError(f"the frame has {len(data) - at} bytes that belong to nothing")
    return message


def _decoder(hook: Callable[[type, Any], Tensor]) -> msgspec.msgpack.Decoder[Said]:
    return msgspec.msgpack.Decoder(Said, dec_hook=hook)
