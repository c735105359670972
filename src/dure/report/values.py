"""What stands in a run folder's JSON, as far as it is what it should be.

A folder may be damaged, or made by somebody else: a value of another type counts as missing, and so
do NaN, infinity, and numbers so large that what is computed of them would be infinite.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

T = TypeVar("T")


LARGEST = 1e100
"""Nothing that is measured is larger; sums and products of two such numbers are finite."""


def number(value: object) -> float | None:
    """A finite number, else None."""
    # A bool is an int in Python, but no number in JSON. Compared before it is a float, which an int
    # of many digits cannot be; NaN is not within any bounds.
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return None
    return float(value) if -LARGEST <= value <= LARGEST else None


def whole(value: object) -> int:
    """A whole number, else 0."""
    return int(number(value) or 0)


def whole_number(value: object) -> int:
    """A whole number. Raises ValueError for what is none."""
    found = number(value)
    if found is None or not found.is_integer():
        raise ValueError(f"{value!r} is no whole number")
    return int(found)


def numbers(raw: Mapping[str, Any]) -> dict[str, float]:
    """The entries that are finite numbers."""
    pairs = {key: number(value) for key, value in raw.items()}
    return {key: value for key, value in pairs.items() if value is not None}


def text_of(value: object) -> str | None:
    """A text that says something, else None."""
    return value if isinstance(value, str) and value else None


def mapping(value: object) -> Mapping[str, Any]:
    """A JSON object, else an empty one."""
    return value if isinstance(value, dict) else {}


def listing(value: object) -> Sequence[Any]:
    """A JSON array, else an empty one."""
    return value if isinstance(value, list) else []


def rows(raw: object, made: Callable[[Sequence[Any]], T]) -> list[T]:
    """What is made of each row; damaged ones are left out."""
    rows: list[T] = []
    for row in listing(raw):
        with contextlib.suppress(TypeError, ValueError, LookupError):
            rows.append(made(row))
    return rows
