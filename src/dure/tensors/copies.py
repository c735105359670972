"""Independent copies of newly created models: equal to the model, sharing nothing with it.

`copy.deepcopy` is not enough in three cases. A closure created inside the model computes with the
layers of the original. A hook on a tensor is not copied. A class may define its own copy and leave
state out or share state. A model with any of these has no copy here; the caller creates a second
model instead.
"""

from __future__ import annotations

import copy
from collections.abc import Iterable, Mapping
from enum import Enum
from functools import partial
from itertools import pairwise
from types import BuiltinFunctionType, FunctionType, MethodType, ModuleType
from typing import Any

import numpy
import torch
from torch import Tensor, nn

from dure.tensors.backward import has_hooks

_ATOMS = (
    *(str, bytes, int, float, complex, type(None), type, Enum, numpy.generic),
    *(torch.dtype, torch.device, torch.Size, torch.memory_format, torch.layout),
    ModuleType,
)
"""Types of values that contain no part of a model."""

_OWN_COPIES = (
    *("__deepcopy__", "__copy__", "__reduce__", "__reduce_ex__"),
    *("__getstate__", "__setstate__", "__getnewargs__", "__getnewargs_ex__"),
)
"""Methods by which a class defines its own copy."""

_TRUSTED = ("torch", "builtins", "collections")

_OF_LSTMS = "_flat_weight_refs"
"""Attribute in which torch's recurrent layers keep weak references to weights, and renew them."""


def copy_of(
    model: nn.Module, same_parameters: bool = False, known: Mapping[int, Tensor] | None = None
) -> nn.Module | None:
    """Return a copy of a model that was not used yet, or None if no safe copy is possible.

    same_parameters: the copy's parameters share the memory of the model's parameters and have
    separate gradients. Such a copy takes next to no memory, and is for callers that do not change
    the parameters. known: replacements in the copy, by the id of the model's tensor.
    """
    look = _Look()
    copied: dict[int, Any] = dict(known or {})
    try:
        if not look.is_plain(model) or look.shares_memory():
            return None
        for parameter in model.parameters() if same_parameters else ():
            copied[id(parameter)] = nn.Parameter(parameter.detach(), parameter.requires_grad)
        twin = copy.deepcopy(model, copied)
        # deepcopy drops attributes of parameters. An attribute that refers to other parameters,
        # such as an average of theirs, refers to the copy's parameters afterwards.
        for mine, theirs in zip(twin.parameters(), model.parameters(), strict=True):
            mine.__dict__.update(copy.deepcopy(vars(theirs), copied))
    except Exception:  # a parameter without a shape, a class that forbids it, a nest too deep
        return None
    return twin


class _Look:
    """Traversal of every object that a model holds."""

    def __init__(self) -> None:
        self._seen: dict[int, Any] = {}
        self._places: list[tuple[int, int]] = []

    def shares_memory(self) -> bool:
        """Return whether two visited tensors share an element; their copies would not.

        Disjoint tensors of the same storage, such as parameters in a flat buffer, do not count.
        """
        # In order of their beginnings, an overlap anywhere is an overlap of two neighbours. A span
        # covers the gaps of a strided tensor as well: at worst a model is made again for nothing.
        places = sorted(self._places)
        return any(end > start for (_, end), (start, _) in pairwise(places))

    def is_plain(self, value: Any) -> bool:
        """Return whether a deep copy of the value shares no mutable state with the value."""
        if id(value) in self._seen or isinstance(value, _ATOMS):
            return True
        self._seen[id(value)] = value  # kept, so that no other value gets its id
        if isinstance(value, Tensor):
            return self._is_plain_tensor(value)
        if isinstance(value, numpy.ndarray):
            return not value.dtype.hasobject
        if isinstance(value, BuiltinFunctionType):
            # A function of a module, such as torch.relu; a method would use the original's object.
            return value.__self__ is None or isinstance(value.__self__, (ModuleType, type))
        if isinstance(value, FunctionType):
            # A deep copy has the same function, so its closure would refer to the original.
            return value.__closure__ is None and _has_plain_defaults(value)
        if isinstance(value, MethodType):
            # Deep copies bind a method to the copy of its object.
            return self.is_plain(value.__self__)
        if isinstance(value, partial):
            return self._are_plain([value.func, *value.args, *value.keywords.values()])
        if _says_how_to_copy(type(value)):
            return False
        if isinstance(value, Mapping):
            return self._are_plain([*value.keys(), *value.values()])
        if isinstance(value, (list, tuple, set, frozenset)):
            return self._are_plain(value)
        # Slots and C extensions may hide references to the model.
        if not hasattr(value, "__dict__"):
            return False
        return self._are_plain(one for name, one in vars(value).items() if name != _OF_LSTMS)

    def _are_plain(self, values: Iterable[Any]) -> bool:
        return all(map(self.is_plain, values))

    def _is_plain_tensor(self, tensor: Tensor) -> bool:
        if type(tensor).__module__.partition(".")[0] != "torch":
            return False
        # deepcopy refuses tensors with a history; only strided tensors have a known address range.
        if has_hooks(tensor) or not tensor.is_leaf or tensor.layout is not torch.strided:
            return False
        if tensor.nbytes:
            spans = zip(tensor.shape, tensor.stride(), strict=True)
            # From the first element to the last, in elements.
            last = sum((size - 1) * stride for size, stride in spans)
            start = tensor.data_ptr()
            self._places.append((start, start + (last + 1) * tensor.element_size()))
        return self._are_plain(vars(tensor).values())


def _says_how_to_copy(kind: type) -> bool:
    """Return whether a class outside torch and the plain containers defines its own copy."""
    own = [each for each in kind.__mro__ if each.__module__.partition(".")[0] not in _TRUSTED]
    return any(not vars(each).keys().isdisjoint(_OWN_COPIES) for each in own)


def _has_plain_defaults(function: FunctionType) -> bool:
    """Return whether all default arguments are atoms; a deep copy shares the defaults."""
    defaults = [*(function.__defaults__ or ()), *(function.__kwdefaults__ or {}).values()]
    return all(isinstance(value, _ATOMS) for value in defaults)
