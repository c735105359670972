"""A message of split learning as a frame: a small header, then the bytes of its tensors.

    bytes 0 to 3     the version of this format, little-endian as all numbers here
    4 to 7           H, the bytes of the header
    from 8 on        the header: the message in MessagePack, which begins with the name of its type
    then             the elements of the tensors, in the header's order; each begins at the next
                     multiple of 16, and the frame ends with the last one

A tensor is an extension of MessagePack in the header: one byte for its dtype, as it stands in
`KINDS`, and eight for each extent of its shape. How long a frame is, the transport says.

Nothing is copied on the way out: `encode` gives the memory of the tensors themselves. On the way in
the tensors are views of the memory that came, if it may be written to and is aligned; otherwise the
frame is copied once, as a whole.

Bytes come from anybody. Type, fields, dtypes, shapes and lengths are checked, and how many tensors
there are; nothing is executed, and nothing is allocated for what a header merely claims.
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

from dure.protocol.encoding import ALIGNED, aligned, may_be_shape, view_at
from dure.record.weights import DTYPES, elements_of
from dure.split import alignment
from dure.split.messages import Message, Own, Smashed
from dure.split.network.control import Control
from dure.split.network.parties_control import PartiesControl
from dure.split.optimizer_settings import is_portable
from dure.split.parties import messages as parties

VERSION = 1
Frame = Message | Control | parties.Message | alignment.Message | PartiesControl

KINDS = (*DTYPES, torch.complex128)
"""What may travel. A dtype's place is its number in a frame, so new ones come last."""

MOST_HEADER = 1 << 22
"""Bytes that a header may have: that of a head of some ten thousand weights under Adam."""

MOST_TENSORS = 1 << 16
"""As many as fit into such a header. Each costs some memory and time, even an empty one."""

_HEAD = struct.Struct("<II")
_TENSOR = 1
"""The number of MessagePack's extension."""
_MOST_DIMENSIONS = 64
"""As many as torch has."""
_NUMBERS = {dtype: number for number, dtype in enumerate(KINDS)}

Buffer = bytes | bytearray | memoryview


class FrameError(ValueError):
    """The bytes are no message of split learning, or the message has what cannot travel."""


def encode(message: Frame) -> list[Buffer]:
    """The frame in pieces, to be sent one after another: `sum(map(len, pieces))` bytes.

    They are views of the tensors' memory where that lies on the CPU in one piece: a tensor may not
    change before its piece has left. Raises FrameError for a message that cannot travel.
    """
    tensors: list[Tensor] = []

    def described(node: Any) -> msgspec.msgpack.Ext:
        if not isinstance(node, Tensor):
            raise FrameError(f"a message cannot have a {type(node).__name__}")
        tensors.append(node)
        return msgspec.msgpack.Ext(_TENSOR, _form(node))

    _check_leaves(message)
    try:
        header = msgspec.msgpack.Encoder(enc_hook=described).encode(message)
    except OverflowError as error:
        raise FrameError(f"a message cannot have a number beyond 64 bits: {error}") from error
    if len(header) > MOST_HEADER or len(tensors) > MOST_TENSORS:
        raise FrameError(
            f"a message may have {MOST_TENSORS:,} tensors and a header of {MOST_HEADER:,} bytes, "
            f"and this one has {len(tensors):,} and {len(header):,}"
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
    """The message of a frame.

    most: bytes that the frame may have; None: as many as it has. Raises FrameError for bytes that
    are something else.
    """
    size = len(memoryview(content))
    if most is not None and size > most:
        raise FrameError(f"the frame has {size:,} bytes, and may have {most:,}")
    if size < _HEAD.size:
        raise FrameError(f"a frame begins with {_HEAD.size} bytes, and these are {size}")
    version, header = _HEAD.unpack_from(content)
    if version != VERSION:
        raise FrameError(f"the frame is of version {version}, and this is version {VERSION}")
    if header > MOST_HEADER or _HEAD.size + header > size:
        raise FrameError(f"a header of {header:,} bytes is too long for a frame of {size:,}")
    return _OWN.reader.message(_writable(content), _HEAD.size + header)


class _Reader:
    """Reads one frame after another: to make a decoder takes longer than most frames.

    at: where the header of a frame ends, and later the tensor before.
    """

    def __init__(self) -> None:
        self.decoder: msgspec.msgpack.Decoder[Frame] = msgspec.msgpack.Decoder(
            Frame, ext_hook=self._tensor
        )
        self.content: bytearray | memoryview = bytearray()
        self.at = 0
        self.count = 0

    def message(self, content: bytearray | memoryview, at: int) -> Frame:
        """The message of a frame, whose header ends there."""
        self.content = content
        self.at = at
        self.count = 0
        try:
            message = self.decoder.decode(memoryview(content)[_HEAD.size : at])
            _check_leaves(message)
        except FrameError:
            raise
        except (msgspec.MsgspecError, ValueError, RuntimeError, OverflowError) as error:
            # Names that are no text, nests without an end, shapes that torch cannot have.
            raise FrameError(f"the frame holds no message: {error}") from error
        finally:
            # The frame lives as long as its tensors do, and no longer.
            self.content = bytearray()
        if self.at != len(content):
            raise FrameError(
                f"the frame has {len(content) - self.at:,} bytes that belong to nothing"
            )
        return message

    def _tensor(self, code: int, form: memoryview) -> Tensor:
        """The next one. It is called in the order of the header, so a running position finds it."""
        self.count += 1
        if code != _TENSOR or self.count > MOST_TENSORS:
            raise FrameError(f"the frame has more than {MOST_TENSORS:,} tensors, or is none")
        dtype, shape = _read(form)
        nbytes = math.prod(shape) * dtype.itemsize
        begin = aligned(self.at) if nbytes else self.at
        if begin + nbytes > len(self.content):
            raise FrameError(f"the tensor of {dtype} {list(shape)} is not there as a whole")
        tensor = view_at(self.content, begin, dtype, shape)
        # To torch every other byte is neither true nor false.
        if dtype == torch.bool and nbytes and int(tensor.view(torch.uint8).max()) > 1:
            raise FrameError("a truth value of the message is neither 0 nor 1")
        self.at = begin + nbytes
        return tensor


class _Own(threading.local):
    """A thread's own reader."""

    def __init__(self) -> None:
        self.reader = _Reader()


_OWN = _Own()


def _form(tensor: Tensor) -> bytes:
    number = _NUMBERS.get(tensor.dtype)
    if number is None or tensor.layout != torch.strided:
        raise FrameError(f"a message cannot have tensors of {tensor.dtype}, {tensor.layout}")
    return struct.pack(f"<B{tensor.ndim}Q", number, *tensor.shape)


def _read(form: memoryview) -> tuple[torch.dtype, tuple[int, ...]]:
    """The inverse of `_form`."""
    dimensions, rest = divmod(len(form) - 1, 8)
    if not rest and 0 <= dimensions <= _MOST_DIMENSIONS:
        number, *shape = struct.unpack(f"<B{dimensions}Q", form)
        if number < len(KINDS) and may_be_shape(shape):
            return KINDS[number], tuple(shape)
    raise FrameError(f"{bytes(form[:17]).hex()} stands for no dtype and shape of a tensor")


def _writable(content: Buffer) -> bytearray | memoryview:
    """The same bytes where they may be written to, and lie at a multiple of 16."""
    flat = memoryview(content).cast("B")
    if flat.readonly or torch.frombuffer(flat, dtype=torch.uint8).data_ptr() % ALIGNED:
        return bytearray(flat)
    return flat


def _check_leaves(message: Frame) -> None:
    """Raises FrameError where the fields of no fixed type hold more than tensors and numbers."""
    if isinstance(message, Smashed) and message.targets is not None:
        if not isinstance(message.targets, list):
            raise FrameError("the targets of a batch are a list of leaves")
        for leaf in message.targets:
            _check_leaf(leaf, "the targets of a batch")
    own = getattr(message, "head", None)
    if not isinstance(own, Own):
        return
    for state in own.optimizer:
        for key, kept in _named(state):
            _check_leaf(kept, f"what an optimizer remembers as {key[:40]}")
    for values in (*(own.groups or ()), own.shared):
        for key, kept in _named(values):
            if not is_portable(kept):
                raise FrameError(
                    f"the setting {key[:40]} of an optimizer can travel as tensors, numbers and "
                    f"text, in lists and dicts with names, and not as a {type(kept).__name__}"
                )


def _named(values: Mapping[Any, Any]) -> Iterator[tuple[str, Any]]:
    for key, kept in values.items():
        if not isinstance(key, str):
            raise FrameError(f"what an optimizer remembers has names, and {key!r} is none")
        yield key, kept


def _check_leaf(leaf: Any, what: str) -> None:
    if leaf is not None and not isinstance(leaf, Tensor | bool | int | float | str):
        raise FrameError(
            f"{what} can travel as tensors, numbers and text, and not as a {type(leaf).__name__}"
        )
