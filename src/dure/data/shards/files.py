"""Find and open the files of shards."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Protocol

import torch
from torch import Tensor

from dure.data.shards.arrow import ARROW, PARQUET, ArrowFile, ParquetFile
from dure.data.shards.columns import FileColumn, RowFile, of_npy, of_safetensors
from dure.errors import DataError
from dure.machine.extras import check_extra

ColumnForm = tuple[torch.dtype, tuple[int, ...]]
"""Element type of a column, and the shape of a row."""


class ShardFile(Protocol):
    """A shard: rows of the requested columns. forms: of the columns."""

    path: Path
    rows: int
    forms: list[ColumnForm]

    def blocks(self, rows: int) -> list[int]:
        """Return the lengths of its blocks: of `rows` rows, if the format leaves a choice."""

    def fill(self, into: Sequence[Tensor], first: int) -> None:
        """Fill the tensors with the rows from `first` on of every column."""


Opener = Callable[[Path, Sequence[str]], ShardFile]


def found(where: str | Path | Sequence[str | Path]) -> list[Path]:
    """Return the shards of a folder, sorted by name, or the named files in the given order.

    Raises DataError if there are none, or files of several kinds.
    """
    if isinstance(where, (str, Path)):
        folder = Path(where).absolute()
        if not folder.is_dir():
            raise DataError(f"there is no folder of shards {folder}")
        paths = sorted(path for path in folder.iterdir() if path.suffix in _KINDS)
    else:
        folder = None
        paths = [Path(path).absolute() for path in where]
    kinds = sorted({path.suffix for path in paths})
    known = ", ".join(_KINDS)
    if not paths:
        raise DataError(f"{folder or 'the list'} has no shards, which are files of {known}")
    if len(kinds) > 1 or kinds[0] not in _KINDS:
        raise DataError(f"shards have to be files of one kind, {known}, and these are {kinds}")
    return paths


def opened(paths: Sequence[Path], columns: Sequence[str]) -> list[ShardFile]:
    """Return the shards, with these columns. Raises DataError for files that do not fit."""
    kind = paths[0].suffix
    if kind == ".npy":
        shards: list[ShardFile] = _of_npy(paths, columns)
    else:
        shards = [_KINDS[kind](path, columns) for path in paths]
    first = shards[0]
    for shard in shards[1:]:
        for name, theirs, form in zip(columns, shard.forms, first.forms, strict=True):
            if theirs != form:
                raise DataError(
                    f"{shard.path}: a row of {name} is {_told(theirs)}, but in {first.path} it is "
                    f"{_told(form)}"
                )
    return shards


def _told(form: ColumnForm) -> str:
    dtype, shape = form
    return f"{str(dtype).removeprefix('torch.')} of shape {list(shape)}"


def _safetensors(path: Path, columns: Sequence[str]) -> ShardFile:
    return _rows(path, columns, of_safetensors(path))


def _of_npy(paths: Sequence[Path], columns: Sequence[str]) -> list[ShardFile]:
    """Group the files NAME.COLUMN.npy into shards, a shard for each name."""
    shards: dict[Path, dict[str, Path]] = {}
    for path in paths:
        shard, _, column = path.name.removesuffix(".npy").rpartition(".")
        if not shard:
            raise DataError(
                f"the name of {path} does not contain a column: rename it to NAME.COLUMN.npy"
            )
        shards.setdefault(path.with_name(shard), {})[column] = path
    return [
        _rows(
            shard, columns, {name: of_npy(files[name], name) for name in columns if name in files}
        )
        for shard, files in shards.items()
    ]


def _rows(path: Path, columns: Sequence[str], there: dict[str, FileColumn]) -> RowFile:
    missing = [name for name in columns if name not in there]
    if missing:
        raise DataError(
            f"{path} has no column {', '.join(missing)}; it has {', '.join(there) or 'none'}"
        )
    taken = [there[name] for name in columns]
    lengths = {name: there[name].rows for name in columns}
    if len(set(lengths.values())) > 1:
        raise DataError(f"{path}: the columns have different lengths: {lengths}")
    return RowFile(taken)


def _arrow(path: Path, columns: Sequence[str]) -> ShardFile:
    check_extra("a shard of Arrow", "arrow", ["pyarrow"])
    return ArrowFile(path, columns)


def _parquet(path: Path, columns: Sequence[str]) -> ShardFile:
    check_extra("a shard of Parquet", "arrow", ["pyarrow"])
    return ParquetFile(path, columns)


_KINDS: dict[str, Opener] = {
    ".safetensors": _safetensors,
    ".npy": lambda path, columns: _of_npy([path], columns)[0],
    **dict.fromkeys(ARROW, _arrow),
    **dict.fromkeys(PARQUET, _parquet),
}
"""Function that opens a file, by its suffix."""
