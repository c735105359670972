"""Encoding of a message as bytes.

    bytes 0 to 3      "dure"
    4 to 7            the version of this format, little-endian as all numbers here
    8 to 15           H, the bytes of the header
    16 to 23          D, the bytes of the data
    from 24 on        the header: the message in MessagePack, with (dtype, shape) for each tensor
    then the data     the elements of the tensors, in the header's order; the data and each tensor
                      begin at the next multiple of 16

The bytes may come from an untrusted sender. The first 24 bytes give the length of the message, so
that a receiver refuses a message that is too long before it allocates memory (`length`). The
decoder checks the type of every field, takes only dtypes of a fixed list, and requires the elements
of every tensor to be inside the data. A decoded tensor is a view of the received bytes: decoding
copies no elements and executes no code.
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
"""Bytes of the fixed part at the start, which gives the length of the message."""

_HEAD = struct.Struct("<4sIQQ")
_MAGIC = b"dure"

ALIGNED = 16
"""Alignment in bytes: the size of the largest element, a complex number in double precision.

Memory that Python allocates starts at a multiple of this number, so every element is aligned.
"""

_MOST_DIMENSIONS = 64
"""Maximum dimensions of a torch tensor. A product of many more large numbers would take hours."""

_MOST_ELEMENTS = 1 << 48
"""More elements than any memory has. For larger shapes torch raises other errors, even if empty."""

_MOST_TENSORS = 10_000
"""Far more tensors than a model has buffers. Each tensor costs memory and time, even if empty."""

# A fixed list: a dtype's name in a message is looked up here and never evaluated.
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
"""Dtypes that a message may have, by name."""

NAMES = {dtype: name for name, dtype in DTYPES.items()}
"""Names of the dtypes in `DTYPES`."""

if sys.byteorder != "little":  # elements are sent in the byte order of memory
    raise ImportError("dure's messages are little-endian, but this machine is not")


class MessageError(ValueError):
    """The bytes are not a message of this version."""


def to_bytes(message: Message) -> bytearray:
    """Return the message as bytes in newly allocated memory.

    Raises TypeError for a tensor of a dtype outside `DTYPES`, and ValueError for more than 10,000
    tensors.
    """
    # The encoder visits the tensors in the order of the fields, which is the order of the data.
    tensors: list[Tensor] = []

    def described(node: Any) -> Any:
        if not isinstance(node, Tensor):
            return list(node)  # a sequence that creates its tensors lazily
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
        # Copied from any device directly to its position; no tensor is copied twice.
        view_at(content, at, tensor.dtype, tensor.shape).copy_(tensor.detach())
        at += tensor.nbytes
    return content


def length(head: bytes | bytearray, most: int | None = None) -> int:
    """Return the bytes of the whole message that begins with `head`, its first `HEAD` bytes.

    Raises MessageError if `head` does not begin a message of this version, or the message has more
    than `most` bytes.
    """
    return sum(_lengths(head, most))


def from_bytes(content: bytearray) -> Message:
    """Decode a message that `to_bytes` has encoded. Its tensors are views of `content`.

    Raises MessageError for any other bytes.
    """
    begin, size = _lengths(content)
    if len(content) != begin + size:
        raise MessageError(
            f"the message has {len(content)} bytes, but its header states {begin + size}"
        )
    header = _HEAD.unpack_from(content)[2]
    at = begin
    count = 0

    def tensor(kind: type, node: Any) -> Tensor:
        """Return the next tensor. Raises MessageError if its elements are not inside the data."""
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
        # Python integers do not overflow; a malicious shape could overflow 64-bit arithmetic.
        end = at + math.prod(shape) * dtype.itemsize
        if end > len(content):
            raise MessageError(f"the tensor of {name} {list(shape)} is incomplete")
        view = view_at(content, at, dtype, shape)
        # torch treats a bool byte other than 0 and 1 as neither true nor false.
        if dtype == torch.bool and view.numel() and int(view.view(torch.uint8).max()) > 1:
            raise MessageError("a boolean of the message is neither 0 nor 1")
        at = end
        return view

    try:
        decoder = msgspec.msgpack.Decoder(Message, dec_hook=tensor)
        message: Message = decoder.decode(memoryview(content)[HEAD : HEAD + header])
    except (msgspec.DecodeError, ValueError, RuntimeError) as error:
        # Invalid text, endless nesting, shapes that torch cannot have.
        raise MessageError(f"it is not a message: {error}") from error
    # Trailing data are an error: a message has exactly one encoding.
    if at != len(content):
        raise MessageError(f"the message has {len(content) - at} surplus bytes")
    return message


def _lengths(head: bytes | bytearray, most: int | None = None) -> tuple[int, int]:
    """Return (offset of the data, bytes of the data)."""
    if len(head) < HEAD:
        raise MessageError(f"a message starts with {HEAD} bytes, but there are only {len(head)}")
    magic, version, header, size = _HEAD.unpack_from(head)
    if magic != _MAGIC:
        raise MessageError("these bytes are not a message of dure")
    if version != VERSION:
        raise MessageError(
            f"the message has version {version}, but this dure uses version {VERSION}"
        )
    # Python integers do not overflow, whatever lengths an untrusted sender writes into the head.
    begin = aligned(HEAD + header)
    if most is not None and begin + size > most:
        raise MessageError(f"the message has {begin + size} bytes, but may have at most {most}")
    return begin, size


def view_at(
    content: bytearray | memoryview,
    at: int,
    dtype: torch.dtype,
    shape: torch.Size | tuple[int, ...],
) -> Tensor:
    """Return the tensor whose elements begin at `at`; it shares the memory and keeps it alive."""
    count = math.prod(shape)
    if not count:  # a tensor without elements has no position in memory
        return torch.empty(shape, dtype=dtype)
    return torch.frombuffer(content, dtype=dtype, count=count, offset=at).view(shape)


def may_be_shape(shape: Sequence[int]) -> bool:
    """Return whether torch supports tensors of this shape."""
    if len(shape) > _MOST_DIMENSIONS or any(extent < 0 for extent in shape):
        return False
    return math.prod(extent for extent in shape if extent) <= _MOST_ELEMENTS


def aligned(at: int) -> int:
    """Return the next multiple of `ALIGNED`, at which a tensor may begin."""
    return -(-at // ALIGNED) * ALIGNED
