"""A message of split learning as a frame: a small header, then the bytes of its tensors.

    bytes 0 to 3     the version of this format, little-endian as all numbers here
    4 to 7           H, the bytes of the header
    from 8 on        the header: the message in MessagePack, which begins with the name of its type
    then             the elements of the tensors, in the header's order; each begins at the next
                     multiple of 16, and the frame ends with the last tensor

A tensor is an extension of MessagePack in the header: one byte for its dtype, the index in `KINDS`,
and eight for each extent of its shape. The transport states the length of a frame.

Nothing is copied on the way out: `encode` gives the memory of the tensors themselves. On the way in
the tensors are views of the received memory, if that is writable and aligned; otherwise the frame
is copied once, as a whole.

The bytes are untrusted. Type, fields, dtypes, shapes and lengths are checked, and the number of
tensors; nothing is executed, and no memory is allocated for the claims of a header.
"""

from __future__ import annotations

import math
import struct
import threading
from collections.abc import Iterator, Mapping
from typing import Any

import msgspec
import torch
from torch import Tensor

from dure.machine.devices import is_cpu, to_device
from dure.protocol.encoding import ALIGNED, aligned, may_be_shape, view_at
from dure.record.weights import DTYPES, elements_of
from dure.split import alignment
from dure.split.messages import HeadGradients, Message, SideState, Smashed
from dure.split.network.control import Control, PartiesControl
from dure.split.optimizer_settings import is_portable
from dure.split.parties import messages as parties

VERSION = 1
Frame = Message | Control | parties.Message | alignment.Message | PartiesControl

KINDS = (*DTYPES, torch.complex128)
"""Dtypes that a frame may contain. The index is the number in a frame: append new dtypes."""

MOST_HEADER = 1 << 22
"""Maximum bytes of a header: enough for a head of some ten thousand weights under Adam."""

MOST_TENSORS = 1 << 16
"""Maximum number of tensors, as such a header allows; even an empty tensor costs memory and time.
"""

_HEAD = struct.Struct("<II")
_TENSOR = 1
"""Number of MessagePack's extension type."""
_MOST_DIMENSIONS = 64
"""Maximum number of dimensions, as in torch."""
_NUMBERS = {dtype: number for number, dtype in enumerate(KINDS)}

Buffer = bytes | bytearray | memoryview


class SplitFrameError(ValueError):
    """The bytes are not a message of split learning, or a message cannot be encoded."""


def encode(message: Frame) -> list[Buffer]:
    """Return the frame in pieces, to be sent in order: `sum(map(len, pieces))` bytes.

    The pieces are views of the tensors' memory for contiguous CPU tensors: such a tensor must not
    change before its piece is sent. Raises FrameError for a message that cannot be encoded.
    """
    tensors: list[Tensor] = []

    def described(node: Any) -> msgspec.msgpack.Ext:
        if not isinstance(node, Tensor):
            raise SplitFrameError(f"a message cannot have a {type(node).__name__}")
        tensors.append(node)
        return msgspec.msgpack.Ext(_TENSOR, _form(node))

    _check_leaves(message)
    try:
        header = msgspec.msgpack.Encoder(enc_hook=described).encode(message)
    except OverflowError as error:
        raise SplitFrameError(f"a message cannot have a number beyond 64 bits: {error}") from error
    if len(header) > MOST_HEADER or len(tensors) > MOST_TENSORS:
        raise SplitFrameError(
            f"a message may have {MOST_TENSORS:,} tensors and a header of {MOST_HEADER:,} bytes, "
            f"but this one has {len(tensors):,} and {len(header):,}"
        )
    pieces: list[Buffer] = [_HEAD.pack(VERSION, len(header)) + header]
    at = len(pieces[0])
    for tensor in tensors:
        if not tensor.numel():
            continue
        gap = aligned(at) - at
        if gap:
            pieces.append(bytes(gap))
        pieces.append(elements_of(tensor))
        at += gap + tensor.nbytes
    return pieces


def decode(content: Buffer, most: int | None = None) -> Frame:
    """Return the message of a frame.

    most: maximum bytes of the frame; None for no limit. Raises FrameError for invalid bytes.
    """
    size = len(memoryview(content))
    if most is not None and size > most:
        raise SplitFrameError(f"the frame has {size:,} bytes, but may have at most {most:,}")
    if size < _HEAD.size:
        raise SplitFrameError(f"a frame starts with {_HEAD.size} bytes, but there are only {size}")
    version, header = _HEAD.unpack_from(content)
    if version != VERSION:
        raise SplitFrameError(
            f"the frame has version {version}, but this dure uses version {VERSION}"
        )
    if header > MOST_HEADER or _HEAD.size + header > size:
        raise SplitFrameError(f"a header of {header:,} bytes is too long for a frame of {size:,}")
    return _OWN.reader.message(_writable(content), _HEAD.size + header)


def values_on(message: Any, device: torch.device) -> Any:
    """Return a message with the values at the cut, their gradients and targets on a device.

    Heads, and gradients of heads that are to be added up, stay in the CPU's memory, and so do
    sealed heads and the points of an alignment. `encode` takes tensors of any device.
    """
    if is_cpu(device) or isinstance(message, HeadGradients):
        return message
    moved = {
        name: to_device(getattr(message, name), device)
        for name in ("values", "targets")
        if getattr(message, name, None) is not None
    }
    return msgspec.structs.replace(message, **moved) if moved else message


class _Reader:
    """Decoder of frames, reused because making a decoder takes longer than most frames.

    at: end of the header, then of the tensor before.
    """

    def __init__(self) -> None:
        self.decoder: msgspec.msgpack.Decoder[Frame] = msgspec.msgpack.Decoder(
            Frame, ext_hook=self._tensor
        )
        self.content: bytearray | memoryview = bytearray()
        self.at = 0
        self.count = 0

    def message(self, content: bytearray | memoryview, at: int) -> Frame:
        """Return the message of a frame whose header ends at `at`."""
        self.content = content
        self.at = at
        self.count = 0
        try:
            message = self.decoder.decode(memoryview(content)[_HEAD.size : at])
            _check_leaves(message)
        except SplitFrameError:
            raise
        except (msgspec.MsgspecError, ValueError, RuntimeError, OverflowError) as error:
            # Invalid UTF-8 in names, too deep nests, shapes beyond the limits of torch.
            raise SplitFrameError(f"the frame does not contain a message: {error}") from error
        finally:
            # Drop the reference, so that the frame's memory is freed with its last tensor.
            self.content = bytearray()
        if self.at != len(content):
            raise SplitFrameError(f"the frame has {len(content) - self.at:,} surplus bytes")
        return message

    def _tensor(self, code: int, form: memoryview) -> Tensor:
        """Return the next tensor; the order of calls is that of the header."""
        self.count += 1
        if code != _TENSOR or self.count > MOST_TENSORS:
            raise SplitFrameError(
                f"the frame has more than {MOST_TENSORS:,} tensors, or is invalid"
            )
        dtype, shape = _read(form)
        nbytes = math.prod(shape) * dtype.itemsize
        begin = aligned(self.at) if nbytes else self.at
        if begin + nbytes > len(self.content):
            raise SplitFrameError(f"the tensor of {dtype} {list(shape)} is incomplete")
        tensor = view_at(self.content, begin, dtype, shape)
        # torch's behaviour is undefined for bool bytes other than 0 and 1.
        if dtype == torch.bool and nbytes and int(tensor.view(torch.uint8).max()) > 1:
            raise SplitFrameError("a boolean of the message is neither 0 nor 1")
        self.at = begin + nbytes
        return tensor


class _Own(threading.local):
    """The reader of a thread."""

    def __init__(self) -> None:
        self.reader = _Reader()


_OWN = _Own()


def _form(tensor: Tensor) -> bytes:
    number = _NUMBERS.get(tensor.dtype)
    if number is None or tensor.layout != torch.strided:
        raise SplitFrameError(f"a message cannot have tensors of {tensor.dtype}, {tensor.layout}")
    return struct.pack(f"<B{tensor.ndim}Q", number, *tensor.shape)


def _read(form: memoryview) -> tuple[torch.dtype, tuple[int, ...]]:
    """Return dtype and shape; the inverse of `_form`."""
    dimensions, rest = divmod(len(form) - 1, 8)
    if not rest and 0 <= dimensions <= _MOST_DIMENSIONS:
        number, *shape = struct.unpack(f"<B{dimensions}Q", form)
        if number < len(KINDS) and may_be_shape(shape):
            return KINDS[number], tuple(shape)
    raise SplitFrameError(f"{bytes(form[:17]).hex()} does not encode a dtype and shape of a tensor")


def _writable(content: Buffer) -> bytearray | memoryview:
    """Return the bytes as writable memory aligned to 16 bytes; a copy only if necessary."""
    flat = memoryview(content).cast("B")
    # torch.frombuffer warns about read-only memory; aligned memory suits every dtype.
    if flat.readonly or torch.frombuffer(flat, dtype=torch.uint8).data_ptr() % ALIGNED:
        return bytearray(flat)
    return flat


def _check_leaves(message: Frame) -> None:
    """Raise FrameError for untyped fields with anything but tensors, numbers and text."""
    if isinstance(message, Smashed) and message.targets is not None:
        if not isinstance(message.targets, list):
            raise SplitFrameError("the targets of a batch are a list of leaves")
        for leaf in message.targets:
            _check_leaf(leaf, "the targets of a batch")
    own = getattr(message, "head", None)
    if not isinstance(own, SideState):
        return
    for state in own.optimizer:
        for key, kept in _named(state):
            _check_leaf(kept, f"what an optimizer remembers as {key[:40]}")
    for values in (*(own.groups or ()), own.shared):
        for key, kept in _named(values):
            if not is_portable(kept):
                raise SplitFrameError(
                    f"the setting {key[:40]} of an optimizer can be sent as tensors, numbers and "
                    f"text, in lists and dicts with names, but not as a {type(kept).__name__}"
                )


def _named(values: Mapping[Any, Any]) -> Iterator[tuple[str, Any]]:
    for key, kept in values.items():
        if not isinstance(key, str):
            raise SplitFrameError(
                f"an optimizer's state needs names as keys, but {key!r} is not a name"
            )
        yield key, kept


def _check_leaf(leaf: Any, what: str) -> None:
    if leaf is not None and not isinstance(leaf, Tensor | bool | int | float | str):
        raise SplitFrameError(
            f"{what} can be sent as tensors, numbers and text, but not as a {type(leaf).__name__}"
        )
