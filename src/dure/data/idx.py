"""Reader of IDX files, the format MNIST and its successors are published in.

An IDX file is one array. All numbers in it are big-endian:

    bytes 0-1   zero
    byte 2      type of the elements: 08 uint8, 09 int8, 0B int16, 0C int32, 0D float32, 0E float64
    byte 3      d, the number of dimensions
    then        d lengths, uint32 each
    then        the elements, row-major, nothing after them

So the magic number of a file of images is 0x00000803 and of a file of labels 0x00000801. The
publishers compress the files with gzip; whether a file is compressed is read from its first bytes,
not from its name.

Source: Y. LeCun, C. Cortes, C. Burges, "The MNIST database of handwritten digits",
http://yann.lecun.com/exdb/mnist/, section "File formats".
"""

from __future__ import annotations

import gzip
import math
import zlib
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from dure.errors import DataError

_TYPES = {0x08: ">u1", 0x09: ">i1", 0x0B: ">i2", 0x0C: ">i4", 0x0D: ">f4", 0x0E: ">f8"}
_GZIP_MAGIC = b"\x1f\x8b"
_TRY_AGAIN = "download the file again"


def read_idx(path: Path | str, dimensions: int | None = None) -> Tensor:
    """The array in the IDX file at `path`, with the file's own element type and shape.

    dimensions: how many dimensions it must have; 3 for images (n, rows, columns), 1 for labels
    (n,).

    Raises DataError if the file cannot be read, is not IDX, has another number of dimensions, or is
    shorter or longer than its header says.
    """
    path = Path(path)
    content = _content(path)
    if len(content) < 4 or content[:2] != b"\0\0":
        raise DataError(
            f"{path} is not an IDX file: it starts with {content[:4].hex(' ') or 'nothing'}, "
            f"expected 00 00, a type and a number of dimensions; {_TRY_AGAIN}"
        )
    code = content[2]
    rank = content[3]
    if code not in _TYPES:
        known = ", ".join(f"{known:02x}" for known in _TYPES)
        raise DataError(
            f"{path}: element type {code:02x} is not one of IDX ({known}); {_TRY_AGAIN}"
        )
    if dimensions is not None and rank != dimensions:
        raise DataError(
            f"{path} holds an array of {rank} dimensions, expected {dimensions}: "
            "images have 3, labels 1; are the files exchanged?"
        )
    return torch.from_numpy(_elements(path, content, np.dtype(_TYPES[code]), rank))


def _content(path: Path) -> bytes:
    """All bytes of the file, decompressed if it is gzip."""
    try:
        raw = path.read_bytes()
    except OSError as error:
        raise DataError(f"{path} cannot be read: {error.strerror or error}") from error
    # By content: downloads are often renamed or unpacked.
    if not raw.startswith(_GZIP_MAGIC):
        return raw
    try:
        return gzip.decompress(raw)
    except (OSError, EOFError, zlib.error) as error:
        raise DataError(f"{path} is a damaged gzip file ({error}); {_TRY_AGAIN}") from error


def _elements(path: Path, content: bytes, dtype: np.dtype[np.generic], rank: int) -> np.ndarray:
    """The array after the four bytes of magic number, in the machine's byte order."""
    start = 4 + 4 * rank
    if len(content) < start:
        raise DataError(
            f"{path} ends inside its header: {len(content)} bytes, expected {start}; {_TRY_AGAIN}"
        )
    shape = [int(length) for length in np.frombuffer(content, ">u4", count=rank, offset=4)]
    # Python's integers: a header of nonsense must not overflow, nor have memory allocated for it.
    expected = math.prod(shape) * dtype.itemsize
    if len(content) - start != expected:
        raise DataError(
            f"{path} has {len(content) - start} bytes of elements, expected {expected} for shape "
            f"{tuple(shape)}; {_TRY_AGAIN}"
        )
    try:
        elements = np.frombuffer(content, dtype, offset=start).reshape(shape)
    except ValueError as error:
        raise DataError(
            f"{path} has a shape that no array has, {tuple(shape)} ({error}); {_TRY_AGAIN}"
        ) from error
    # torch knows only the machine's own order; the copy is writable as well, unlike the bytes.
    return elements.astype(dtype.newbyteorder("="))
