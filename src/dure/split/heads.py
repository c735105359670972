"""Heads that come from others: whether they are heads of this model, and were trained.

    weights, buffers    number, dtypes and shapes; finite; no more than a million times as large as
                        those before
    optimizer           for each weight nothing, or what the task's optimizer remembers: names,
                        dtypes, shapes, and signs, where all that it remembers is 0 or more

The server checks the heads that it hands over or averages, a client the heads that the server or
another client sends: a wrong head is found where it comes from, and whoever trains it next is not
blamed for it.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from dure.split.blame import (
    GRADIENT,
    AbsurdError,
    WrongError,
    check_bounded,
    check_grown,
    check_size,
    largest,
)
from dure.split.messages import Own
from dure.split.sides import Side
from dure.split.tensor_forms import TensorForm, check_forms, check_gradient_forms, form_of

TRIED = 3
"""Steps that a copy of an optimizer makes until it remembers all that it ever does."""


class Number(NamedTuple):
    """What an optimizer remembers under one name.

    form: of a tensor; None of a number or None. positive: whether it is 0 or more.
    """

    form: TensorForm | None
    positive: bool

    def check(self, name: str, value: Any) -> None:
        """Raise WrongError for anything else."""
        tensor = isinstance(value, Tensor)
        if tensor != (self.form is not None) or isinstance(value, str):
            raise WrongError(f"the optimizer remembers a {type(value).__name__} as {name}")
        if self.form is not None:
            check_forms(f"what the optimizer remembers as {name}", [value], [self.form])
        elif value is not None and not math.isfinite(value):
            raise WrongError(f"the optimizer remembers {value} as {name}")
        if self.positive and value is not None and _least(value) < 0:
            raise WrongError(f"the optimizer remembers numbers below 0 as {name}")


def _least(value: Tensor | float) -> float:
    if not isinstance(value, Tensor):
        return float(value)
    return float(value.min()) if value.numel() else 0.0


Remembered = Mapping[str, Number]
"""What an optimizer remembers of one weight, by name."""


def remembered_of(side: Side) -> list[Remembered] | None:
    """What the optimizer of a side remembers of each weight; None where it cannot be tried.

    A copy of it makes some steps, with gradients of either sign.
    """
    try:
        up, down = (_tried(side, sign) for sign in (1.0, -1.0))
    # An optimizer of the user's may want more than gradients.
    except Exception:
        return None
    return [
        {name: _number(one[name], other.get(name)) for name in one}
        for one, other in zip(up, down, strict=True)
    ]


def _tried(side: Side, sign: float) -> list[Mapping[str, Any]]:
    copies: dict[int, Any] = {}
    twin = copy.deepcopy(side.optimizer, copies)
    parameters = [copies.get(id(one)) for one in side.moved.values()]
    for _ in range(TRIED):
        for parameter in parameters:
            if parameter is not None:
                parameter.grad = torch.full_like(parameter, sign)
        twin.step()
    return [{} if one is None else dict(twin.state.get(one, {})) for one in parameters]


def _number(up: Any, down: Any) -> Number:
    if isinstance(up, Tensor):
        both = isinstance(down, Tensor) and not up.is_complex()
        return Number(form_of(up), both and _least(up) >= 0 and _least(down) >= 0)
    numbers = isinstance(up, int | float) and isinstance(down, int | float)
    return Number(None, numbers and up >= 0 and down >= 0)


class Heads:
    """What heads are like: as `side` has one, or, without, as the first that comes.

    forgets: whether what optimizers remember ends with a turn.
    """

    def __init__(self, side: Side | None, forgets: bool = False) -> None:
        self._side = side
        self._forgets = forgets
        self._weights = None if side is None else [form_of(one) for one in side.parameters.values()]
        self._buffers = None if side is None else [form_of(one) for one in side.buffers()]
        self._remembered: list[Remembered] | None = None
        self._tried = side is None
        self._largest = 0.0 if side is None else largest(side.parameters.values())

    def check(self, own: Own) -> None:
        """Raise WrongError for a head that is another model's, or that no training gives."""
        if self._weights is None or self._buffers is None:
            self._weights = [form_of(one) for one in own.weights]
            self._buffers = [form_of(one) for one in own.buffers]
        check_forms("weights of the head", own.weights, self._weights)
        check_forms("buffers of the head", own.buffers, self._buffers)
        self._check_remembered(own)
        try:
            check_grown("the head", own, self._largest)
        except AbsurdError as error:
            raise WrongError(str(error)) from error
        self._largest = max(self._largest, largest(own.weights))

    def check_gradients(self, values: Sequence[Tensor | None]) -> None:
        """Likewise, of gradients of the head; None of a weight that got none."""
        check_bounded("gradients of the head", values)
        if self._weights is not None:
            check_gradient_forms("gradients of the head", values, self._weights)

    def _check_remembered(self, own: Own) -> None:
        if len(own.optimizer) != len(own.weights):
            raise WrongError(
                f"the optimizer's state is of {len(own.optimizer)} weights, and the head has "
                f"{len(own.weights)}"
            )
        if self._forgets and any(own.optimizer):
            raise WrongError("the optimizer's state came, and it ends with the round")
        if not self._tried:
            assert self._side is not None
            self._tried = True
            self._remembered = remembered_of(self._side)
        for place, state in enumerate(own.optimizer):
            if state:
                self._check_state(state, place)

    def _check_state(self, state: Mapping[str, Any], place: int) -> None:
        like = None if self._remembered is None else self._remembered[place]
        if like is not None and state.keys() != like.keys():
            raise WrongError(
                f"the optimizer remembers {', '.join(sorted(state))[:100]}, and has to remember "
                f"{', '.join(sorted(like)) or 'nothing'}"
            )
        for name, value in state.items():
            if like is not None:
                like[name].check(name, value)
            elif isinstance(value, str):
                raise WrongError(f"the optimizer remembers a text as {name[:40]}")
        tensors = [one for one in state.values() if isinstance(one, Tensor)]
        try:
            check_size("tensors of the optimizer's state", tensors, GRADIENT**2)
        except AbsurdError as error:
            raise WrongError(str(error)) from error
