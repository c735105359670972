"""Typed access to the JSON of a run folder.

A folder may be damaged, or made by another party: a value of another type counts as missing, and so
do NaN, infinity, and numbers so large that arithmetic with them would overflow.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

T = TypeVar("T")


LARGEST = 1e100
"""Bound above all measurements; sums and products of two such numbers are finite."""


def number(value: object) -> float | None:
    """Return a finite number, else None."""
    # bool is a subclass of int, but no number in JSON. Bounds are checked before the conversion,
    # since float() fails for an int of many digits; NaN is within no bounds.
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return None
    return float(value) if -LARGEST <= value <= LARGEST else None


def whole(value: object) -> int:
    """Return a whole number, else 0."""
    return int(number(value) or 0)


def whole_number(value: object) -> int:
    """Return a whole number. Raises ValueError for any other value."""
    found = number(value)
    if found is None or not found.is_integer():
        raise ValueError(f"{value!r} is not an integer")
    return int(found)


def numbers(raw: Mapping[str, Any]) -> dict[str, float]:
    """Return the entries that are finite numbers."""
    pairs = {key: number(value) for key, value in raw.items()}
    return {key: value for key, value in pairs.items() if value is not None}


def text_of(value: object) -> str | None:
    """Return a nonempty text, else None."""
    return value if isinstance(value, str) and value else None


def mapping(value: object) -> Mapping[str, Any]:
    """Return a JSON object, else an empty dict."""
    return value if isinstance(value, dict) else {}


def listing(value: object) -> Sequence[Any]:
    """Return a JSON array, else an empty list."""
    return value if isinstance(value, list) else []


def rows(raw: object, made: Callable[[Sequence[Any]], T]) -> list[T]:
    """Return the result of `made` for each row, without damaged rows."""
    rows: list[T] = []
    for row in listing(raw):
        with contextlib.suppress(TypeError, ValueError, LookupError):
            rows.append(made(row))
    return rows
