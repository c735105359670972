"""A message as bytes, and back.

    bytes 0 to 3      "dure"
    4 to 7            the version of this format, little-endian as all numbers here
    8 to 15           H, the bytes of the header
    16 to 23          D, the bytes of the data
    from 24 on        the header: the message in MessagePack, with (dtype, shape) for each tensor
    then the data     the elements of the tensors, in the header's order; the data and each tensor
                      begin at the next multiple of 16

Bytes come from anybody. The first 24 say how long the message is, so that a receiver refuses one
that is too long before it has any memory for it (`length`). Every field is checked for its type,
every dtype is one of a list, and the elements of a tensor have to lie within the data. The tensor
is then a view of the bytes that are there already: nothing is copied, and nothing is executed.
"""

from __future__ import annotations

import math
import struct
import sys
from collections.abc import Sequence
from typing import Any

import msgspec
import torch
from torch import Tensor

from dure.protocol.messages import Message

VERSION = 1

HEAD = 24
"""Bytes that say how long the message is."""

_HEAD = struct.Struct("<4sIQQ")
_MAGIC = b"dure"

ALIGNED = 16
"""The bytes of the largest element, a complex number in double precision.

Memory that Python allocates begins at such a multiple too, so no element lies across one.
"""

_MOST_DIMENSIONS = 64
"""As many as torch has. The product of many more large numbers would take hours."""

_MOST_ELEMENTS = 1 << 48
"""More than any memory has. Shapes beyond it torch refuses in ways of its own, even empty ones."""

_MOST_TENSORS = 10_000
"""Far more than the buffers of any model. Each costs some memory and time, even an empty one."""

# A list of its own: a name in a message stands for one of these, or for nothing.
DTYPES = {
    str(dtype).removeprefix("torch."): dtype
    for dtype in (
        torch.float64,
        torch.float32,
        torch.float16,
        torch.bfloat16,
        torch.complex128,
        torch.complex64,
        torch.int64,
        torch.int32,
        torch.int16,
        torch.int8,
        torch.uint8,
        torch.bool,
    )
}
"""What may travel, by name."""

NAMES = {dtype: name for name, dtype in DTYPES.items()}
"""The inverse."""

if sys.byteorder != "little":  # elements travel as they lie in memory
    raise ImportError("dure's messages are little-endian, and this machine is not")


class MessageError(ValueError):
    """The bytes are no message, or none of this version."""


def to_bytes(message: Message) -> bytearray:
    """The message in memory of its own.

    Raises TypeError for a tensor of a dtype that no message can have, and ValueError for more
    tensors than a message can have.
    """
    # The encoder meets the tensors in the order of the fields, which is then that of the data.
    tensors: list[Tensor] = []

    def described(node: Any) -> Any:
        if not isinstance(node, Tensor):
            return list(node)  # a sequence of tensors that are formed when somebody looks at them
        if node.dtype not in NAMES:
            raise TypeError(f"a message cannot have tensors of {node.dtype}")
        tensors.append(node)
        if len(tensors) > _MOST_TENSORS:
            raise ValueError(f"a message cannot have more than {_MOST_TENSORS:,} tensors")
        return NAMES[node.dtype], tuple(node.shape)

    # Two passes: sizes first, so that the message is written once into memory of the right size.
    header = msgspec.msgpack.Encoder(enc_hook=described).encode(message)
    begin = aligned(HEAD + len(header))
    end = begin
    for tensor in tensors:
        end = aligned(end) + tensor.nbytes
    content = bytearray(end)
    _HEAD.pack_into(content, 0, _MAGIC, VERSION, len(header), end - begin)
    content[HEAD : HEAD + len(header)] = header
    at = begin
    for tensor in tensors:
        at = aligned(at)
        # Straight to its place, from whichever device; no tensor is copied twice.
        view_at(content, at, tensor.dtype, tensor.shape).copy_(tensor.detach())
        at += tensor.nbytes
    return content


def length(head: bytes | bytearray, most: int | None = None) -> int:
    """Bytes of the whole message that begins with `head`, its first `HEAD` bytes.

    Raises MessageError if they begin no message of this version, or one of more than `most` bytes.
    """
    return sum(_lengths(head, most))


def from_bytes(content: bytearray) -> Message:
    """The inverse of `to_bytes`. The message's tensors are views of `content`.

    Raises MessageError for bytes that are something else.
    """
    begin, size = _lengths(content)
    if len(content) != begin + size:
        raise MessageError(f"the message has {len(content)} bytes, and says {begin + size}")
    header = _HEAD.unpack_from(content)[2]
    at = begin
    count = 0

    def tensor(kind: type, node: Any) -> Tensor:
        """The next one. Raises MessageError if its elements do not lie within the data."""
        nonlocal at, count
        count += 1
        if count > _MOST_TENSORS:
            raise MessageError(f"the message has more than {_MOST_TENSORS:,} tensors")
        name, shape = msgspec.convert(node, tuple[str, tuple[int, ...]])
        dtype = DTYPES.get(name)
        if dtype is None or not may_be_shape(shape):
            raise MessageError(f"there is no tensor of {name} {list(shape[:_MOST_DIMENSIONS])}")
        # The decoder calls this in the order of the header, so a running position finds each
        # tensor.
        at = aligned(at)
        # Counted as Python counts, without an end: shapes may be chosen so that 64 bits overflow.
        end = at + math.prod(shape) * dtype.itemsize
        if end > len(content):
            raise MessageError(f"the tensor of {name} {list(shape)} is not there as a whole")
        view = view_at(content, at, dtype, shape)
        # To torch every other byte is neither true nor false.
        if dtype == torch.bool and view.numel() and int(view.view(torch.uint8).max()) > 1:
            raise MessageError("a truth value of the message is neither 0 nor 1")
        at = end
        return view

    try:
        decoder = msgspec.msgpack.Decoder(Message, dec_hook=tensor)
        message: Message = decoder.decode(memoryview(content)[HEAD : HEAD + header])
    except (msgspec.DecodeError, ValueError, RuntimeError) as error:
        # Names that are no text, nests without an end, shapes that torch cannot have.
        raise MessageError(f"it is no message: {error}") from error
    # Data that no tensor stands for are an error too: a message has one form.
    if at != len(content):
        raise MessageError(f"the message has {len(content) - at} bytes that belong to nothing")
    return message


def _lengths(head: bytes | bytearray, most: int | None = None) -> tuple[int, int]:
    """(where the data begin, bytes of the data)."""
    if len(head) < HEAD:
        raise MessageError(f"a message begins with {HEAD} bytes, and these are {len(head)}")
    magic, version, header, size = _HEAD.unpack_from(head)
    if magic != _MAGIC:
        raise MessageError("these bytes are no message of dure's")
    if version != VERSION:
        raise MessageError(f"the message is of version {version}, and this is version {VERSION}")
    # Python's integers do not overflow, whatever lengths a stranger writes into the head.
    begin = aligned(HEAD + header)
    if most is not None and begin + size > most:
        raise MessageError(f"the message has {begin + size} bytes, and may have {most}")
    return begin, size


def view_at(
    content: bytearray | memoryview,
    at: int,
    dtype: torch.dtype,
    shape: torch.Size | tuple[int, ...],
) -> Tensor:
    """The tensor whose elements lie there, which shares that memory and keeps it alive."""
    count = math.prod(shape)
    if not count:  # which has no place in memory
        return torch.empty(shape, dtype=dtype)
    return torch.frombuffer(content, dtype=dtype, count=count, offset=at).view(shape)


def may_be_shape(shape: Sequence[int]) -> bool:
    """Whether torch has tensors of this shape."""
    if len(shape) > _MOST_DIMENSIONS or any(extent < 0 for extent in shape):
        return False
    return math.prod(extent for extent in shape if extent) <= _MOST_ELEMENTS


def aligned(at: int) -> int:
    """The next place at which a tensor may begin."""
    return -(-at // ALIGNED) * ALIGNED
