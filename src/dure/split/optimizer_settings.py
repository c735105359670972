"""Settings of an optimizer that its steps change, such as a count of steps or an estimated rate.

    settings    entries of a parameter group other than its parameters
    changed     the settings that differ from the initial settings

Optimizers such as Prodigy count and estimate in their parameter groups. Changed settings are part
of the state of a side of the cut, as momenta are (`SideState.groups`). A setting that no step has
changed is not: each client keeps its own learning rate.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from typing import Any

import numpy
import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from dure.tensors.optimizer_state import has_step_hooks, is_torch_optimizer

TRIED = 3
"""Number of steps of a copied optimizer, after which its state has all entries."""

_MISSING = object()

Groups = tuple[Mapping[str, Any], ...]
"""Changed settings of each parameter group, by name."""


class ChangedSettings:
    """Settings of a new optimizer.

    scheduled: whether a schedule sets the learning rates before every step.
    """

    def __init__(self, optimizer: Optimizer, scheduled: bool) -> None:
        self.optimizer = optimizer
        self._others = ("params", "lr") if scheduled else ("params",)
        self.first = [_copied_settings(group) for group in self._groups(optimizer)]

    def _groups(self, optimizer: Optimizer) -> list[dict[str, Any]]:
        """Return the current settings."""
        return [
            {name: value for name, value in group.items() if name not in self._others}
            for group in optimizer.param_groups
        ]

    def changed(self, twin: Optimizer | None = None) -> Groups:
        """Return the settings that steps have changed, without copies.

        twin: a copy of the optimizer that has made the steps; None for the optimizer itself. Raises
        ValueError for a change that can neither be saved nor sent.
        """
        groups = self._groups(self.optimizer if twin is None else twin)
        return tuple(
            {
                name: self._portable(name, value)
                for name, value in group.items()
                if not _is_same(first.get(name, _MISSING), value)
            }
            for group, first in zip(groups, self.first, strict=True)
        )

    def put(self, groups: Groups) -> None:
        """Set the changed settings. The optimizer's steps change them in place from now on."""
        for group, first, own in zip(self.optimizer.param_groups, self.first, groups, strict=True):
            others = {name: group[name] for name in self._others if name in group}
            group.clear()
            group.update(others)
            group.update(_copied_settings(first))
            group.update({name: _as(first.get(name), value) for name, value in own.items()})

    def _portable(self, name: str, value: Any) -> Any:
        if isinstance(value, numpy.generic):
            return value.item()
        if not is_portable(value):
            raise ValueError(
                f"{type(self.optimizer).__name__} changes its setting {name}, which is a "
                f"{type(value).__name__}: it can neither be saved nor sent with the state of its "
                "side of the cut; use numbers, texts, tensors, or lists and dicts of them"
            )
        return value


def keeps_settings(optimizer: Optimizer) -> bool:
    """Return whether steps certainly change no setting: torch's own optimizers without hooks."""
    return is_torch_optimizer(optimizer) and not has_step_hooks(optimizer)


def stepped_copy(
    optimizer: Optimizer, parameters: Sequence[nn.Parameter], sign: float
) -> tuple[Optimizer, list[nn.Parameter | None]]:
    """Return a copy of an optimizer after some steps, and its copies of the parameters.

    sign: value of all gradients. A parameter that the optimizer does not have gives None. Raises
    ValueError for an optimizer with step hooks, because a copy has no hooks.
    """
    if has_step_hooks(optimizer):
        raise ValueError(f"{type(optimizer).__name__} has step hooks")
    settings = [one for group in optimizer.param_groups for one in group.values()]
    # Functions and other objects are shared, not copied.
    copies: dict[int, Any] = {id(one): one for one in settings if not is_portable(one)}
    twin = copy.deepcopy(optimizer, copies)
    # torch copies state and settings alone; a user's optimizer may have other attributes.
    for name, value in vars(optimizer).items():
        if name not in vars(twin):
            setattr(twin, name, copy.deepcopy(value, copies))
    found = [copies.get(id(one)) for one in parameters]
    for _ in range(TRIED):
        for parameter in found:
            if parameter is not None:
                parameter.grad = torch.full_like(parameter, sign)
        twin.step()
    return twin, found


def check_settings(optimizer: Optimizer) -> None:
    """Raise ValueError for an optimizer whose steps change values that cannot be saved or sent."""
    if keeps_settings(optimizer):
        return
    try:
        settings = ChangedSettings(optimizer, scheduled=True)
        parameters = [one for group in optimizer.param_groups for one in group["params"]]
        twin, _ = stepped_copy(optimizer, parameters, 1.0)
    # An optimizer that needs more than gradients fails in the first real step.
    except Exception:
        return
    settings.changed(twin)
    shared_of(twin)


def shared_of(optimizer: Optimizer) -> dict[str, Any]:
    """Return the state that belongs to no parameter, by name. Raises ValueError without a name."""
    state: Mapping[Any, Any] = optimizer.state
    shared = {key: value for key, value in state.items() if not isinstance(key, Tensor)}
    for key in shared:
        if not isinstance(key, str):
            raise ValueError(
                f"{type(optimizer).__name__} keeps state under {key!r}, which is neither a "
                "parameter nor a name: it can neither be saved nor sent with the state of its "
                "side of the cut"
            )
    return shared


def is_portable(value: Any) -> bool:
    """Return whether a value consists of tensors, numbers, text and None, in lists and dicts."""
    if isinstance(value, Mapping):
        return all(isinstance(key, str) and is_portable(one) for key, one in value.items())
    if isinstance(value, list | tuple):
        return all(map(is_portable, value))
    return value is None or isinstance(value, Tensor | bool | int | float | str)


def copied_value(value: Any) -> Any:
    """Return a copy of the value, with new tensors and containers."""
    if isinstance(value, Tensor):
        return value.clone()
    if isinstance(value, dict):
        return {key: copied_value(one) for key, one in value.items()}
    if type(value) in (list, tuple):
        return type(value)(map(copied_value, value))
    if value is None or isinstance(value, bool | int | float | str):
        return value
    return copy.deepcopy(value)


def _copied_settings(group: Mapping[str, Any]) -> dict[str, Any]:
    # Functions and other objects are shared: they are neither saved nor sent.
    return {
        name: copied_value(value) if is_portable(value) else value for name, value in group.items()
    }


def _is_same(first: Any, value: Any) -> bool:
    if isinstance(first, Tensor) and isinstance(value, Tensor):
        return first.dtype == value.dtype and torch.equal(first, value)
    if first is value:
        return True
    if type(first) is not type(value):
        return False
    if isinstance(first, list | tuple):
        return len(first) == len(value) and all(map(_is_same, first, value))
    if isinstance(first, dict):
        return first.keys() == value.keys() and all(_is_same(first[x], value[x]) for x in first)
    return isinstance(first, bool | int | float | str) and bool(first == value)


def _as(first: Any, value: Any) -> Any:
    """Return a value from a message or file with the original type and device.

    Tuples arrive as lists, and tensors in the CPU's memory.
    """
    if isinstance(first, Tensor) and isinstance(value, Tensor):
        return value.to(first.device)
    return tuple(value) if isinstance(first, tuple) and isinstance(value, list) else value
