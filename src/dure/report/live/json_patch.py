"""Patches between JSON values.

    [path, "add", values]   append values to the list at `path`
    [path, "set", value]    set the value at `path`
    [path, "cut"]           remove the value at `path`

A path is a list of keys and indices. A list that extends the old list is appended to, so a new
point of a curve costs a single point. In the browser live.js applies the same patches.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

JsonChange = list[Any]


def changes(old: Any, new: Any) -> list[JsonChange]:
    """Return the patches from `old` to `new`; both are dictionaries."""
    return list(_changes([], old, new))


def _changes(path: list[Any], old: Any, new: Any) -> Iterator[JsonChange]:
    if old is new or old == new:
        return
    if isinstance(old, dict) and isinstance(new, dict):
        for key in old.keys() - new.keys():
            yield [[*path, key], "cut"]
        for key, value in new.items():
            if key in old:
                yield from _changes([*path, key], old[key], value)
            else:
                yield [[*path, key], "set", value]
    elif isinstance(old, list) and isinstance(new, list):
        yield from _of_lists(path, old, new)
    else:
        yield [path, "set", new]


def _of_lists(path: list[Any], old: list[Any], new: list[Any]) -> Iterator[JsonChange]:
    if old and new[: len(old)] == old:
        yield [path, "add", new[len(old) :]]
    elif len(old) == len(new) and all(isinstance(one, (dict, list)) for one in [*old, *new]):
        for place, (one, other) in enumerate(zip(old, new, strict=True)):
            yield from _changes([*path, place], one, other)
    else:
        yield [path, "set", new]
