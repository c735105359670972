"""What clients send has to be what was asked for: shapes and dtypes, as the cut model has them.

A message that is not is refused with a reason, before anything is computed with it.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any

import msgspec
import torch
from torch import Tensor

from dure.split.messages import (
    Ended,
    HeadGradients,
    Message,
    OutputGradients,
    Own,
    Smashed,
)
from dure.split.network.control import Answer, Query
from dure.split.sides import Side


class WrongError(ValueError):
    """A client has sent what cannot be."""


class AtServer(ABC):
    """What the server knows of what crosses the cuts, and how it computes for evaluations."""

    @abstractmethod
    def arrived(self, values: Sequence[Tensor], examples: int, training: bool) -> list[Tensor]:
        """What has left a head, as it lies in memory there. Raises ValueError for anything else."""

    @abstractmethod
    def check_returned(self, gradients: Sequence[Tensor], examples: int) -> None:
        """Raises ValueError for gradients that are not those of what has left the server."""

    @abstractmethod
    def answer(self, values: Sequence[Tensor], query: Query) -> Answer:
        """What the server's part makes of them, in evaluation. Raises ValueError."""

    def measured(self) -> dict[str, float]:
        """What it has measured itself since this was asked last."""
        return {}


class Heads:
    """What heads are like: as `side` has one, or, without, as the first that comes."""

    def __init__(self, side: Side | None) -> None:
        self._weights = None if side is None else [form(one) for one in side.parameters.values()]
        self._buffers = None if side is None else [form(one) for one in side.buffers()]

    def check(self, own: Own) -> None:
        """Raises WrongError for a head that is another model's."""
        if self._weights is None or self._buffers is None:
            self._weights = [form(one) for one in own.weights]
            self._buffers = [form(one) for one in own.buffers]
        check_forms("weights of the head", own.weights, self._weights)
        check_forms("buffers of the head", own.buffers, self._buffers)
        if len(own.optimizer) != len(own.weights):
            raise WrongError(
                f"the optimizer's state is of {len(own.optimizer)} weights, and the head has "
                f"{len(own.weights)}"
            )
        check_finite("weights of the head", own.weights)

    def check_gradients(self, values: Sequence[Tensor | None]) -> None:
        """Likewise, of its gradients; None of a weight that got none."""
        if self._weights is None:
            return
        if len(values) != len(self._weights):
            raise WrongError(f"gradients of {len(values)} weights came, of {len(self._weights)}")
        for given, wanted in zip(values, self._weights, strict=True):
            if given is not None:
                check_forms("a gradient of the head", [given], [wanted])


class Checks:
    """Of one run. targets: leaves of a batch's, that come to the server. most: examples in a
    batch."""

    def __init__(self, at_server: AtServer, heads: Heads, targets: int, most: int) -> None:
        self._at_server = at_server
        self._heads = heads
        self._targets = targets
        self._most = most

    def checked(self, message: Message, open_examples: int) -> Message:
        """The message, whose values lie in memory as they did at the client. Raises ValueError.

        open_examples: of the batch that the client has under way; 0 if none.
        """
        if isinstance(message, Smashed):
            self._check_examples(message.examples, self._most)
            self._check_targets(message.targets, message.examples)
            values = self._at_server.arrived(message.values, message.examples, training=True)
            return msgspec.structs.replace(message, values=tuple(values))
        if isinstance(message, OutputGradients):
            if not open_examples:
                raise WrongError("gradients came, and no batch is under way")
            self._at_server.check_returned(message.values, open_examples)
            check_finite("gradients at the second cut", message.values)
        elif isinstance(message, HeadGradients):
            self._heads.check_gradients(message.values)
        elif isinstance(message, Ended) and message.head is not None:
            self._heads.check(message.head)
        return message

    def answered(self, query: Query) -> Answer:
        """The answer to a query. Raises ValueError."""
        self._check_examples(query.examples, MOST_QUERIED)
        values = self._at_server.arrived(query.values, query.examples, training=False)
        return self._at_server.answer(values, query)

    def measured(self) -> dict[str, float]:
        """What the server has measured itself."""
        return self._at_server.measured()

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


MOST_QUERIED = 1 << 16
"""Examples of a batch in evaluation."""

_NO_TARGETS = "a batch came without its targets"


def form(tensor: Tensor) -> tuple[torch.dtype, tuple[int, ...]]:
    return tensor.dtype, tuple(tensor.shape)


def check_forms(
    what: str, given: Sequence[Tensor], wanted: Sequence[tuple[torch.dtype, tuple[int, ...]]]
) -> None:
    forms = [form(one) for one in given]
    if forms != list(wanted):
        raise WrongError(f"{what} are {_named(forms)}, and have to be {_named(wanted)}")


def _named(forms: Sequence[tuple[torch.dtype, tuple[int, ...]]]) -> str:
    named = [f"{str(dtype).removeprefix('torch.')} {list(shape)}" for dtype, shape in forms[:5]]
    return ", ".join(named) or "none"


def check_finite(what: str, values: Sequence[Tensor]) -> None:
    """By their sum, which is quick; large values whose sum overflows are looked at one by one."""
    for one in values:
        if one.is_floating_point() and not one.sum().isfinite() and not one.isfinite().all():
            raise WrongError(f"{what} are not all finite numbers")
