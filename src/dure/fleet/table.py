"""CSV files that describe clients.

The files have a header; the first column is a client's name, the others are numbers.
"""

from __future__ import annotations

import csv
from collections.abc import Sequence
from typing import NamedTuple

from dure.errors import DataError


class FileRow(NamedTuple):
    """A line of the file. line: its number, from 1."""

    line: int
    client: str
    values: list[float]


def read_table(path: str, columns: Sequence[str]) -> list[FileRow]:
    """Return the rows of a file whose header is `columns`, at least one; empty lines are skipped.

    Raises ValueError for a path that does not fit a text form, and DataError if the file cannot be
    read, is empty, or has a line that is not a name and numbers.
    """
    # Text forms are split at ":".
    if not path or ":" in path:
        raise ValueError(
            f"the path {path!r} cannot be written in file:PATH: it needs a name, without ':'"
        )
    try:
        # newline="": the csv module reads line ends itself. utf-8-sig: spreadsheets write a byte
        # order mark first.
        with open(path, newline="", encoding="utf-8-sig") as file:
            reader = csv.reader(file)
            rows = [(reader.line_num, row) for row in reader if row]
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        reason = error.strerror if isinstance(error, OSError) else "not a CSV file"
        raise DataError(f"{path} cannot be read: {reason}") from error
    expected = ",".join(columns)
    if not rows or [name.strip() for name in rows[0][1]] != list(columns):
        found = ",".join(rows[0][1]) if rows else ""
        raise DataError(f"{path}: the first line has to be {expected!r}, not {found!r}")
    if len(rows) == 1:
        raise DataError(f"{path} has no clients, only a header")
    return [_row(path, line, row, columns) for line, row in rows[1:]]


def in_order(names: Sequence[str]) -> list[str]:
    """Return each name once.

    The order is numerical if all names are whole numbers, otherwise by first appearance.

    Client k of a federation is number k of these, modulo their count.
    """
    once = list(dict.fromkeys(names))
    return sorted(once, key=int) if all(name.isdecimal() for name in once) else once


def _row(path: str, line: int, row: Sequence[str], columns: Sequence[str]) -> FileRow:
    expected = ",".join(columns)
    if len(row) != len(columns):
        raise DataError(
            f"{path}, line {line}: {len(row)} values, expected {len(columns)} ({expected})"
        )
    try:
        return FileRow(line, row[0].strip(), [float(value) for value in row[1:]])
    except ValueError as error:
        raise DataError(
            f"{path}, line {line}: {','.join(row)!r} is not a name and numbers ({expected})"
        ) from error
