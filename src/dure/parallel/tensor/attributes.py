"""Integers of a module that a plan divides, also integers in an object that the module holds.

    Attributes("heads")                                of the module itself
    Attributes("config.num_attention_heads")           of an object that it holds
    Attributes("sizes.heads", "shape.0")               of a mapping, of a tuple or list

Other modules may hold the same object, for example a config that all modules of a model share. So
the module gets its own copy with the divided number, and the object of the other modules does not
change.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from dure.parallel.tensor.plan_entry import DivisionContext, Positive, ValidatedEntry


@dataclass(frozen=True)
class Attributes(ValidatedEntry):
    """Plan entry: integers of a module are divided.

    names: names of the attributes, with dots for an attribute of an object that the module holds.
    units: the number of units, such as key heads. The integers are then divided by the number of
    ranks that share a unit, as for the number of queries per key; None: by the degree.
    """

    names: tuple[str, ...]
    units: Positive | None = None

    def __init__(self, *names: str, units: int | None = None) -> None:
        # `Attributes("heads", "width")`: positional names, which a dataclass does not generate.
        object.__setattr__(self, "names", names)
        object.__setattr__(self, "units", units)
        self.__post_init__()

    def change(self, name: str, module: nn.Module, at: DivisionContext) -> Callable[[], None]:
        """Check the integers of a module, and return a function that divides them.

        Raises ValueError for a missing integer, or an integer that the divisor does not divide.
        """
        where = name or "the model"
        parts = {}
        degree = at.group.size
        by = f"the degree {degree}: choose a degree that divides it"
        if self.units is not None:
            # how many ranks share a unit; with more units than ranks none is shared, and nothing is
            # divided
            degree = max(1, degree // self.units)
            by = (
                f"the {degree} ranks that would share one of {self.units} units: choose a smaller "
                "degree"
            )
        for each in self.names:
            value = _reached(module, each.split("."))
            if not isinstance(value, int) or isinstance(value, bool):
                raise ValueError(f"{where} has no integer {each!r} that could be divided")
            if value % degree:
                raise ValueError(f"{where} has {each} = {value}, not a multiple of {by}")
            parts[each] = value // degree
            _check_holders(where, module, each)
            _check_writes(where, module, each, value // degree)

        # Deferred: a plan is checked as a whole before anything is changed.
        def divide() -> None:
            for each, part in parts.items():
                _put(module, each, part)

        return divide


def _part(holder: Any, name: str) -> Any:
    """Return the member of an object with a name or index; None if there is no such member."""
    if isinstance(holder, Mapping):
        return holder.get(name)
    # A named tuple has both: names come first.
    if isinstance(holder, Sequence) and name.isdecimal():
        return holder[int(name)] if int(name) < len(holder) else None
    return getattr(holder, name, None)


def _reached(holder: Any, path: Sequence[str]) -> Any:
    for name in path:
        holder = _part(holder, name)
    return holder


def _check_holders(where: str, module: nn.Module, name: str) -> None:
    """Raise ValueError if an object on the path is a module, because modules have plan entries."""
    path = name.split(".")
    for place in range(1, len(path)):
        holder = _reached(module, path[:place])
        if isinstance(holder, nn.Module | Tensor):
            raise ValueError(
                f"{where} has {'.'.join(path[:place])!r}, a {type(holder).__name__}: use "
                f"Attributes({'.'.join(path[place:])!r}) for that module"
            )


def _check_writes(where: str, module: nn.Module, name: str, value: int) -> None:
    """Raise ValueError if the number cannot be written."""
    first, *rest = name.split(".")
    try:
        _changed(_part(module, first), rest, value)
    except Exception as error:
        raise ValueError(
            f"{where} has {name}, which cannot be changed ({type(error).__name__}: {error}): let "
            "the module hold the number as an attribute"
        ) from error


def _put(module: nn.Module, name: str, value: int) -> None:
    first, *rest = name.split(".")
    setattr(module, first, _changed(_part(module, first), rest, value))


def _changed(holder: Any, path: Sequence[str], value: int) -> Any:
    """Return a copy of an object that the module holds, with the number at the end of the path."""
    if not path:
        return value
    name, *rest = path
    return _with(holder, name, _changed(_part(holder, name), rest, value))


def _with(holder: Any, name: str, value: Any) -> Any:
    if isinstance(holder, tuple):
        if not name.isdecimal():
            return holder._replace(**{name: value})  # type: ignore[attr-defined]
        values = [*holder[: int(name)], value, *holder[int(name) + 1 :]]
        # a named tuple takes its values as separate arguments
        return type(holder)(*values) if hasattr(holder, "_replace") else type(holder)(values)
    made = copy.copy(holder)
    if isinstance(holder, Mapping):
        made[name] = value
    elif isinstance(holder, Sequence) and name.isdecimal():
        made[int(name)] = value
    else:
        try:
            setattr(made, name, value)
        except AttributeError:
            # a frozen dataclass; writing is safe because no other code has the copy yet
            object.__setattr__(made, name, value)
    return made
