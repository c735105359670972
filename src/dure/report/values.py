"""What stands in a run folder's JSON, as far as it is what it should be.

A folder may be damaged, or made by somebody else: a value of another type counts as missing, and so
do NaN and infinity.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

T = TypeVar("T")


def number(value: object) -> float | None:
    """A finite number, else None."""
    # A bool is an int in Python, but no number in JSON.
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not math.isfinite(value):
        return None
    return float(value)


def whole(value: object) -> int:
    """A whole number, else 0."""
    return int(number(value) or 0)


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
