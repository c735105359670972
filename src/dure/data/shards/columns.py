"""Columns with consecutive rows in a file: safetensors and npy.

    safetensors   8 bytes, the length of a header; the header, JSON: name -> dtype, shape, place;
                  then the tensors
    npy           a magic number, a version, the length of a header; the header, a Python dict:
                  descr, shape, order; then the array

Both are little-endian and row-major here, so a range of rows is a range of bytes, which is read
directly into the tensor's own memory.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import numpy
import torch
from torch import Tensor

from dure.errors import DataError

_MOST_HEADER = 100 << 20
"""Most bytes of a safetensors header, the limit of its own library."""

_DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}
"""Element types of safetensors."""


@dataclass(frozen=True)
class FileColumn:
    """A column in a file. start: offset of its first byte. row: shape of a row."""

    path: Path
    start: int
    dtype: torch.dtype
    rows: int
    row: tuple[int, ...]

    @property
    def row_bytes(self) -> int:
        return math.prod(self.row) * self.dtype.itemsize

    def fill(self, into: Tensor, first: int) -> None:
        """Fill a contiguous tensor with the rows from `first` on.

        Raises DataError if the file no longer has them.
        """
        if not into.nbytes:
            return
        rest = memoryview(into.view(-1).view(torch.uint8).numpy().data)
        try:
            with self.path.open("rb", buffering=0) as file:
                file.seek(self.start + first * self.row_bytes)
                while rest:
                    count = file.readinto(rest)
                    if not count:
                        raise DataError(f"{self.path} has become shorter than its header states")
                    rest = rest[count:]
        except OSError as error:
            raise unreadable(self.path, error) from error


class RowFile:
    """A shard of such columns. columns: the columns to read, in order."""

    def __init__(self, columns: Sequence[FileColumn]) -> None:
        self.columns = columns
        self.path = columns[0].path
        self.rows = columns[0].rows
        self.forms = [(column.dtype, column.row) for column in columns]

    def blocks(self, rows: int) -> list[int]:
        """Return the lengths of blocks of `rows` rows; the last has the remainder."""
        whole, left = divmod(self.rows, rows)
        return [rows] * whole + ([left] if left else [])

    def fill(self, into: Sequence[Tensor], first: int) -> None:
        """Fill the tensors with the rows from `first` on of every column."""
        for column, own in zip(self.columns, into, strict=True):
            column.fill(own, first)


def unreadable(path: Path, error: OSError) -> DataError:
    return DataError(f"{path} cannot be read: {error.strerror or error}")


def of_safetensors(path: Path) -> dict[str, FileColumn]:
    """Return the columns of a safetensors file, by name. Raises DataError for another file."""
    try:
        with path.open("rb") as file:
            size = os.fstat(file.fileno()).st_size
            length = int.from_bytes(file.read(8), "little")
            if not 2 <= length <= min(_MOST_HEADER, size - 8):
                raise DataError(f"{path} is not a safetensors file: its header has {length} bytes")
            header = json.loads(file.read(length))
    except OSError as error:
        raise unreadable(path, error) from error
    except (ValueError, RecursionError) as error:
        raise DataError(f"{path} is not a safetensors file: {error}") from error
    if not isinstance(header, Mapping):
        raise DataError(f"{path} is not a safetensors file: its header is not a JSON object")
    header = {name: told for name, told in header.items() if name != "__metadata__"}
    return {name: _tensor(path, name, told, 8 + length, size) for name, told in header.items()}


def _tensor(path: Path, name: str, told: Any, start: int, size: int) -> FileColumn:
    try:
        dtype, shape, (first, end) = told["dtype"], tuple(told["shape"]), told["data_offsets"]
        fits = all(type(one) is int and one >= 0 for one in (*shape, first, end))
    except (TypeError, KeyError, ValueError):
        fits = False
    if not fits:
        raise DataError(f"{path}: the header does not describe a tensor for {name}")
    if dtype not in _DTYPES:
        raise DataError(
            f"{path}: {name} has the type {dtype}, but dure can read only {', '.join(_DTYPES)}"
        )
    column = _column(path, name, start + first, _DTYPES[dtype], shape)
    if end - first != column.rows * column.row_bytes or start + end > size:
        raise DataError(f"{path}: the number of bytes of {name} does not match its shape {shape}")
    return column


def of_npy(path: Path, name: str) -> FileColumn:
    """Return the column of an npy file. Raises DataError for another file."""
    try:
        with path.open("rb") as file:
            shape, by_columns, dtype = _npy_header(path, file)
            start = file.tell()
            size = os.fstat(file.fileno()).st_size
    except OSError as error:
        raise unreadable(path, error) from error
    if by_columns:
        raise DataError(
            f"{path} is column-major: convert the array with numpy.ascontiguousarray before saving"
        )
    try:
        # torch's name of the dtype; torch does not support other byte orders, nor objects.
        known = torch.from_numpy(numpy.empty(0, dtype)).dtype
    except (TypeError, ValueError) as error:
        raise DataError(
            f"{path} has elements of {dtype}, which torch does not support: {error}"
        ) from error
    column = _column(path, name, start, known, shape)
    if size - start != column.rows * column.row_bytes:
        raise DataError(
            f"{path} has {size - start} bytes of elements, but its shape {shape} needs "
            f"{column.rows * column.row_bytes}"
        )
    return column


def _npy_header(
    path: Path, file: BinaryIO
) -> tuple[tuple[int, ...], bool, numpy.dtype[numpy.generic]]:
    """Return (shape, whether it is column-major, dtype)."""
    try:
        version = numpy.lib.format.read_magic(file)
        if version == (1, 0):
            return numpy.lib.format.read_array_header_1_0(file)
        if version == (2, 0):
            return numpy.lib.format.read_array_header_2_0(file)
    except ValueError as error:
        raise DataError(f"{path} is not an npy file: {error}") from error
    raise DataError(
        f"{path} has version {version} of the npy format, but dure can read only 1.0 and 2.0"
    )


def _column(
    path: Path, name: str, start: int, dtype: torch.dtype, shape: tuple[int, ...]
) -> FileColumn:
    if not shape:
        raise DataError(
            f"{path}: {name} is a single number, but a column needs one row per example"
        )
    return FileColumn(path, start, dtype, shape[0], shape[1:])
