"""Settings written as text, for command lines and run folders: the name, then the values, as
`dirichlet:0.3:10`.

A setting is a frozen dataclass with a `name`, whose fields are numbers or words and all have a
default. What `write` writes, `read` reads; values at the end that are default are left out, but for
the first.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

from dure.errors import suggestion as suggestion

Setting = TypeVar("Setting")

_KINDS = {int: "a whole number", float: "a number", str: "a word"}


def write(setting: Any) -> str:
    """The text that `read` reads: the name and the fields, without those after the first that are
    default."""
    fields = dataclasses.fields(setting)
    values = [getattr(setting, field.name) for field in fields]
    while len(values) > 1 and values[-1] == fields[len(values) - 1].default:
        values.pop()
    return ":".join([setting.name, *map(str, values)])


def parse_fields(thing: Any, readers: Mapping[str, Callable[[str], Any]]) -> None:
    """Reads those fields of a frozen dataclass that were given as text, in its `__post_init__`."""
    for field, reader in readers.items():
        value = getattr(thing, field)
        if isinstance(value, str):
            object.__setattr__(thing, field, reader(value))


def read(text: str, known: Mapping[str, type[Setting]], what: str) -> Setting:
    """The setting that `text` names. known: the classes by name; what: the word for them, as
    "partition".

    Raises ValueError for an unknown name, for too many values, and for values that are not what
    they should be.
    """
    name, *values = text.strip().split(":")
    if name not in known:
        raise ValueError(f"there is no {what} {name!r}{suggestion(name, known)}")
    fields = dataclasses.fields(known[name])  # type: ignore[arg-type]
    form = ":".join([name, *(field.name.upper() for field in fields)])
    if len(values) > len(fields):
        raise ValueError(f"the {what} {text!r} has too many values: write {form}")
    arguments: dict[str, Any] = {}
    for field, value in zip(fields, values, strict=False):
        kind: type[Any] = type(field.default)
        try:
            arguments[field.name] = kind(value)
        except ValueError as error:
            raise ValueError(
                f"the {what} {text!r}: {value!r} is not {_KINDS[kind]}; write {form}"
            ) from error
    return known[name](**arguments)
