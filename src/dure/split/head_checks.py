"""Checks of received heads: whether a head belongs to this model and can result from training.

    weights, buffers    number, dtypes and shapes; finite; at most a million times as large as
                        before
    optimizer           for each weight nothing, or the state of the task's optimizer: names,
                        dtypes, shapes, and signs if the optimizer's state is never negative
    groups, shared      the settings that steps of the task's optimizer change, and state that
                        belongs to no single weight: names, types, dtypes, shapes; finite. For
                        torch's own optimizers, which change no settings: none

The server checks the heads that it passes on or averages; a client checks the heads that the server
or another client sends. An invalid head is thus found at its sender, and the client that trains it
next is not blamed.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils._pytree import tree_leaves

from dure.split.blame import (
    GRADIENT,
    ExcessiveValueError,
    InvalidMessageError,
    check_bounded,
    check_grown,
    check_size,
    largest,
)
from dure.split.messages import SideState
from dure.split.optimizer_settings import keeps_settings, shared_of, stepped_copy
from dure.split.sides import Side
from dure.split.tensor_forms import TensorForm, check_forms, check_gradient_forms, form_of

MOST_TEXT = 100
"""Maximum number of characters of a text setting."""

MOST_NAMES = 64
"""Maximum number of settings of a parameter group, if the task's optimizer cannot be tried."""


class StateEntryForm(NamedTuple):
    """Form of an optimizer's state entry.

    form: of a tensor; None for a number or None. positive: whether the value is never negative.
    """

    form: TensorForm | None
    positive: bool

    def check(self, name: str, value: Any) -> None:
        """Raise WrongError for a value of another form."""
        tensor = isinstance(value, Tensor)
        if tensor != (self.form is not None) or isinstance(value, str):
            raise InvalidMessageError(f"the optimizer remembers a {type(value).__name__} as {name}")
        if self.form is not None:
            check_forms(f"what the optimizer remembers as {name}", [value], [self.form])
        elif value is not None and not math.isfinite(value):
            raise InvalidMessageError(f"the optimizer remembers {value} as {name}")
        if self.positive and value is not None and _least(value) < 0:
            raise InvalidMessageError(f"the optimizer remembers numbers below 0 as {name}")


def _least(value: Tensor | float) -> float:
    if not isinstance(value, Tensor):
        return float(value)
    return float(value.min()) if value.numel() else 0.0


class OptimizerStateForm(NamedTuple):
    """Form of an optimizer's state, by name: of each weight, in each parameter group, and shared.

    groups: the settings, with example values. changes: whether steps change any setting.
    """

    weights: list[Mapping[str, StateEntryForm]]
    groups: list[Mapping[str, Any]]
    shared: Mapping[str, Any]
    changes: bool


def optimizer_state_form(side: Side) -> OptimizerStateForm | None:
    """Return the form of the state of a side's optimizer; None if the optimizer cannot be tried.

    A copy of the optimizer makes some steps, with gradients of either sign.
    """
    moved = list(side.moved.values())
    try:
        (up, ups), (down, downs) = (
            stepped_copy(side.optimizer, moved, sign) for sign in (1.0, -1.0)
        )
        changed = side.settings.changed(up)
        shared = shared_of(up)
    # A user's optimizer may need more than gradients.
    except Exception:
        return None
    weights: list[Mapping[str, StateEntryForm]] = [
        {name: _number(one[name], other.get(name)) for name in one}
        for one, other in zip(_states(up, ups), _states(down, downs), strict=True)
    ]
    if keeps_settings(side.optimizer):
        return OptimizerStateForm(weights, [{} for _ in changed], {}, changes=False)
    pairs = zip(side.settings.first, changed, strict=True)
    groups: list[Mapping[str, Any]] = [{**first, **own} for first, own in pairs]
    return OptimizerStateForm(weights, groups, shared, changes=any(changed) or bool(shared))


def _states(
    optimizer: Optimizer, parameters: Sequence[nn.Parameter | None]
) -> list[Mapping[str, Any]]:
    return [{} if one is None else dict(optimizer.state.get(one, {})) for one in parameters]


def _number(up: Any, down: Any) -> StateEntryForm:
    if isinstance(up, Tensor):
        both = isinstance(down, Tensor) and not up.is_complex()
        return StateEntryForm(form_of(up), both and _least(up) >= 0 and _least(down) >= 0)
    numbers = isinstance(up, int | float) and isinstance(down, int | float)
    return StateEntryForm(None, numbers and up >= 0 and down >= 0)


class HeadChecks:
    """Checks of heads by the form of `side`'s head, or else of the first head received.

    forgets: whether the optimizer's state is reset at the end of a turn.
    """

    def __init__(self, side: Side | None, forgets: bool = False) -> None:
        self._side = side
        self._forgets = forgets
        self._weights = None if side is None else [form_of(one) for one in side.parameters.values()]
        self._buffers = None if side is None else [form_of(one) for one in side.buffers()]
        self._remembered: OptimizerStateForm | None = None
        self._groups = None if side is None else len(side.settings.first)
        self._tried = side is None
        self._largest = 0.0 if side is None else largest(side.parameters.values())

    def check(self, own: SideState) -> None:
        """Raise WrongError for a head of another model, or values that training cannot produce."""
        if self._weights is None or self._buffers is None:
            self._weights = [form_of(one) for one in own.weights]
            self._buffers = [form_of(one) for one in own.buffers]
        check_forms("weights of the head", own.weights, self._weights)
        check_forms("buffers of the head", own.buffers, self._buffers)
        self._check_remembered(own)
        try:
            check_grown("the head", own, self._largest)
        except ExcessiveValueError as error:
            raise InvalidMessageError(str(error)) from error
        self._largest = max(self._largest, largest(own.weights))

    def check_gradients(self, values: Sequence[Tensor | None]) -> None:
        """Raise WrongError for invalid gradients of the head; None is a missing gradient."""
        check_bounded("gradients of the head", values)
        if self._weights is not None:
            check_gradient_forms("gradients of the head", values, self._weights)

    def _check_remembered(self, own: SideState) -> None:
        if len(own.optimizer) != len(own.weights):
            raise InvalidMessageError(
                f"the optimizer's state has {len(own.optimizer)} weights, but the head has "
                f"{len(own.weights)}"
            )
        if self._forgets and any((*own.optimizer, *(own.groups or ()), own.shared)):
            raise InvalidMessageError("the optimizer's state was sent, but it ends with the round")
        if not self._tried:
            assert self._side is not None
            self._tried = True
            self._remembered = optimizer_state_form(self._side)
        self._check_settings(own)
        for place, state in enumerate(own.optimizer):
            if state:
                self._check_state(state, place)

    def _check_settings(self, own: SideState) -> None:
        """Check the settings that steps have changed, and the state that belongs to no weight."""
        known = self._remembered
        if own.groups is None:
            changes = self._side is not None and (known is None or known.changes)
            if changes and not self._forgets:
                raise InvalidMessageError(
                    "the settings that steps of the optimizer change are missing: the sender "
                    "uses an earlier version of dure"
                )
        elif own.groups or any(own.optimizer):
            if self._groups is None:
                self._groups = len(own.groups)
            if len(own.groups) != self._groups:
                raise InvalidMessageError(
                    f"the optimizer has {len(own.groups)} parameter groups, but has to have "
                    f"{self._groups}"
                )
        for place, group in enumerate(own.groups or ()):
            _check_named(group, None if known is None else known.groups[place])
        _check_named(own.shared, None if known is None else known.shared)

    def _check_state(self, state: Mapping[str, Any], place: int) -> None:
        like = None if self._remembered is None else self._remembered.weights[place]
        if like is not None and state.keys() != like.keys():
            raise InvalidMessageError(
                f"the optimizer's state has {', '.join(sorted(state))[:100]}, but has to have "
                f"{', '.join(sorted(like)) or 'nothing'}"
            )
        for name, value in state.items():
            if like is not None:
                like[name].check(name, value)
            elif isinstance(value, str):
                raise InvalidMessageError(f"the optimizer remembers a text as {name[:40]}")
        tensors = [one for one in state.values() if isinstance(one, Tensor)]
        try:
            check_size("tensors of the optimizer's state", tensors, GRADIENT**2)
        except ExcessiveValueError as error:
            raise InvalidMessageError(str(error)) from error


def _check_named(values: Mapping[str, Any], known: Mapping[str, Any] | None) -> None:
    """Raise WrongError for settings that this optimizer does not change in this way.

    known: example values; None if unknown.
    """
    unknown = sorted(values.keys() - known.keys()) if known is not None else []
    if unknown or len(values) > MOST_NAMES:
        named = ", ".join(name[:40] for name in (unknown or sorted(values))[:5])
        raise InvalidMessageError(
            f"the optimizer has changed {named}, but does not change that here"
        )
    leaves = tree_leaves(dict(values))
    if known is None and any(isinstance(one, str) for one in leaves):
        raise InvalidMessageError("the optimizer has changed a setting to a text")
    for name, value in values.items():
        # Without known values, compare each value with itself: only its numbers are checked.
        _check_like(name[:40], value, value if known is None else known[name])
    tensors = [one for one in leaves if isinstance(one, Tensor)]
    try:
        check_size("tensors of the optimizer's settings", tensors, GRADIENT**2)
    except ExcessiveValueError as error:
        raise InvalidMessageError(str(error)) from error


def _check_like(name: str, value: Any, like: Any) -> None:
    """Raise WrongError for a setting of another type, form or size, or with non-finite values."""
    if isinstance(value, Tensor) and isinstance(like, Tensor):
        check_forms(f"the optimizer's setting {name}", [value], [form_of(like)])
    elif isinstance(value, list | tuple) and isinstance(like, list | tuple):
        if len(value) != len(like):
            raise InvalidMessageError(
                f"the optimizer's setting {name} has {len(value)} values, but has to have "
                f"{len(like)}"
            )
        for one, other in zip(value, like, strict=True):
            _check_like(name, one, other)
    elif isinstance(value, Mapping) and isinstance(like, Mapping):
        if not value.keys() <= like.keys():
            raise InvalidMessageError(f"the optimizer's setting {name} has other names than here")
        for key, one in value.items():
            _check_like(name, one, like[key])
    elif _is_number(value) and (_is_number(like) or like is None):
        if not math.isfinite(value) and value != like:
            raise InvalidMessageError(f"the optimizer's setting {name} is {value}")
    elif isinstance(value, str) and isinstance(like, str) and len(value) <= MOST_TEXT:
        pass
    elif value is not None:
        raise InvalidMessageError(
            f"the optimizer's setting {name} is a {type(value).__name__}, and has to be a "
            f"{type(like).__name__}"
        )


def _is_number(value: Any) -> bool:
    return isinstance(value, bool | int | float)
