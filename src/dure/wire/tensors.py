"""Named tensors as a stream of bytes in the safetensors format, and back.

    8 bytes       N, the length of the header, little-endian
    N bytes       the header: JSON, {name: {"dtype", "shape", "data_offsets": [begin, end]}, ...}
    then          the elements of every tensor, one after another, without gaps

The library of that name writes into one piece of memory, and reads from one. A model that travels
is read and written here as it passes: `pieces` gives views of the tensors' own memory, and
`receive` fills tensors that were made before the first element arrived. So one copy of the model
exists on each side, however large it is.

Bytes come from anybody. The header is checked before there is memory for anything that it asks for:
its length, names, dtypes and shapes, that the tensors follow each other without gaps, and, where it
is known what has to come, that this is what comes.

Source: the format's page, https://github.com/huggingface/safetensors.
"""

from __future__ import annotations

import math
import struct
import sys
from collections.abc import Callable, Iterator, Mapping
from itertools import groupby
from typing import NamedTuple

import msgspec
import torch
from torch import Tensor

from dure.record.seal import sha256
from dure.record.weights import DTYPES, elements_of, header_of

MOST_HEADER = 16 << 20
"""Bytes that a header may have: some hundred thousand tensors."""

MOST_DIMENSIONS = 64
"""As many as torch has."""

_LENGTH = struct.Struct("<Q")

_DTYPES = {name: dtype for dtype, name in DTYPES.items()}

if sys.byteorder != "little":  # elements travel as they lie in memory
    raise ImportError("safetensors are little-endian, and this machine is not")


class TensorsError(ValueError):
    """The bytes are no tensors in this format, or not those that were to come."""


class Form(NamedTuple):
    """What a tensor is like."""

    dtype: torch.dtype
    shape: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize


class _Entry(msgspec.Struct, forbid_unknown_fields=True):
    dtype: str
    shape: list[int]
    data_offsets: tuple[int, int]


def forms_of(tensors: Mapping[str, Tensor]) -> dict[str, Form]:
    """What the tensors are like, by name."""
    return {name: Form(tensor.dtype, tuple(tensor.shape)) for name, tensor in tensors.items()}


def size_of(forms: Mapping[str, Form]) -> int:
    """Bytes of the whole stream."""
    return len(header_of(forms)) + sum(form.nbytes for form in forms.values())


def pieces(tensors: Mapping[str, Tensor]) -> Iterator[memoryview]:
    """The stream, as views of the tensors' own memory where that lies in one piece."""
    yield memoryview(header_of(forms_of(tensors)))
    for tensor in tensors.values():
        if tensor.numel():
            yield elements_of(tensor)


def bytes_of(tensor: Tensor) -> memoryview:
    """A view of the memory of a tensor of the CPU whose elements lie one after another."""
    return memoryview(tensor.reshape(-1).view(torch.uint8).numpy())  # type: ignore[arg-type]


def digest_of(tensors: Mapping[str, Tensor]) -> str:
    """SHA-256 of the stream, as hexadecimal digits: the name of a model that does not change."""
    return sha256(pieces(tensors))


Read = Callable[[memoryview], int]
"""Fills the front of the memory with what comes next; how many bytes that were, 0 at the end."""


def receive(read: Read, most: int, expected: Mapping[str, Form] | None = None) -> dict[str, Tensor]:
    """The tensors of a stream, which is read to its end.

    most: bytes that it may have. expected: what has to come, in this order; None takes anything.

    Raises TensorsError for a stream that is something else, ends early, or goes on.
    """
    forms = receive_header(read, most, expected)
    tensors = room_for(forms)
    for name, tensor in tensors.items():
        if tensor.numel():
            _fill(read, bytes_of(tensor), name)
        # Any other byte than 0 and 1 is a boolean that torch does not expect.
        if tensor.dtype == torch.bool and bool((tensor.view(torch.uint8) > 1).any()):
            raise TensorsError(f"{name} holds bytes that are no booleans")
    if read(memoryview(bytearray(1))):
        raise TensorsError("bytes follow that belong to no tensor")
    return tensors


def room_for(forms: Mapping[str, Form]) -> dict[str, Tensor]:
    """Tensors of these forms, not filled.

    Neighbours of one dtype lie one after another in one piece of memory, so that weights that were
    flat where they came from are flat here without being copied.
    """
    tensors: dict[str, Tensor] = {}
    for dtype, names in groupby(forms, key=lambda name: forms[name].dtype):
        group = list(names)
        counts = [math.prod(forms[name].shape) for name in group]
        pieces = torch.split(torch.empty(sum(counts), dtype=dtype), counts)
        for name, piece in zip(group, pieces, strict=True):
            tensors[name] = piece.view(forms[name].shape)
    return tensors


def receive_header(
    read: Read, most: int, expected: Mapping[str, Form] | None = None
) -> dict[str, Form]:
    """What is to come, by name. Raises TensorsError as `receive` does."""
    length = bytearray(_LENGTH.size)
    _fill(read, memoryview(length), "the header")
    (size,) = _LENGTH.unpack(length)
    if size > MOST_HEADER:
        raise TensorsError(f"the header has {size} bytes, and may have {MOST_HEADER}")
    text = bytearray(size)
    _fill(read, memoryview(text), "the header")
    forms = parse(text)
    total = _LENGTH.size + size + sum(form.nbytes for form in forms.values())
    if total > most:
        raise TensorsError(f"these are {total} bytes, and may be {most}")
    if expected is not None:
        check(forms, expected)
    return forms


def parse(text: bytes | bytearray) -> dict[str, Form]:
    """What the header says, checked against itself."""
    try:
        raw = msgspec.json.decode(text, type=dict[str, msgspec.Raw])
        # What a writer adds for people is left unread.
        raw.pop("__metadata__", None)
        entries = {name: msgspec.json.decode(each, type=_Entry) for name, each in raw.items()}
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise TensorsError(f"the header is no list of tensors: {error}") from error
    forms: dict[str, Form] = {}
    at = 0
    # Writers may list tensors in another order than that of their elements.
    for name, entry in sorted(entries.items(), key=lambda item: item[1].data_offsets):
        form = _form_of(name, entry)
        if entry.data_offsets != (at, at + form.nbytes):
            raise TensorsError(f"{name} lies at {entry.data_offsets}, not from byte {at} on")
        at += form.nbytes
        forms[name] = form
    return forms


def _form_of(name: str, entry: _Entry) -> Form:
    dtype = _DTYPES.get(entry.dtype)
    if dtype is None:
        raise TensorsError(f"{name} is of {entry.dtype[:20]!r}, which is no dtype")
    # Each extent alone below 64 bits: their product is then a number that Python forms at once.
    if len(entry.shape) > MOST_DIMENSIONS or any(not 0 <= each < 1 << 63 for each in entry.shape):
        raise TensorsError(f"{name} has a shape that no tensor has")
    return Form(dtype, tuple(entry.shape))


def check(forms: Mapping[str, Form], expected: Mapping[str, Form]) -> None:
    """Raises TensorsError with the first tensor that is not as expected."""
    for name, form in expected.items():
        if name not in forms:
            raise TensorsError(f"{name} is missing")
        if forms[name] != form:
            raise TensorsError(
                f"{name} is {forms[name].dtype} {list(forms[name].shape)}, not {form.dtype} "
                f"{list(form.shape)}"
            )
    extra = next((name for name in forms if name not in expected), None)
    if extra is not None:
        raise TensorsError(f"{extra} is no tensor of this model")


def _fill(read: Read, memory: memoryview, what: str) -> None:
    at = 0
    while at < len(memory):
        count = read(memory[at:])
        if count == 0:
            raise TensorsError(f"the stream ends within {what}")
        at += count
