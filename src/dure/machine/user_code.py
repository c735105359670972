"""Run a user's own files in other processes, with their current values.

A file that was run by its path (`dure.references`), and modules that it has imported from its
folder, cannot be imported by another process. The other process of this machine therefore runs the
file itself, once, so that the effects of running it occur there too: an operator or a class that it
registers, a function that it replaces. Later changes travel by value: the values of global names
that functions and methods refer to, and attributes of classes. So

    functions      by value, with the global names of the module that was run there
    classes        the module's own, which registered it; with the attributes set since
    operators      and other objects that exist once in a process, and functions that a library's
                   decorator has made: the module's own
    all else       by value, as everywhere

A file that was edited since it was run is not run elsewhere, because its content differs by now:
all of it travels by value.
"""

from __future__ import annotations

import dis
import enum
import functools
import importlib
import inspect
import io
import sys
import types
from collections.abc import Callable, Iterator, Sequence
from typing import Any, TypeVar

import cloudpickle
import numpy as np
import torch

from dure import references
from dure.errors import warn

Value = TypeVar("Value")

_ONCE_IN_A_PROCESS = ("torch.library", "torch._library", "torch._ops")
"""Modules whose objects represent a registration: a copy would register nothing."""


class Pickler(cloudpickle.Pickler):  # type: ignore[misc]
    """Pickler for another process of this machine, which runs the user's files itself."""

    def __init__(self, *given: Any, **named: Any) -> None:
        super().__init__(*given, **named)
        self._sources: dict[str, references.LoadedModule | None] = {}

    def reducer_override(self, obj: Any) -> Any:
        if isinstance(obj, type):
            source = self._source_of(obj.__module__)
            if source is not None and _at(source.module, obj.__qualname__) is obj:
                return _found, (source.place, obj.__qualname__), _state(obj), None, None, _set_state
        elif isinstance(obj, types.FunctionType):
            source = self._source_of(obj.__module__)
            if source is not None and obj.__globals__ is vars(source.module):
                make, (code, _, *others), *rest = super().reducer_override(obj)
                return make, (code, _Names(source.place), *others), *rest
            # What a library's decorator has made, such as `functools.singledispatch`.
            if source is not None and _at(source.module, obj.__qualname__) is obj:
                return _found, (source.place, obj.__qualname__)
        elif isinstance(obj, types.ModuleType):
            source = self._source_of(obj.__name__)
            if source is not None and source.module is obj:
                return _module, (source.place,), _changed(source), None, None, _set_names
        elif type(obj).__module__.startswith(_ONCE_IN_A_PROCESS):
            for name in list(references.sources()):
                source = self._source_of(name)
                held = source and next(
                    (each for each, value in vars(source.module).items() if value is obj), None
                )
                if source and held:
                    return _found, (source.place, held)
        return super().reducer_override(obj)

    def _source_of(self, module: str) -> references.LoadedModule | None:
        """Return the file of a module that was run by its path, if the file is unchanged since."""
        if module not in self._sources:
            source = references.sources().get(module)
            unchanged = source is not None and source.is_unchanged()
            self._sources[module] = source if unchanged else None
        return self._sources[module]


def dumps(thing: Any) -> bytes:
    """Return the pickle of a thing, for another process of this machine."""
    stream = io.BytesIO()
    Pickler(stream, protocol=5).dump(thing)
    return stream.getvalue()


class UserModules:
    """Modules that another process runs before it unpickles the objects that follow."""

    def __init__(self, places: Sequence[references.ModuleLocation | str]) -> None:
        self.places = tuple(places)

    def __reduce__(self) -> tuple[Any, ...]:
        return _brought, (self.places,)


def user_modules_of(reference: str) -> UserModules:
    """Return the module that a reference has found in this process; empty for dure's own names.

    Warns if the file was edited since it was run: other processes then get its definitions by
    value, and do not run the file.
    """
    place = reference.rpartition(":")[0]
    if not place:
        return UserModules(())
    module = references.loaded(reference)
    source = None if module is None else references.sources().get(module.__name__)
    if module is None or (source is not None and not source.is_unchanged()):
        warn(
            f"{place} was changed after it was run: other processes receive the definitions of "
            "this process and do not run the file"
        )
        return UserModules(())
    return UserModules((module.__name__ if source is None else source.place,))


def call_with_modules(files: UserModules, program: Callable[..., Value], *arguments: Any) -> Value:
    """Call a program; unpickling this call runs the files before the program is unpickled."""
    return program(*arguments)


def _brought(places: Sequence[references.ModuleLocation | str]) -> UserModules:
    for place in places:
        if isinstance(place, str):
            importlib.import_module(place)
        else:
            references.run_again(place)
    return UserModules(places)


class _Names:
    """Global names of a user's file; unpickled, the names of the file that was run there."""

    def __init__(self, place: references.ModuleLocation) -> None:
        self.place = place

    def __reduce__(self) -> tuple[Any, ...]:
        return _names, (self.place,)


_module = references.run_again


def _set_names(module: types.ModuleType, values: dict[str, Any]) -> None:
    vars(module).update(values)


def _changed(source: references.LoadedModule) -> dict[str, Any]:
    """Return the names of a module whose values differ from those directly after its run."""
    return {
        name: value
        for name, value in vars(source.module).items()
        if not name.startswith("__")
        and (value is not source.names.get(name) or _may_have_changed(value))
    }


def _names(place: references.ModuleLocation) -> dict[str, Any]:
    return vars(references.run_again(place))


def _found(place: references.ModuleLocation, name: str) -> Any:
    found = _at(references.run_again(place), name)
    if found is None:
        raise ValueError(f"{place.path} has no {name} when it is run in another process")
    return found


def _at(module: types.ModuleType, qualified: str) -> Any:
    """Return the module's object under a name such as Outer.Inner, or None."""
    found: Any = module
    for name in qualified.split("."):
        found = getattr(found, name, None)
    return found


def _state(cls: type) -> tuple[dict[str, Any], dict[str, Any], list[type]]:
    """Return a class's state: used global names, attributes set since, and related user classes.

    The global names are those to which the methods refer; the related classes are base classes and
    inner classes.
    """
    source = references.sources()[cls.__module__]
    names = vars(source.module)
    used = {name for function in _functions(cls) for name in _globals_of(function.__code__)}
    values = {name: names[name] for name in sorted(used & names.keys()) if _travels(names[name])}
    related = [*cls.__mro__[1:], *(value for value in vars(cls).values() if _is_inside(value, cls))]
    was = source.attributes.get(cls.__qualname__, {})
    attributes = {
        name: value
        for name, value in vars(cls).items()
        if not name.startswith("__") and (value is not was.get(name) or _may_have_changed(value))
    }
    return (
        values,
        # The members of an enumeration are its own, and cannot be set.
        {} if issubclass(cls, enum.Enum) else attributes,
        [each for each in related if each.__module__ in references.sources()],
    )


def _travels(value: Any) -> bool:
    """Return whether a value is sent: every value except modules that are not the user's own."""
    return not isinstance(value, types.ModuleType) or value.__name__ in references.sources()


def _is_inside(value: Any, cls: type) -> bool:
    return isinstance(value, type) and value.__qualname__.startswith(f"{cls.__qualname__}.")


_CHANGING = (list, dict, set, bytearray, types.SimpleNamespace, torch.Tensor, np.ndarray)
"""Classes of objects that are often modified after their creation, like the user's own classes."""


def _may_have_changed(value: Any) -> bool:
    """Return whether an object may have changed although its name still refers to it."""
    return isinstance(value, _CHANGING) or type(value).__module__ in references.sources()


def _set_state(cls: type, state: tuple[dict[str, Any], dict[str, Any], list[type]]) -> None:
    values, attributes, _ = state
    vars(sys.modules[cls.__module__]).update(values)
    for name, value in attributes.items():
        setattr(cls, name, value)


def _functions(cls: type) -> Iterator[types.FunctionType]:
    """Yield the functions that a class defines, unwrapped."""
    for value in vars(cls).values():
        for function in _inside(value):
            unwrapped = inspect.unwrap(function)
            if isinstance(unwrapped, types.FunctionType):
                yield unwrapped


def _inside(value: Any) -> list[Any]:
    if isinstance(value, property):
        return [each for each in (value.fget, value.fset, value.fdel) if each is not None]
    if isinstance(value, (staticmethod, classmethod)):
        return [value.__func__]
    if isinstance(value, (functools.cached_property, functools.partialmethod)):
        return [value.func]
    return [value] if isinstance(value, types.FunctionType) else []


def _globals_of(code: types.CodeType) -> set[str]:
    """Return the global names to which a function and the functions inside it refer."""
    names = {
        instruction.argval
        for instruction in dis.get_instructions(code)
        if instruction.opname in ("LOAD_GLOBAL", "STORE_GLOBAL", "DELETE_GLOBAL", "LOAD_NAME")
    }
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            names |= _globals_of(constant)
    return names
