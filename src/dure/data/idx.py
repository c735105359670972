"""Reader of IDX files, the format of MNIST and its successors.

An IDX file is a single array. All numbers in it are big-endian:

    bytes 0-1   zero
    byte 2      type of the elements: 08 uint8, 09 int8, 0B int16, 0C int32, 0D float32, 0E float64
    byte 3      d, the number of dimensions
    then        d lengths, uint32 each
    then        the elements, row-major, nothing after them

So the magic number of a file of images is 0x00000803 and of a file of labels 0x00000801. The
publishers compress the files with gzip; compression is detected by the first bytes, not by the
name. A few megabytes of gzip can hold gigabytes: no more of a file is unpacked than its header
declares, and nothing if that exceeds the possible content of the file, or the memory.

Source: Y. LeCun, C. Cortes, C. Burges, "The MNIST database of handwritten digits",
http://yann.lecun.com/exdb/mnist/, section "File formats".
"""

from __future__ import annotations

import gzip
import math
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO

import numpy as np
import torch
from torch import Tensor

from dure.errors import DataError
from dure.machine.memory import available_memory

_TYPES = {0x08: ">u1", 0x09: ">i1", 0x0B: ">i2", 0x0C: ">i4", 0x0D: ">f4", 0x0E: ">f8"}
_GZIP_MAGIC = b"\x1f\x8b"
_TRY_AGAIN = "download the file again"
Content = BinaryIO | gzip.GzipFile
"""Source of a file's bytes."""

_PIECE = 1 << 20
"""Bytes that are read at once, since a header may declare more than there are."""

_MOST_PACKED = 1032
"""Largest ratio of deflate: 258 bytes from two bits (RFC 1951)."""


def read_idx(path: Path | str, dimensions: int | None = None) -> Tensor:
    """Return the array in the IDX file at `path`, with the file's own element type and shape.

    dimensions: required number of dimensions; 3 for images (n, rows, columns), 1 for labels (n,).
    Raises DataError if the file cannot be read, is not IDX, has another number of dimensions, or is
    shorter or longer than its header declares.
    """
    path = Path(path)
    with _opened(path) as content:
        dtype, shape = _header(path, content, dimensions)
        return torch.from_numpy(_elements(path, content, dtype, shape))


@contextmanager
def _opened(path: Path) -> Iterator[Content]:
    """Context manager: open the content, decompressed if it is gzip. Raises DataError."""
    try:
        with path.open("rb") as raw:
            # By content, since downloads are often renamed or unpacked.
            if not raw.peek(2).startswith(_GZIP_MAGIC):
                yield raw
                return
            try:
                with gzip.open(raw) as content:
                    yield content
            except (OSError, EOFError, zlib.error) as error:
                raise DataError(f"{path} is a damaged gzip file ({error}); {_TRY_AGAIN}") from error
    except OSError as error:
        raise DataError(f"{path} cannot be read: {error.strerror or error}") from error


def _header(
    path: Path, content: Content, dimensions: int | None
) -> tuple[np.dtype[np.generic], list[int]]:
    """Return the type of the elements and the shape; `content` is then at the elements."""
    magic = content.read(4)
    if len(magic) < 4 or magic[:2] != b"\0\0":
        raise DataError(
            f"{path} is not an IDX file: it starts with {magic.hex(' ') or 'nothing'}, "
            f"expected 00 00, a type and a number of dimensions; {_TRY_AGAIN}"
        )
    code = magic[2]
    rank = magic[3]
    if code not in _TYPES:
        known = ", ".join(f"{known:02x}" for known in _TYPES)
        raise DataError(
            f"{path}: element type {code:02x} is not one of IDX ({known}); {_TRY_AGAIN}"
        )
    if dimensions is not None and rank != dimensions:
        raise DataError(
            f"{path} contains an array of {rank} dimensions, expected {dimensions}: images have "
            "3, labels 1; are the files swapped?"
        )
    lengths = content.read(4 * rank)
    if len(lengths) < 4 * rank:
        raise DataError(
            f"{path} ends inside its header: {4 + len(lengths)} bytes, expected {4 + 4 * rank}; "
            f"{_TRY_AGAIN}"
        )
    return np.dtype(_TYPES[code]), [int(length) for length in np.frombuffer(lengths, ">u4")]


def _elements(
    path: Path, content: Content, dtype: np.dtype[np.generic], shape: list[int]
) -> np.ndarray:
    """Return the array, in the machine's byte order."""
    # Python's integers: an absurd header must not overflow.
    expected = math.prod(shape) * dtype.itemsize
    if isinstance(content, gzip.GzipFile):
        _check_unpacked(path, expected, shape)
    found = _at_most(content, expected + 1)
    if len(found) != expected:
        # A file that is too long was read one byte too far, so its length is unknown.
        count = f"at least {len(found)}" if len(found) > expected else f"{len(found)}"
        raise DataError(
            f"{path} has {count} bytes of elements, expected {expected} for shape "
            f"{tuple(shape)}; {_TRY_AGAIN}"
        )
    try:
        elements = np.frombuffer(found, dtype).reshape(shape)
    except ValueError as error:
        raise DataError(
            f"{path} has the shape {tuple(shape)}, which is too large for an array ({error}); "
            f"{_TRY_AGAIN}"
        ) from error
    # torch supports only the native byte order; bytes, unlike the copy, may be unaligned.
    return elements.astype(dtype.newbyteorder("="))


def _check_unpacked(path: Path, expected: int, shape: list[int]) -> None:
    """Raise DataError before unpacking if the file or the memory is too small."""
    size = path.stat().st_size
    if expected > size * _MOST_PACKED:
        raise DataError(
            f"{path} is too short for its shape {tuple(shape)}: {size} bytes of gzip contain less "
            f"than {expected}; {_TRY_AGAIN}"
        )
    available = available_memory()
    # Twice: as they are read, and in the machine's byte order.
    if available is not None and 2 * expected > available:
        raise DataError(
            f"{path} unpacks to {expected} bytes, shape {tuple(shape)}, and needs twice that much "
            f"memory, but {available} are available: is it the right file?"
        )


def _at_most(content: Content, count: int) -> bytearray:
    """Return the next `count` bytes, or the rest if there are fewer."""
    found = bytearray()
    while piece := content.read(min(_PIECE, count - len(found))):
        found += piece
    return found
