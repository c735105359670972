"""Checks of a setting's fields, types and ranges, with errors in plain sentences.

The command line reads every field by its type. In Python, a text may be passed for a number and
fail far from its source. Simple types are checked: numbers, words, texts, None, and classes. A
field with its default value is valid whatever its type.

The range of a number is declared with the field: `field(default=1, metadata=at_least(1))`.
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
from typing import TYPE_CHECKING, Any, ClassVar, Literal, Union

from dure.errors import suggestion

if TYPE_CHECKING:
    from typing_extensions import Self

LARGEST_COUNT = 10**15
"""Upper bound of valid counts, of examples, steps, clients or bytes."""
LARGEST_NUMBER = 3.4e38
"""Largest float32; a product with a larger number overflows."""

_RANGE = "range"
"""Key of a field's range in the metadata of the field."""

_WORDS: dict[Any, str] = {
    int: "an integer",
    float: "a number",
    bool: "True or False",
    str: "a str",
    type(None): "None",
}


class SuggestsArguments:
    """Base of dataclasses that users make: an unknown argument is refused with a suggestion."""

    _ELSEWHERE: ClassVar[list[type]] = []
    """Classes whose arguments are suggested when another class lacks them."""

    def __init_subclass__(cls, common: bool = False, **options: Any) -> None:
        """Register the class. common: whether its arguments are suggested for other classes."""
        super().__init_subclass__(**options)
        if common:
            SuggestsArguments._ELSEWHERE.append(cls)

    # Runs before the dataclass's `__init__`, whose error would give the argument's name alone.
    def __new__(cls, *values: Any, **kwargs: Any) -> Self:
        if kwargs and dataclasses.is_dataclass(cls):
            known = _arguments_of(cls)
            for name in kwargs:
                if name not in known and "__init__" in vars(cls):
                    raise TypeError(_unknown(cls, name, known))
        return super().__new__(cls)


def _arguments_of(kind: Any) -> list[str]:
    return [field.name for field in dataclasses.fields(kind) if field.init]


def _unknown(kind: type, name: str, known: list[str]) -> str:
    """Return the error text for an unknown argument: the class that has it, or the nearest name."""
    owners = [each for each in SuggestsArguments._ELSEWHERE if name in _arguments_of(each)]
    if owners:
        return f"{kind.__name__} has no {name!r}: it is an argument of dure.{owners[0].__name__}"
    return f"{kind.__name__} has no {name!r}{suggestion(name, known)}"


class CheckedSettings(SuggestsArguments):
    """Base of settings whose `__post_init__` may meet values of a wrong type.

    An error that such a value causes is replaced by the error of `check_fields`.
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


class NamedSettings(CheckedSettings):
    """Base of settings that are written as text, by their name: "krum:1"; they check ranges."""

    name: ClassVar[str]

    def __post_init__(self) -> None:
        check_ranges(self, named=True)


@dataclasses.dataclass(frozen=True)
class Range:
    """Interval of the valid numbers of a field, in the field's metadata.

    has_low, has_high: whether the ends are valid numbers too.
    """

    low: float
    high: float = math.inf
    has_low: bool = True
    has_high: bool = True

    def __contains__(self, value: float) -> bool:
        # NaN is in no range.
        above = self.low <= value if self.has_low else self.low < value
        return above and (value <= self.high if self.has_high else value < self.high)

    def __str__(self) -> str:
        if self.high == math.inf:
            finite = "" if self.has_high else " and finite"
            return (f"{self.low} or more" if self.has_low else f"greater than {self.low}") + finite
        left, right = "[" if self.has_low else "(", "]" if self.has_high else ")"
        return f"in {left}{self.low}, {self.high}{right}"


def at_least(low: float, finite: bool = False) -> dict[str, Range]:
    """Return the metadata of a field whose numbers are at least `low`."""
    return {_RANGE: Range(low, has_high=not finite)}


def above(low: float, finite: bool = False) -> dict[str, Range]:
    """Return the metadata of a field whose numbers are greater than `low`."""
    return {_RANGE: Range(low, has_low=False, has_high=not finite)}


def between(low: float, high: float, ends: str = "[]") -> dict[str, Range]:
    """Return the metadata of a field whose numbers are in an interval.

    ends: "[" and "]" include the low and the high end, "(" and ")" do not.
    """
    return {_RANGE: Range(low, high, has_low=ends[0] == "[", has_high=ends[1] == "]")}


def check_ranges(settings: Any, named: bool = False) -> None:
    """Raise ValueError for a number outside the range of its field.

    The default value of a field is valid, such as None for no limit. named: whether the error
    begins with the settings' name.
    """
    kind: Any = type(settings)
    for field, valid in _ranges_of(kind):
        value = getattr(settings, field.name)
        if value is not field.default and value not in valid:
            start = f"{settings.name}: " if named else ""
            raise ValueError(f"{start}{field.name} is {value}, but it has to be {valid}")


@functools.lru_cache(256)
def _ranges_of(kind: Any) -> list[tuple[dataclasses.Field[Any], Range]]:
    """Return the fields that have a range; a field that a subclass declares again keeps it."""
    ranges: dict[str, Range] = {}
    for base in reversed(kind.__mro__):
        for field in vars(base).get("__dataclass_fields__", {}).values():
            if _RANGE in field.metadata:
                ranges[field.name] = field.metadata[_RANGE]
    return [(each, ranges[each.name]) for each in dataclasses.fields(kind) if each.name in ranges]


def check_fields(thing: Any, limited: bool = True) -> None:
    """Raise ValueError for a field of a dataclass whose value does not have the field's type.

    limited: whether numbers beyond the countable range, or that overflow, are refused.
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
    """Raise ValueError for a value that does not have the type `hint`."""
    if not _fits(value, hint):
        raise ValueError(f"{name} is {shown(value)}, but it has to be {_in_words(hint)}")


def check_path(name: str, path: Any, optional: bool = False) -> None:
    """Raise ValueError for a value that is not a path."""
    if not isinstance(path, (str, os.PathLike)) and not (optional and path is None):
        raise ValueError(f"{name} is {shown(path)}, but it has to be a path")


def shown(value: Any) -> str:
    """Return an invalid value as text for an error."""
    text = repr(value)
    # For a tensor or a dataset the type is clearer than the content.
    if len(text) > 60 or "\n" in text:
        return f"a {type(value).__name__}"
    return text


@functools.lru_cache(256)
def _hints_of(kind: Any) -> dict[str, Any]:
    """Return the types of a class's fields; empty if they cannot be evaluated."""
    try:
        return typing.get_type_hints(kind)
    except Exception:
        return {}


def _check_size(name: str, value: Any) -> None:
    if isinstance(value, bool):
        return
    if isinstance(value, int) and abs(value) > LARGEST_COUNT:
        raise ValueError(
            f"{name} is {value}, which is too large for a count: give a smaller number"
        )
    if isinstance(value, float) and math.isnan(value):
        raise ValueError(f"{name} is {value}, which is not a number")
    if isinstance(value, float) and LARGEST_NUMBER < abs(value) < math.inf:
        raise ValueError(f"{name} is {value}, which would cause overflow: give a smaller number")


def _fits(value: Any, hint: Any) -> bool:
    origin = typing.get_origin(hint)
    if origin in (Union, types.UnionType):
        return any(_fits(value, one) for one in typing.get_args(hint))
    if origin is Literal:
        # The setting itself refuses an unknown word, with the list and the nearest word.
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
        if not isinstance(value, Sequence) or isinstance(value, str):
            return False
        return _fit_in_turn(value, typing.get_args(hint))
    if origin in (dict, Mapping):
        if not isinstance(value, Mapping):
            return False
        keys, values = typing.get_args(hint) or (Any, Any)
        return all(_fits(key, keys) and _fits(one, values) for key, one in value.items())
    if origin is Callable:
        return callable(value)
    try:
        return isinstance(value, hint) if isinstance(hint, type) else True
    except TypeError:  # Any, a protocol, a TypedDict: nothing that can be asked
        return True


def _fit_in_turn(values: Sequence[Any], hints: tuple[Any, ...]) -> bool:
    """Return whether the elements of a sequence have the types of its hint."""
    # tuple[str, ...], list[str], Sequence[str]: each element is alike.
    if len(hints) == 1 or hints[1:] == (...,):
        return all(_fits(value, hints[0]) for value in values)
    return not hints or (len(values) == len(hints) and all(map(_fits, values, hints)))


def _in_words(hint: Any) -> str:
    origin = typing.get_origin(hint)
    if origin in (Union, types.UnionType):
        return " or ".join(_in_words(one) for one in typing.get_args(hint))
    if origin is Literal:
        return " or ".join(repr(one) for one in typing.get_args(hint))
    if hint in _WORDS:
        return _WORDS[hint]
    inner = typing.get_args(hint)
    if origin in (tuple, list) or origin is Sequence:
        if len(inner) == 1 or inner[1:] == (...,):
            return f"a sequence, each element of which is {_in_words(inner[0])}"
        return f"a sequence of {len(inner)}: {', '.join(map(_in_words, inner))}"
    kind = origin if isinstance(origin, type) else hint
    return f"a {kind.__name__}" if isinstance(kind, type) else str(hint)
