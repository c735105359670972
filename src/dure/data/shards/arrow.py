"""Shards of Apache Arrow, and of Parquet, as Hugging Face's `datasets` writes and reads them.

    .arrow, .feather   record batches, in sequence; a batch is read whole
    .parquet           row groups, compressed; a group is read, and unpacked, whole

A column of numbers or bools has a number for each example; a column of lists has lists of equal
length. Other columns, such as texts or pictures, cannot be tensors, and are refused by name.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from itertools import accumulate
from pathlib import Path
from typing import Any

import numpy
import torch
from torch import Tensor

from dure.errors import DataError, described

ARROW = (".arrow", ".feather")
PARQUET = (".parquet",)


class _Groups:
    """A file whose rows are in groups, each of which is read whole."""

    def __init__(self, path: Path, columns: Sequence[str]) -> None:
        self.path = path
        self.columns = list(columns)
        try:
            schema, self.lengths = self._header()
        except OSError as error:
            raise DataError(f"{path} cannot be read: {error.strerror or error}") from error
        except Exception as error:
            raise DataError(f"{path} is not a {self._kind} file: {described(error)}") from error
        self.rows = sum(self.lengths)
        self._starts = [0, *accumulate(self.lengths)]
        missing = [name for name in columns if name not in schema.names]
        if missing:
            raise DataError(
                f"{path} has no column {', '.join(missing)}; it has {', '.join(schema.names)}"
            )
        for name in columns:
            self._check(name, schema.field(name).type)
        if not self.rows:
            raise DataError(f"{path} has no rows")
        # The length of lists is not in the schema, only in the rows.
        self.forms = [(one.dtype, tuple(one.shape[1:])) for one in self._first()]

    _kind = ""

    def _header(self) -> tuple[Any, list[int]]:
        """Return (schema, rows of each group)."""
        raise NotImplementedError

    def _table(self, group: int) -> Any:
        """Return the columns of a group."""
        raise NotImplementedError

    def _first(self) -> list[Tensor]:
        group = next(number for number, rows in enumerate(self.lengths) if rows)
        table = self._table(group).slice(0, 1)
        # A copy, because Arrow's memory is read-only.
        return [
            torch.from_numpy(numpy.array(self._array(name, table.column(name))))
            for name in self.columns
        ]

    def _check(self, name: str, kind: Any) -> None:
        """Raise DataError for a column that cannot be a tensor."""
        import pyarrow as pa

        inner = kind
        while pa.types.is_list(inner) or pa.types.is_fixed_size_list(inner) or _is_large(inner):
            inner = inner.value_type
        fits = pa.types.is_integer(inner) or pa.types.is_floating(inner)
        if not (fits or pa.types.is_boolean(inner)):
            raise DataError(
                f"{self.path}: the column {name} has the type {kind}, but only numbers, booleans, "
                "or lists of them can be tensors"
            )

    def _array(self, name: str, column: Any) -> Any:
        """Return the rows of a column as an array."""
        rows = len(column)
        values = column.combine_chunks()
        shape: list[int] = []
        if values.null_count:
            raise DataError(f"{self.path}: a row of {name} is null")
        while hasattr(values.type, "value_type"):
            size, left = divmod(len(values.flatten()), max(1, rows * int(numpy.prod(shape or [1]))))
            even = not left and (
                not hasattr(values, "value_lengths")
                or all(one == size for one in values.value_lengths().unique().to_pylist())
            )
            if not even:
                raise DataError(
                    f"{self.path}: the rows of {name} are lists of different lengths, but a "
                    "tensor needs rows of one length"
                )
            shape.append(size)
            values = values.flatten()
            if values.null_count:
                raise DataError(f"{self.path}: a list of {name} contains a null")
        return values.to_numpy(zero_copy_only=False).reshape(rows, *shape)

    def blocks(self, rows: int) -> list[int]:
        """Return the lengths of its groups, which are fixed; `rows` has no effect."""
        return [length for length in self.lengths if length]

    def fill(self, into: Sequence[Tensor], first: int) -> None:
        """Fill the tensors with the rows from `first` on of every column."""
        stop = first + len(into[0])
        group = bisect_right(self._starts, first) - 1
        at = first
        while at < stop:
            end = min(stop, self._starts[group + 1])
            if at < end:
                self._fill_from(group, [own[at - first : end - first] for own in into], at)
            at = end
            group += 1

    def _fill_from(self, group: int, into: Sequence[Tensor], first: int) -> None:
        try:
            table = self._table(group).slice(first - self._starts[group], len(into[0]))
        except OSError as error:
            raise DataError(f"{self.path} cannot be read: {error.strerror or error}") from error
        for name, own in zip(self.columns, into, strict=True):
            found = self._array(name, table.column(name))
            if found.shape[1:] != own.shape[1:]:
                raise DataError(
                    f"{self.path}: rows of {name} have the shape {list(found.shape[1:])}, but "
                    f"those of the first shard have {list(own.shape[1:])}"
                )
            own.numpy()[...] = found


def _is_large(kind: Any) -> bool:
    import pyarrow as pa

    return bool(pa.types.is_large_list(kind))


class ArrowFile(_Groups):
    """Record batches, as a file or as a stream."""

    _kind = "Arrow"

    def _header(self) -> tuple[Any, list[int]]:
        import pyarrow as pa

        # Mapped: only the header of each batch is read.
        with pa.memory_map(str(self.path)) as source:
            self._is_file = source.read(6) == b"ARROW1"
            source.seek(0)
            if self._is_file:
                reader = pa.ipc.open_file(source)
                lengths = [reader.get_batch(n).num_rows for n in range(reader.num_record_batches)]
                return reader.schema, lengths
            stream = pa.ipc.open_stream(source)
            self._places: list[int] = []
            self._schema = stream.schema
            lengths = []
            place = source.tell()
            for batch in stream:
                self._places.append(place)
                lengths.append(batch.num_rows)
                place = source.tell()
            return stream.schema, lengths

    def _table(self, group: int) -> Any:
        import pyarrow as pa

        # Not mapped: the content is in memory of its own, which is freed after use.
        with pa.OSFile(str(self.path)) as source:
            if self._is_file:
                batch = pa.ipc.open_file(source).get_batch(group)
            else:
                source.seek(self._places[group])
                message = pa.ipc.read_message(source)
                batch = pa.ipc.read_record_batch(message, self._schema)
            return pa.Table.from_batches([batch]).select(self.columns)


class ParquetFile(_Groups):
    """Row groups of a Parquet file."""

    _kind = "Parquet"

    def _header(self) -> tuple[Any, list[int]]:
        from pyarrow import parquet

        with parquet.ParquetFile(self.path) as file:
            metadata = file.metadata
            lengths = [metadata.row_group(n).num_rows for n in range(metadata.num_row_groups)]
            return file.schema_arrow, lengths

    def _table(self, group: int) -> Any:
        from pyarrow import parquet

        with parquet.ParquetFile(self.path) as file:
            return file.read_row_group(group, columns=self.columns, use_threads=False)
