"""Whether the fields of a setting are of their types, said in a sentence.

The command line reads every field by its type. In Python a text may come where a number is meant,
and fail far from where it was given. What a type says is checked where it is simple: numbers,
words, texts, None, and classes. A field that has its default is right whatever its type says.
"""

from __future__ import annotations

import dataclasses
import functools
import math
import os
import types
import typing
from collections.abc import Callable, Mapping, Sequence
from numbers import Integral, Real
from typing import Any, Literal, Union

LARGEST_COUNT = 10**15
"""Nothing that is counted here, in examples, steps, clients or bytes, comes to as many."""
LARGEST_NUMBER = 3.4e38
"""Of float32; what is multiplied with a larger number overflows."""

_WORDS: dict[Any, str] = {
    int: "a whole number",
    float: "a number",
    bool: "True or False",
    str: "a text",
    type(None): "None",
}


class Told:
    """The base of settings whose `__post_init__` may meet values of a wrong type.

    What it then stumbles over is said as `check_fields` says it.
    """

    def __init_subclass__(cls, **options: Any) -> None:
        super().__init_subclass__(**options)
        check = vars(cls).get("__post_init__")
        if check is None:
            return

        @functools.wraps(check)
        def told(self: Any) -> None:
            try:
                check(self)
            except (TypeError, AttributeError, OverflowError):
                check_fields(self)
                raise

        # Before `dataclass` looks whether there is one.
        cls.__post_init__ = told  # type: ignore[attr-defined]


def check_fields(thing: Any, limited: bool = True) -> None:
    """Raises ValueError for a field of a dataclass whose value is not what its type says.

    limited: whether numbers are refused that cannot be counted to, or that overflow.
    """
    kind: Any = type(thing)
    hints = _hints_of(kind)
    for field in dataclasses.fields(thing):
        value = getattr(thing, field.name)
        if value is field.default or field.name not in hints:
            continue
        hint = hints[field.name]
        check_value(field.name, value, hint)
        if limited:
            _check_size(field.name, value)


def check_value(name: str, value: Any, hint: Any) -> None:
    """Raises ValueError for a value that is not what the type `hint` says."""
    if not _fits(value, hint):
        raise ValueError(f"{name} is {shown(value)}, but it has to be {_in_words(hint)}")


def check_path(name: str, path: Any, optional: bool = False) -> None:
    """Raises ValueError for what names no file or folder."""
    if not isinstance(path, (str, os.PathLike)) and not (optional and path is None):
        raise ValueError(f"{name} is {shown(path)}, but it has to be a path")


def shown(value: Any) -> str:
    """A value that was given where something else is meant, in words."""
    text = repr(value)
    # Of a tensor or a dataset the kind says more.
    if len(text) > 60 or "\n" in text:
        return f"a {type(value).__name__}"
    return text


@functools.lru_cache(256)
def _hints_of(kind: Any) -> dict[str, Any]:
    """The types of a class's fields; none if they cannot be evaluated, as its author may like."""
    try:
        return typing.get_type_hints(kind)
    except Exception:
        return {}


def _check_size(name: str, value: Any) -> None:
    if isinstance(value, bool):
        return
    if isinstance(value, int) and abs(value) > LARGEST_COUNT:
        raise ValueError(f"{name} is {value}, and no run ever counts so far: give a smaller number")
    if isinstance(value, float) and math.isnan(value):
        raise ValueError(f"{name} is {value}, which is no number")
    if isinstance(value, float) and LARGEST_NUMBER < abs(value) < math.inf:
        raise ValueError(
            f"{name} is {value}, and what is multiplied with it overflows: give a smaller number"
        )


def _fits(value: Any, hint: Any) -> bool:
    origin = typing.get_origin(hint)
    if origin in (Union, types.UnionType):
        return any(_fits(value, one) for one in typing.get_args(hint))
    if origin is Literal:
        # Of a word that there is not, its owner says which there are, and which is near.
        return any(type(value) is type(one) for one in typing.get_args(hint))
    if hint is None or hint is type(None):
        return value is None
    if hint is bool:
        return isinstance(value, bool)
    if hint in (int, float):
        kind = Integral if hint is int else Real
        return isinstance(value, kind) and not isinstance(value, bool)
    # A list passes for a tuple; a text is no list of texts.
    if origin in (tuple, list) or origin is Sequence:
        return isinstance(value, Sequence) and not isinstance(value, str)
    if origin in (dict, Mapping):
        return isinstance(value, Mapping)
    if origin is Callable:
        return callable(value)
    try:
        return isinstance(value, hint) if isinstance(hint, type) else True
    except TypeError:  # Any, a protocol, a TypedDict: nothing that can be asked
        return True


def _in_words(hint: Any) -> str:
    origin = typing.get_origin(hint)
    if origin in (Union, types.UnionType):
        return " or ".join(_in_words(one) for one in typing.get_args(hint))
    if origin is Literal:
        return " or ".join(repr(one) for one in typing.get_args(hint))
    if hint in _WORDS:
        return _WORDS[hint]
    kind = origin if isinstance(origin, type) else hint
    return f"a {kind.__name__}" if isinstance(kind, type) else str(hint)
