"""State that a model keeps in Python between forward passes, which no trace contains.

A trace contains the computation from parameters, buffers and inputs. State that forward keeps
elsewhere, such as a flag, a counter, a list or a hidden state, is frozen in the trace at the value
of the time of tracing.

    first = python_state_of(model)  after a pass
    again = python_state_of(model)  after the same pass once more, from the same buffers, inputs,
                                    draws
    first_change(first, again)      the name of the first value that the second pass has changed

A value that depends on the inputs alone, such as an attention map kept for inspection or a cache
filled by the first pass, is equal after both passes. A value that counts, grows, flips or remembers
is not, whether the value influences the output already or only from a later step on.

Inspected are the attributes of the model's modules and of objects in the modules, the attributes of
the user's classes, the state of the user's functions (closures, defaults, hooks), and the global
names of the files that define these. Torch, the standard library and other libraries are not
inspected (`dure.machine.libraries`); the package of the model's class is inspected if the package
may not be a library. An object that raises an error during inspection is skipped. A mapping that
computes its entries is inspected like any other object.
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

from dure.machine.libraries import is_foreign_project, is_installed_copy
from dure.references import sources

PythonState = Mapping[str, Any]
"""Values by name, for a later comparison."""

MANY = 100_000
"""Maximum number of inspected values: no model's state is longer, though a vocabulary may be."""

LONG = 1 << 20
"""Elements of a tensor or an array above which no copy is made.

A longer tensor counts as changed if another tensor replaced it or if its version changed.
"""

_ATOMS = (
    *(bool, int, float, complex, str, bytes, type(None), Enum, numpy.generic),
    *(torch.dtype, torch.device, torch.Size, torch.layout, torch.memory_format),
)

_HELD_BY_TORCH = frozenset({"_parameters", "_buffers", "_modules", "training"})
"""Attributes of a module that are inspected by name elsewhere, or travel with the model."""

_STANDARD = frozenset(vars(nn.Module()))
"""Attributes that every module has."""

_OPAQUE = frozenset(
    {"torch", "numpy", "dure", "logging", "threading", "weakref", "importlib", "_pytest"}
)
"""Packages whose objects are not inspected: their caches, locks and records are internal."""

_PLAIN: tuple[tuple[type, Callable[[Any], Iterable[tuple[Any, Any]]]], ...] = (
    (dict, dict.items),
    (list, lambda value: enumerate(list.__iter__(value))),
    (tuple, lambda value: enumerate(tuple.__iter__(value))),
    (set, lambda value: enumerate(set.__iter__(value))),
    (frozenset, lambda value: enumerate(frozenset.__iter__(value))),
    (deque, lambda value: enumerate(deque.__iter__(value))),
)
"""Readers of the entries of containers, without methods of a subclass, which may compute."""

_CONTAINERS = tuple(kind for kind, _ in _PLAIN)


class _Values(NamedTuple):
    """Snapshot of a tensor: the tensor, its version, and a copy of the values if they are few."""

    tensor: Tensor
    version: int
    copy: Tensor | None


def python_state_of(model: nn.Module, known: Collection[str]) -> PythonState:
    """Return the Python state of the model and its code, by name.

    known: names of the buffers in the trace; buffers that a pass has created count as Python state.
    """
    return _Walk(model, frozenset(known)).found


def first_change(before: PythonState, after: PythonState) -> str | None:
    """Return the name of the first value that changed, or None."""
    return next(changes(before, after), None)


def changes(before: PythonState, after: PythonState) -> Iterator[str]:
    """Yield the names of all values that changed."""
    for name, value in after.items():
        if name not in before or not _alike(before[name], value):
            yield name
    yield from (name for name in before if name not in after)


class _Walk:
    """Traversal of the Python state of a model; `found` holds the values."""

    def __init__(self, model: nn.Module, known: frozenset[str]) -> None:
        self.found: dict[str, Any] = {}
        # Values stay referenced during the traversal, so that no other object gets their ids.
        self._seen: dict[int, Any] = {}
        self._package = _package(type(model))
        self._libraries: dict[str, bool] = {}
        """Whether a file belongs to a library, by file, for the files asked about so far."""
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
            # Standard attributes, such as hooks, are mostly empty; only non-empty values count.
            if own not in _HELD_BY_TORCH and (own not in _STANDARD or value):
                self._value(f"{path}{own}", value)

    def _classes(self, kind: type) -> list[FunctionType]:
        """Record the attributes of the user's classes and return their functions."""
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
        """Record the global names of the functions' files and of user files imported there."""
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
        # Inspection may run any code: an import, or a proxy outside its context.
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
        # Another thread may change the container meanwhile; the error then skips the container.
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
        """Return whether a class, function or module is the user's code and not a library's."""
        name, file = _file_of(what)
        package = name.partition(".")[0]
        if not package or package in _OPAQUE:
            return False
        if file is None:
            # Code of a notebook has no file and is in __main__; other modules without a file are
            # built in.
            return name == "__main__"
        if file not in self._libraries:
            path = Path(file).resolve()
            known = package == self._package or name in sources()
            self._libraries[file] = is_installed_copy(path) or (
                not known and is_foreign_project(path)
            )
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
    """Return whether a mapping stores its entries.

    True for a mapping of the standard library and for a class without attributes.
    """
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
    # A slot whose name begins with two underscores is mangled in the object, and is left out.
    return not slot.startswith("__") and hasattr(value, slot)


def _seen(tensor: Tensor) -> _Values:
    plain = tensor.layout is torch.strided and tensor.device.type != "meta"
    copied = tensor.detach().clone() if plain and tensor.numel() <= LONG else None
    return _Values(tensor, _version(tensor), copied)


def _version(tensor: Tensor) -> int:
    return 0 if tensor.is_inference() else tensor._version


def _state_of_generator(value: Any) -> Any:
    """Return the state of a random number generator, or None for any other object."""
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
    # NaN counts as equal to NaN.
    return bool(one == other) or (one != one and other != other)


def _same_values(one: Tensor, other: Tensor) -> bool:
    """Return whether two tensors are equal up to the rounding of sums over threads."""
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
    """Return the module and the file that define a class, function or module."""
    if isinstance(what, ModuleType):
        names: Mapping[str, Any] = vars(what)
    elif isinstance(what, FunctionType):
        names = what.__globals__
    else:
        names = _globals_of(what)
    file = names.get("__file__")
    return str(names.get("__name__", "")), None if file is None else str(file)


def _globals_of(kind: Any) -> Mapping[str, Any]:
    """Return the global names of the file that defines a class."""
    module = sys.modules.get(getattr(kind, "__module__", None) or "")
    return {} if module is None else vars(module)
