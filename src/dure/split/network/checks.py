"""What clients send has to be what was asked for: shapes and dtypes, as the cut model has them.

A message that is not is refused with a reason, before anything is computed with it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec
import torch
from torch import Tensor

from dure.parallel.pipeline.cut import CutModel
from dure.parallel.pipeline.trace import Value
from dure.split.batching import values_at
from dure.split.messages import (
    Ended,
    HeadGradients,
    Message,
    OutputGradients,
    Own,
    Smashed,
)
from dure.split.network.control import Query
from dure.split.sides import Side


class WrongError(ValueError):
    """A client has sent what cannot be."""


class Checks:
    """Of one run. heads: a side like those of the clients. targets: leaves of a batch's, that come
    to the server. most: examples in a batch."""

    def __init__(self, cut: CutModel, heads: Side, targets: int, most: int) -> None:
        self._cut = cut
        self._heads = heads
        self._targets = targets
        self._most = most

    def checked(self, message: Message, open_examples: int) -> Message:
        """The message, whose values lie in memory as those of the trace do. Raises WrongError.

        open_examples: of the batch that the client has under way; 0 if none.
        """
        if isinstance(message, Smashed):
            self._check_examples(message.examples, self._most)
            self._check_targets(message.targets, message.examples)
            values = self._arrived(message.values, message.examples, training=True)
            return msgspec.structs.replace(message, values=values)
        if isinstance(message, OutputGradients):
            if not open_examples:
                raise WrongError("gradients came, and no batch is under way")
            crossing = values_at(self._cut, 1, open_examples)
            wanted = [_form_of(one) for one in crossing if one.differentiable]
            _check_forms("gradients at the second cut", message.values, wanted)
            _check_finite("gradients at the second cut", message.values)
        elif isinstance(message, HeadGradients):
            self._check_head_gradients(message.values)
        elif isinstance(message, Ended) and message.head is not None:
            self._check_own(message.head)
        return message

    def checked_query(self, query: Query) -> tuple[Tensor, ...]:
        """The values of a query, likewise."""
        self._check_examples(query.examples, MOST_QUERIED)
        return self._arrived(query.values, query.examples, training=False)

    def _arrived(
        self, given: Sequence[Tensor], examples: int, training: bool
    ) -> tuple[Tensor, ...]:
        """What has left a head."""
        wanted = values_at(self._cut, 0, examples, training)
        _check_forms("values at the cut", given, [_form_of(one) for one in wanted])
        return tuple(one.laid_out(value) for one, value in zip(wanted, given, strict=True))

    def _check_examples(self, examples: int, most: int) -> None:
        if not 1 <= examples <= most:
            raise WrongError(f"a batch has {examples} examples, and may have 1 to {most}")

    def _check_targets(self, targets: Any, examples: int) -> None:
        if (targets is None) != (self._targets == 0):
            raise WrongError("targets came, and they stay with clients" if targets else _NO_TARGETS)
        if targets is None:
            return
        if len(targets) != self._targets:
            raise WrongError(f"{len(targets)} targets came, and there are {self._targets}")
        for one in targets:
            if isinstance(one, Tensor) and one.ndim and len(one) != examples:
                raise WrongError(f"targets of {len(one)} examples came for {examples}")

    def _check_head_gradients(self, values: Sequence[Tensor | None]) -> None:
        weights = list(self._heads.parameters.values())
        if len(values) != len(weights):
            raise WrongError(f"gradients of {len(values)} weights came, of {len(weights)}")
        for given, weight in zip(values, weights, strict=True):
            if given is not None:
                _check_forms("a gradient of the head", [given], [_form(weight)])

    def _check_own(self, own: Own) -> None:
        weights = [_form(one) for one in self._heads.parameters.values()]
        _check_forms("weights of the head", own.weights, weights)
        buffers = [_form(one) for one in self._heads.buffers()]
        _check_forms("buffers of the head", own.buffers, buffers)
        if len(own.optimizer) != len(weights):
            raise WrongError(
                f"the optimizer's state is of {len(own.optimizer)} weights, not of {len(weights)}"
            )
        _check_finite("weights of the head", own.weights)


MOST_QUERIED = 1 << 16
"""Examples of a batch in evaluation."""

_NO_TARGETS = "a batch came without its targets"


def _form_of(value: Value) -> tuple[torch.dtype, tuple[int, ...]]:
    return value.dtype, tuple(value.shape)


def _form(tensor: Tensor) -> tuple[torch.dtype, tuple[int, ...]]:
    return tensor.dtype, tuple(tensor.shape)


def _check_forms(
    what: str, given: Sequence[Tensor], wanted: Sequence[tuple[torch.dtype, tuple[int, ...]]]
) -> None:
    forms = [_form(one) for one in given]
    if forms != list(wanted):
        raise WrongError(f"{what} are {_named(forms)}, and have to be {_named(wanted)}")


def _named(forms: Sequence[tuple[torch.dtype, tuple[int, ...]]]) -> str:
    named = [f"{str(dtype).removeprefix('torch.')} {list(shape)}" for dtype, shape in forms[:5]]
    return ", ".join(named) or "none"


def _check_finite(what: str, values: Sequence[Tensor]) -> None:
    """By their sum, which is quick; large values whose sum overflows are looked at one by one."""
    for one in values:
        if one.is_floating_point() and not one.sum().isfinite() and not one.isfinite().all():
            raise WrongError(f"{what} are not all finite numbers")
