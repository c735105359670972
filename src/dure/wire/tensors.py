"""Streams of named tensors in the safetensors format.

    8 bytes       N, the length of the header, little-endian
    N bytes       the header: JSON, {name: {"dtype", "shape", "data_offsets": [begin, end]}, ...}
    then          the elements of every tensor, contiguous, without gaps

The safetensors library writes a model into a single buffer, and reads it from a single buffer. This
module streams a model: `pieces` yields views of the tensors' own memory, and `receive` fills
tensors that are allocated before the first element arrives. Each side therefore has a single copy
of the model, whatever its size.

The bytes may come from an untrusted sender. The reader checks the header before it allocates
memory: its length, names, dtypes and shapes, the absence of gaps, and, if the receiver knows the
expected tensors, that the stream has exactly these tensors.

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
"""Maximum bytes of a header: some hundred thousand tensors."""

MOST_DIMENSIONS = 64
"""Maximum dimensions of a torch tensor."""

_LENGTH = struct.Struct("<Q")

_DTYPES = {name: dtype for dtype, name in DTYPES.items()}

if sys.byteorder != "little":  # elements are sent in the byte order of memory
    raise ImportError("safetensors are little-endian, but this machine is not")


class TensorsError(ValueError):
    """The bytes are not tensors in this format, or not the expected tensors."""


class TensorSpec(NamedTuple):
    """Dtype and shape of a tensor."""

    dtype: torch.dtype
    shape: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize


class _Entry(msgspec.Struct, forbid_unknown_fields=True):
    dtype: str
    shape: list[int]
    data_offsets: tuple[int, int]


def forms_of(tensors: Mapping[str, Tensor]) -> dict[str, TensorSpec]:
    """Return the dtype and shape of each tensor, by name."""
    return {name: TensorSpec(tensor.dtype, tuple(tensor.shape)) for name, tensor in tensors.items()}


def size_of(forms: Mapping[str, TensorSpec]) -> int:
    """Return the bytes of the whole stream, header included."""
    return len(header_of(forms)) + sum(form.nbytes for form in forms.values())


def pieces(tensors: Mapping[str, Tensor]) -> Iterator[memoryview]:
    """Yield the stream, as views of the tensors' own memory if they are contiguous."""
    yield memoryview(header_of(forms_of(tensors)))
    for tensor in tensors.values():
        if tensor.numel():
            yield elements_of(tensor)


def bytes_of(tensor: Tensor) -> memoryview:
    """Return a view of the memory of a contiguous tensor on the CPU."""
    return memoryview(tensor.reshape(-1).view(torch.uint8).numpy())  # type: ignore[arg-type]


def digest_of(tensors: Mapping[str, Tensor]) -> str:
    """Return the SHA-256 of the stream in hexadecimal: a name for an immutable model."""
    return sha256(pieces(tensors))


Read = Callable[[memoryview], int]
"""Function that fills the front of the memory with the next bytes, and returns their number.

The number is 0 at the end of the stream.
"""


def receive(
    read: Read, most: int, expected: Mapping[str, TensorSpec] | None = None
) -> dict[str, Tensor]:
    """Read a stream to its end and return its tensors.

    `most` is the maximum size in bytes of the stream. `expected` has the required tensors; None
    accepts any tensors. Raises TensorsError for an invalid or unexpected stream, and for a stream
    that is too short or too long.
    """
    forms = receive_header(read, most, expected)
    tensors = empty_tensors(forms)
    for name, tensor in tensors.items():
        if tensor.numel():
            _fill(read, bytes_of(tensor), name)
        # torch does not expect bool bytes other than 0 and 1.
        if tensor.dtype == torch.bool and bool((tensor.view(torch.uint8) > 1).any()):
            raise TensorsError(f"{name} contains bytes that are not booleans")
    if read(memoryview(bytearray(1))):
        raise TensorsError("surplus bytes follow the last tensor")
    return tensors


def empty_tensors(forms: Mapping[str, TensorSpec]) -> dict[str, Tensor]:
    """Allocate tensors of these forms, without values.

    Neighbours of the same dtype are contiguous in a buffer, so that weights that were flat at the
    sender are flat at the receiver without a copy.
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
    read: Read, most: int, expected: Mapping[str, TensorSpec] | None = None
) -> dict[str, TensorSpec]:
    """Read the header and return the dtype and shape of each tensor, by name.

    Raises TensorsError as `receive` does.
    """
    length = bytearray(_LENGTH.size)
    _fill(read, memoryview(length), "the header")
    (size,) = _LENGTH.unpack(length)
    if size > MOST_HEADER:
        raise TensorsError(f"the header has {size} bytes, but may have at most {MOST_HEADER}")
    text = bytearray(size)
    _fill(read, memoryview(text), "the header")
    forms = parse(text)
    total = _LENGTH.size + size + sum(form.nbytes for form in forms.values())
    if total > most:
        raise TensorsError(f"the tensors have {total} bytes, but may have at most {most}")
    if expected is not None:
        check(forms, expected)
    return forms


def parse(text: bytes | bytearray) -> dict[str, TensorSpec]:
    """Parse a header and check its consistency. Raises TensorsError."""
    try:
        raw = msgspec.json.decode(text, type=dict[str, msgspec.Raw])
        # Free-form metadata for people is ignored.
        raw.pop("__metadata__", None)
        entries = {name: msgspec.json.decode(each, type=_Entry) for name, each in raw.items()}
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise TensorsError(f"the header is not a list of tensors: {error}") from error
    forms: dict[str, TensorSpec] = {}
    at = 0
    # A writer may list tensors in another order than that of their elements.
    for name, entry in sorted(entries.items(), key=lambda item: item[1].data_offsets):
        form = _form_of(name, entry)
        if entry.data_offsets != (at, at + form.nbytes):
            raise TensorsError(f"{name} lies at {entry.data_offsets}, not from byte {at} on")
        at += form.nbytes
        forms[name] = form
    return forms


def _form_of(name: str, entry: _Entry) -> TensorSpec:
    dtype = _DTYPES.get(entry.dtype)
    if dtype is None:
        raise TensorsError(f"{name} is of {entry.dtype[:20]!r}, which is not a dtype")
    # Each extent below 64 bits: Python computes the product of the few extents at once.
    if len(entry.shape) > MOST_DIMENSIONS or any(not 0 <= each < 1 << 63 for each in entry.shape):
        raise TensorsError(f"{name} has an invalid shape")
    return TensorSpec(dtype, tuple(entry.shape))


def check(forms: Mapping[str, TensorSpec], expected: Mapping[str, TensorSpec]) -> None:
    """Compare the tensors with the expected tensors.

    Raises TensorsError for the first difference.
    """
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
        raise TensorsError(f"{extra} is not a tensor of this model")


def _fill(read: Read, memory: memoryview, what: str) -> None:
    at = 0
    while at < len(memory):
        count = read(memory[at:])
        if count == 0:
            raise TensorsError(f"the stream ends within {what}")
        at += count
