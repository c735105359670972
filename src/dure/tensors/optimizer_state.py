"""Load an optimizer's state from disk after a check that this optimizer can have written it.

torch's `load_state_dict` compares only the numbers of groups and parameters. Other damage, such as
a momentum of another shape, would appear in the first step as an error of torch without its cause.
So the state is checked when it is loaded:

    groups    have the settings of the optimizer, each a value of the same kind
    states    belong to parameters, and all states of a group have the same entries
    tensors   are single numbers, or have their parameter's shape

These rules hold for torch's own optimizers. The state of a user-defined optimizer is not checked.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer
from torch.optim.optimizer import _global_optimizer_post_hooks, _global_optimizer_pre_hooks

_OTHER_SHAPES = ("Adafactor", "LBFGS")
"""torch's own optimizers with state whose shapes differ from the parameters' shapes."""


def is_torch_optimizer(optimizer: Any) -> bool:
    """Return whether an optimizer is torch's own. The steps of these change no settings."""
    return type(optimizer).__module__.startswith("torch.optim.")


def has_step_hooks(optimizer: Optimizer) -> bool:
    """Return whether a step hook is registered for this optimizer or for all optimizers.

    A hook may change gradients and settings.
    """
    # torch has no public interface to ask for hooks, of this optimizer or global.
    own = optimizer._optimizer_step_pre_hooks or optimizer._optimizer_step_post_hooks
    return bool(own or _global_optimizer_pre_hooks or _global_optimizer_post_hooks)


def free_optimizer(optimizer: Any) -> None:
    """Free an optimizer's gradients, and the state of a `torch.optim.Optimizer`."""
    optimizer.zero_grad(set_to_none=True)
    # An object that only has a step method may store its state anywhere.
    if isinstance(optimizer, Optimizer):
        optimizer.state.clear()


def entries_on(
    entries: Mapping[str, Any], device: torch.device, group: Mapping[str, Any]
) -> Mapping[str, Any]:
    """Return a parameter's state on the parameter's device, by the rule of `load_state_dict`.

    group: settings of the parameter's group. The count of steps stays where it is, unless the
    optimizer computes with it on the device.
    """
    counts = not (group.get("capturable") or group.get("fused"))
    return {
        name: value.to(device)
        if isinstance(value, Tensor) and not (counts and name == "step")
        else value
        for name, value in entries.items()
    }


def load_optimizer(optimizer: Optimizer, state: Mapping[str, Any]) -> None:
    """Load the state like `optimizer.load_state_dict`, after a check.

    Raises ValueError for a state that this optimizer cannot have written; other damage may raise an
    error of any kind.
    """
    if not is_torch_optimizer(optimizer) or type(optimizer).__name__ in _OTHER_SHAPES:
        optimizer.load_state_dict(dict(state))
        return
    before = [dict(group) for group in optimizer.param_groups]
    _check_states(state)
    optimizer.load_state_dict(dict(state))
    for known, group in zip(before, optimizer.param_groups, strict=True):
        for name, value in known.items():
            if name not in group or not _is_alike(value, group[name]):
                raise ValueError(f"its setting {name} is {group.get(name)!r}, but was {value!r}")
        _check_group(optimizer, group["params"])


def _check_states(state: Mapping[str, Any]) -> None:
    """Raise ValueError for a state entry of no parameter, which torch would accept."""
    count = sum(len(group["params"]) for group in state["param_groups"])
    for number, own in state["state"].items():
        if isinstance(number, bool) or number not in range(count):
            raise ValueError(f"there is no parameter {number!r} of {count}")
        if not isinstance(own, Mapping) or not all(isinstance(name, str) for name in own):
            raise ValueError(f"the state of parameter {number} has no names")


def _is_alike(known: Any, value: Any) -> bool:
    """Return whether a setting may replace another: for example two numbers."""
    # None marks a setting on which torch decides later, such as `foreach`.
    if known is None or value is None:
        return True
    # Parameters, or betas.
    if isinstance(known, (list, tuple)):
        same = isinstance(value, (list, tuple)) and len(known) == len(value)
        return same and all(map(_is_alike, known, value))
    if _is_number(known):
        return _is_number(value) and math.isfinite(value) >= math.isfinite(known)
    return isinstance(value, type(known))


def _is_number(value: Any) -> bool:
    # A learning rate may be a tensor, so that compiled steps read its current value.
    return isinstance(value, (bool, int, float)) or (isinstance(value, Tensor) and not value.dim())


def _check_group(optimizer: Optimizer, parameters: Sequence[Tensor]) -> None:
    """Raise ValueError if states have different entries or do not fit their parameters."""
    # A parameter that was never used has no state.
    used = [parameter for parameter in parameters if optimizer.state.get(parameter)]
    first = None
    for parameter in used:
        own = optimizer.state[parameter]
        entries = {name: isinstance(value, Tensor) for name, value in own.items()}
        first = first or entries
        if entries != first:
            raise ValueError(f"a state has {', '.join(own)}, another one {', '.join(first)}")
        for name, value in own.items():
            if isinstance(value, Tensor):
                _check_tensor(name, value, parameter)


def _check_tensor(name: str, value: Tensor, parameter: Tensor) -> None:
    if value.numel() != 1 and value.shape != parameter.shape:
        shapes = f"{tuple(value.shape)}, and its parameter {tuple(parameter.shape)}"
        raise ValueError(f"{name} has the shape {shapes}")
    # torch casts state to the parameter's dtype except step counts, which need more bits.
    if value.dtype.itemsize < 2:
        raise ValueError(f"{name} is {value.dtype}, and its parameter {parameter.dtype}")
