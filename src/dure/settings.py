"""Settings written as text, for command lines and run folders: `dirichlet:0.3:10`.

The name comes first, then the values. A setting is a frozen dataclass whose fields are numbers or
words and all have a default. A setting of dure has a `name`. A user's setting is named by its
reference (`dure.references`): `my_parts.py:Mine:0.3`, or `package.module:Mine:0.3`. `read` is the
inverse of `write`; trailing default values are left out, except the first value.

Reading a reference runs the user's code. Therefore a folder from another party is displayed by its
texts alone: only commands of the user (`train`, `compare`, `resume`) read them.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, TypeVar

from dure.errors import suggestion as suggestion
from dure.references import is_part_of_dure, is_reference, load, reference_of

Setting = TypeVar("Setting")

_UNITS = {"": 1, "k": 10**3, "m": 10**6, "g": 10**9, "t": 10**12}
_BINARY = {"ki": 2**10, "mi": 2**20, "gi": 2**30, "ti": 2**40}

_KINDS = {int: "an integer", float: "a number", str: "a word"}


def write(setting: Any, without: Collection[str] = ()) -> str:
    """Return the text that `read` reads: the name and the fields.

    Trailing default values after the first field are left out. without: fields that are written in
    another way.
    """
    fields = [field for field in dataclasses.fields(setting) if field.name not in without]
    values = [getattr(setting, field.name) for field in fields]
    while len(values) > 1 and values[-1] == fields[len(values) - 1].default:
        values.pop()
    return ":".join([name_of(type(setting)), *map(str, values)])


def name_of(kind: type[Any]) -> str:
    """Return the first word of the text of a setting of this class.

    A class of a script or a function, which no reference can find, has its qualified name.
    """
    if is_part_of_dure(kind):
        name: str = kind.name
        return name
    return reference_of(kind) or kind.__qualname__


def can_be_read(setting: Any) -> bool:
    """Return whether the texts of a setting and of its inner settings find their classes again."""
    if not is_part_of_dure(type(setting)) and reference_of(type(setting)) is None:
        return False
    values = [getattr(setting, field.name) for field in dataclasses.fields(setting)]
    return all(map(can_be_read, filter(dataclasses.is_dataclass, values)))


def listed(namespace: Mapping[str, Any], base: type[Setting]) -> dict[str, type[Setting]]:
    """Return the settings in a module's namespace by name: named subclasses of `base`.

    The first of two with the same name counts, and creates the other when needed.
    """
    found: dict[str, type[Setting]] = {}
    for kind in namespace.values():
        # In vars: a subclass that only inherits its name is not a named setting.
        if isinstance(kind, type) and issubclass(kind, base) and "name" in vars(kind):
            found.setdefault(kind.name, kind)  # type: ignore[attr-defined]
    return found


def parse_fields(thing: Any, readers: Mapping[str, Callable[[str], Any]]) -> None:
    """Parse the fields of a frozen dataclass given as text, in its `__post_init__`."""
    for field, reader in readers.items():
        value = getattr(thing, field)
        if isinstance(value, str):
            # A frozen dataclass can only be changed in this way, during its construction.
            object.__setattr__(thing, field, reader(value))


def read_bytes(text: str) -> int:
    """Return bytes of a text: "4096", "100 kB", "100MB", "1.5GB", "64MiB"; kB is 1,000 bytes.

    Raises ValueError for a text that is not a size.
    """
    found = re.fullmatch(r"(\d+(?:_\d+)*(?:\.\d+)?)\s*([kmgt]i?)?b?", text.strip().lower())
    if found is None:
        raise ValueError(f"{text!r} is not a size: write bytes, 100MB or 1.5GB")
    return round(float(found[1]) * {**_UNITS, **_BINARY}[found[2] or ""])


def read(
    text: str,
    known: Mapping[str, type[Setting]],
    what: str,
    base: type[Setting] | None = None,
) -> Setting:
    """Return the setting that `text` names.

    known: the classes by name. what: the word for them, such as "partition". base: required base
    class of a user's class; None allows no user's class. Raises ValueError for an unknown name, for
    a reference that cannot be followed, for too many values, and for values of the wrong type.
    """
    kind, values = kind_of(text, known, what, base)
    return filled(kind, values, text, what)


def kind_of(
    text: str,
    known: Mapping[str, type[Setting]],
    what: str,
    base: type[Setting] | None = None,
) -> tuple[type[Setting], list[str]]:
    """Return the class that `text` names and the values that follow, as strings.

    Arguments and errors as in `read`, which fills in the values.
    """
    name, *values = text.strip().split(":")
    if name in known:
        return known[name], values
    if base is not None and is_reference(text):
        # A reference has a colon itself: the first value is the name of the class.
        return load(f"{name}:{values[0]}", base), values[1:]
    own = ", or path/to/file.py:Class" if base is not None else ""
    raise ValueError(f"there is no {what} {name!r}{suggestion(name, known)}{own}")


def filled(
    kind: type[Setting],
    values: Sequence[str],
    text: str,
    what: str,
    given: Mapping[str, Any] | None = None,
) -> Setting:
    """Return the setting with these values, in the order of its fields.

    Args:
        kind: class of the setting.
        values: values as text.
        text: the whole text, for errors.
        what: the word for such settings, for errors.
        given: fields that are not written as values.

    Raises:
        ValueError: too many values, or a value of the wrong type.
    """
    arguments = dict(given or {})
    fields = [field for field in dataclasses.fields(kind) if field.name not in arguments]  # type: ignore[arg-type]
    form = ":".join([name_of(kind), *(field.name.upper() for field in fields)])
    if len(values) > len(fields):
        raise ValueError(f"the {what} {text!r} has too many values: write {form}")
    for field, value in zip(fields, values, strict=False):
        # The default determines the type: hints are strings here and would need evaluation.
        of: type[Any] = type(field.default)
        if of not in _KINDS:
            raise ValueError(
                f"the {what} {text!r}: {field.name} cannot be written, because its default is "
                "neither a number nor a word"
            )
        try:
            arguments[field.name] = of(value)
        except ValueError as error:
            raise ValueError(
                f"the {what} {text!r}: {value!r} is not {_KINDS[of]}; write {form}"
            ) from error
    return kind(**arguments)
