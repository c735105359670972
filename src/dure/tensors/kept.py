"""What a model keeps in Python from one forward pass to the next: a trace has none of it.

A trace has what a pass computes from parameters, buffers and inputs. What forward keeps elsewhere,
such as a flag, a counter, a list or a hidden state, is in the trace as it was when that was made.

    first = kept_by(model)      after a pass
    again = kept_by(model)      after the same pass once more, from the same buffers, inputs, draws
    first_change(first, again)  the name of what the second pass has left otherwise

A value that a pass computes from its inputs alone, such as an attention's map that is kept to be
looked at, or a cache that the first pass has filled, is then as it was. What counts, grows, flips
or remembers is not, whether it has an influence yet or only from some step on.

Looked at are the attributes of the model's modules and of objects in them, the attributes of the
user's classes, what the user's functions hold (closures, defaults, hooks), and the global names of
the files in which these are. Torch, the standard library and libraries are not
(`dure.machine.libraries`); the package of the model's class is, where nobody knows whether it is a
library. What raises an error when it is looked at is passed over, and a mapping that computes its
entries is looked at as any other object.
"""

from __future__ import annotations

import itertools
import random
import sys
from collections import deque
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from enum import Enum
from functools import partial
from pathlib import Path
from types import FunctionType, MethodType, ModuleType
from typing import Any, NamedTuple

import numpy
import torch
from torch import Tensor, nn

from dure.machine.libraries import is_copied, is_elsewhere
from dure.references import sources

Kept = Mapping[str, Any]
"""Values by name, so that they can be compared later."""

MANY = 100_000
"""Values that are looked at, at most: nobody's state, but somebody's vocabulary."""

LONG = 1 << 20
"""Elements of a tensor or an array from which on it is not copied.

A longer tensor is taken for changed if another is in its place or it was written into.
"""

_ATOMS = (
    *(bool, int, float, complex, str, bytes, type(None), Enum, numpy.generic),
    *(torch.dtype, torch.device, torch.Size, torch.layout, torch.memory_format),
)

_HELD_BY_TORCH = frozenset({"_parameters", "_buffers", "_modules", "training"})
"""Attributes of a module that are looked at by name, or travel with the model."""

_STANDARD = frozenset(vars(nn.Module()))
"""Attributes that every module has."""

_OPAQUE = frozenset(
    {"torch", "numpy", "dure", "logging", "threading", "weakref", "importlib", "_pytest"}
)
"""Packages of whose objects nothing is looked at: their own caches, locks and records."""

_PLAIN: tuple[tuple[type, Callable[[Any], Iterable[tuple[Any, Any]]]], ...] = (
    (dict, dict.items),
    (list, lambda value: enumerate(list.__iter__(value))),
    (tuple, lambda value: enumerate(tuple.__iter__(value))),
    (set, lambda value: enumerate(set.__iter__(value))),
    (frozenset, lambda value: enumerate(frozenset.__iter__(value))),
    (deque, lambda value: enumerate(deque.__iter__(value))),
)
"""How the entries of containers are read: without methods of a subclass, which may compute."""

_CONTAINERS = tuple(kind for kind, _ in _PLAIN)


class _Values(NamedTuple):
    """A tensor as it was: itself, its version, and its values where they are few."""

    tensor: Tensor
    version: int
    copy: Tensor | None


def kept_by(model: nn.Module, known: Collection[str]) -> Kept:
    """What the model and its code keep in Python, by name.

    known: the names of the buffers that a trace has; others, which a pass has made, are kept too.
    """
    return _Walk(model, frozenset(known)).found


def first_change(before: Kept, after: Kept) -> str | None:
    """The name of the first value that is not what it was; None where all are."""
    return next(changes(before, after), None)


def changes(before: Kept, after: Kept) -> Iterator[str]:
    """The names of all values that are not what they were."""
    for name, value in after.items():
        if name not in before or not _alike(before[name], value):
            yield name
    yield from (name for name in before if name not in after)


class _Walk:
    """A walk through everything that a model keeps; `found` are the values."""

    def __init__(self, model: nn.Module, known: frozenset[str]) -> None:
        self.found: dict[str, Any] = {}
        # Values are kept while the walk lasts, so that no other one gets their ids.
        self._seen: dict[int, Any] = {}
        self._package = _package(type(model))
        self._libraries: dict[str, bool] = {}
        """Whether the files that were asked for are a library's."""
        buffers = [(name, buffer) for name, buffer in model.named_buffers() if name in known]
        for name, tensor in [*model.named_parameters(), *buffers]:
            self._seen[id(tensor)] = tensor
            for own, value in vars(tensor).items():
                self._value(f"{name}.{own}", value)
        functions: list[FunctionType] = []
        for name, module in model.named_modules():
            self._module(name, module)
            functions += self._classes(type(module))
        self._files(functions)

    def _module(self, name: str, module: nn.Module) -> None:
        self._seen[id(module)] = module
        path = f"{name}." if name else ""
        for own, value in module._buffers.items():
            self._value(f"{path}{own}", value)
        for own, value in vars(module).items():
            # Most of what every module has, such as hooks, is empty.
            if own not in _HELD_BY_TORCH and (own not in _STANDARD or value):
                self._value(f"{path}{own}", value)

    def _classes(self, kind: type) -> list[FunctionType]:
        """The attributes of the user's classes; their functions are returned."""
        functions: list[FunctionType] = []
        for each in kind.__mro__:
            if id(each) in self._seen or not self._is_users(each):
                continue
            self._seen[id(each)] = each
            for name, value in vars(each).items():
                if isinstance(value, FunctionType):
                    functions.append(value)
                if not name.startswith("__") or isinstance(value, FunctionType):
                    self._value(f"{each.__name__}.{name}", value)
        return functions

    def _files(self, functions: Iterable[FunctionType]) -> None:
        """The global names of the files in which these functions are, and of files they import."""
        waiting = deque(function.__globals__ for function in functions)
        while waiting:
            names = waiting.popleft()
            if id(names) in self._seen:
                continue
            self._seen[id(names)] = names
            file = Path(str(names.get("__file__", names.get("__name__")))).name
            for name, value in list(names.items()):
                if name.startswith("__"):
                    continue
                if isinstance(value, ModuleType) and self._is_users(value):
                    waiting.append(vars(value))
                elif isinstance(value, type):
                    self._classes(value)
                else:
                    self._value(f"{name} of {file}", value)
                if isinstance(value, FunctionType) and self._is_users(value):
                    waiting.append(value.__globals__)

    def _value(self, name: str, value: Any) -> None:
        try:
            self._look_at(name, value)
        # Anything may run when an object is looked at: an import, a proxy without its context.
        except Exception:
            return

    def _look_at(self, name: str, value: Any) -> None:
        if isinstance(value, _ATOMS):
            self.found[name] = value
            return
        if id(value) in self._seen or len(self.found) > MANY:
            return
        self._seen[id(value)] = value
        if isinstance(value, Tensor):
            self.found[name] = _seen(value)
        elif isinstance(value, numpy.ndarray):
            self.found[name] = value.copy() if value.size <= LONG else id(value)
        elif (state := _state_of_generator(value)) is not None:
            self.found[name] = state
        elif isinstance(value, itertools.count):
            self.found[name] = repr(value)
        elif isinstance(value, _CONTAINERS) or _is_plain_mapping(value):
            self._container(name, value)
        elif isinstance(value, (FunctionType, MethodType, partial)):
            self._function(name, value)
        elif isinstance(value, nn.Module):
            self._module(name, value)
        elif not isinstance(value, (type, ModuleType)) and _package(type(value)) not in _OPAQUE:
            self._object(name, value)

    def _container(self, name: str, value: Any) -> None:
        # It may change while it is looked at, by another thread: then it is passed over.
        content = list(_entries(value))
        self.found[f"the length of {name}"] = len(content)
        for key, entry in content:
            self._value(f"{name}[{key!r}]" if isinstance(key, _ATOMS) else f"{name}[…]", entry)
        # A subclass may keep more than its entries.
        self._object(name, value)

    def _function(self, name: str, value: Any) -> None:
        if isinstance(value, MethodType):
            self._value(name, value.__self__)
            return
        if isinstance(value, partial):
            self._value(name, value.func)
            self._container(f"the arguments of {name}", [*value.args, *value.keywords.values()])
            return
        if not self._is_users(value):
            return
        own = value.__name__
        for variable, cell in zip(
            value.__code__.co_freevars, value.__closure__ or (), strict=False
        ):
            try:
                self._value(f"{variable} of {own}", cell.cell_contents)
            except ValueError:  # not bound yet
                continue
        defaults = [*(value.__defaults__ or ()), *(value.__kwdefaults__ or {}).values()]
        for default in defaults:
            self._value(f"a default of {own}", default)
        for attribute, content in vars(value).items():
            self._value(f"{own}.{attribute}", content)

    def _is_users(self, what: type | ModuleType | Callable[..., Any]) -> bool:
        """Whether a class, function or module was written by the user, and is of no library."""
        name, file = _file_of(what)
        package = name.partition(".")[0]
        if not package or package in _OPAQUE:
            return False
        if file is None:
            # typed in, as in a notebook; what has no file and another name was built in
            return name == "__main__"
        if file not in self._libraries:
            path = Path(file).resolve()
            known = package == self._package or name in sources()
            self._libraries[file] = is_copied(path) or (not known and is_elsewhere(path))
        return not self._libraries[file]

    def _object(self, name: str, value: Any) -> None:
        slots = (
            slot for kind in type(value).__mro__ for slot in _names(vars(kind).get("__slots__", ()))
        )
        own = {slot: getattr(value, slot) for slot in slots if _holds(value, slot)}
        own |= getattr(value, "__dict__", {})
        for attribute, content in own.items():
            self._value(f"{name}.{attribute}", content)


def _entries(value: Any) -> Iterable[tuple[Any, Any]]:
    read = next((read for kind, read in _PLAIN if isinstance(value, kind)), None)
    return value.items() if read is None else read(value)


def _is_plain_mapping(value: Any) -> bool:
    """Whether a mapping shows its entries as they are: Python's own, or one without attributes."""
    if not isinstance(value, Mapping):
        return False
    kind = type(value)
    has_attributes = hasattr(value, "__dict__") or any(
        vars(k).get("__slots__") for k in kind.__mro__
    )
    return _package(kind) in sys.stdlib_module_names or not has_attributes


def _names(slots: Any) -> Iterable[str]:
    return (slots,) if isinstance(slots, str) else tuple(slots)


def _holds(value: Any, slot: str) -> bool:
    # A slot of a name with two underscores has another name in the object; those are left out.
    return not slot.startswith("__") and hasattr(value, slot)


def _seen(tensor: Tensor) -> _Values:
    plain = tensor.layout is torch.strided and tensor.device.type != "meta"
    copied = tensor.detach().clone() if plain and tensor.numel() <= LONG else None
    return _Values(tensor, _version(tensor), copied)


def _version(tensor: Tensor) -> int:
    return 0 if tensor.is_inference() else tensor._version


def _state_of_generator(value: Any) -> Any:
    """The state of a generator of random numbers; None for anything else."""
    if isinstance(value, random.Random):
        return value.getstate()
    if isinstance(value, numpy.random.Generator):
        return repr(value.bit_generator.state)
    if isinstance(value, numpy.random.RandomState):
        return repr(value.get_state(legacy=False))
    if isinstance(value, torch.Generator):
        return tuple(value.get_state().tolist())
    return None


def _alike(one: Any, other: Any) -> bool:
    if isinstance(one, _Values) and isinstance(other, _Values):
        if one.copy is not None and other.copy is not None:
            return _same_values(one.copy, other.copy)
        return one.tensor is other.tensor and one.version == other.version
    if isinstance(one, numpy.ndarray) and isinstance(other, numpy.ndarray):
        return one.dtype == other.dtype and one.tobytes() == other.tobytes()
    if type(one) is not type(other):
        return False
    # What is not a number is itself.
    return bool(one == other) or (one != one and other != other)


def _same_values(one: Tensor, other: Tensor) -> bool:
    """Whether they are equal, but for how a sum over threads may be rounded."""
    if one.shape != other.shape or one.dtype != other.dtype:
        return False
    if not (one.is_floating_point() or one.is_complex()):
        return torch.equal(one, other)
    eps = torch.finfo(one.dtype).eps
    return bool(torch.allclose(one, other, rtol=16 * eps, atol=0.0, equal_nan=True))


def _package(what: Any) -> str:
    module: str = getattr(what, "__module__", None) or ""
    return module.partition(".")[0]


def _file_of(what: type | ModuleType | Callable[..., Any]) -> tuple[str, str | None]:
    """The module and the file in which a class, function or module was written."""
    if isinstance(what, ModuleType):
        names: Mapping[str, Any] = vars(what)
    elif isinstance(what, FunctionType):
        names = what.__globals__
    else:
        names = _globals_of(what)
    file = names.get("__file__")
    return str(names.get("__name__", "")), None if file is None else str(file)


def _globals_of(kind: Any) -> Mapping[str, Any]:
    """The global names of the file in which a class was written."""
    module = sys.modules.get(getattr(kind, "__module__", None) or "")
    return {} if module is None else vars(module)
