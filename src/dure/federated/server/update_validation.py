"""Validation of updates: checks that a server can make without a client's data.

    it answers its assignment    the same client and round, as many tensors, of the same shapes and
                                 types
    its examples are plausible   at least 1, and at most the client's number
    its count is plausible       at most the largest weight of so many examples in the loss
    its steps are plausible      at least 1, and each of at least 1 example
    it is finite                 the loss, deltas, changed buffers, extras

Rules count refused updates among the broken updates that they withstand.

Cost: a pass over the update, unless its numbers are known to be finite.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from torch import Tensor

from dure.federated.engines.products import DeferredUpdate
from dure.federated.server.global_model import buffer_changes
from dure.protocol.messages import Assignment, Update
from dure.tensors.elements import all_finite

ROUNDING = 1 + 1e-5
"""Tolerance for rounding: sums of class weights may slightly exceed the largest weight's."""


def invalid_reason(
    update: Update,
    asked: Assignment,
    extra: Sequence[Tensor],
    examples: int,
    most_counted: float,
    finite: bool,
) -> str | None:
    """Return the reason why the update is invalid; None for a valid update.

    Args:
        update: the update of a client.
        asked: its assignment.
        extra: tensors like a valid update's extras.
        examples: largest number of the client's examples.
        most_counted: largest weight of an example in the loss.
        finite: whether the numbers of delta and buffers are known to be finite.
    """
    if update.failure is not None:
        return update.failure
    if update.client != asked.client or update.round != asked.round:
        return "it is not an answer to what was asked"
    if len(update.delta) != len(asked.weights) or len(update.buffers) != len(asked.buffers):
        return "it has not the model's tensors"
    # A deferred update is not formed for this check: `like` has its shape and dtype.
    delta = (
        [update.delta.like] if isinstance(update.delta, DeferredUpdate) and finite else update.delta
    )
    if not (same_shapes(delta, asked.weights) and same_shapes(update.buffers, asked.buffers)):
        return "its tensors have not the model's shapes and types"
    if not same_shapes(update.extra, extra):
        return "what it sends besides has not the tensors that the algorithm wants"
    # n_k is a weight of the mean: a negative weight would reverse the client's update.
    if update.samples <= 0 or update.examples <= 0:
        return "it is of no examples"
    if not 1 <= update.steps <= update.samples:
        return f"it says that {update.samples} examples made {update.steps} steps"
    # The client reports n_k: a larger number would give its update more weight than its data.
    if update.examples > examples:
        return "it is of more examples than its client has"
    if not 0 <= update.count < math.inf:
        return f"its loss counts {update.count}, which is no weight"
    # The weight of the mean follows from the count: an invented count is an invented number of
    # examples.
    if update.count > most_counted * update.samples * ROUNDING:
        return "its loss counts more than its examples have"
    # In the mean, it would become the round's loss.
    if not math.isfinite(update.loss):
        return "its loss is not finite"
    # Engines do not check extras.
    seen = list(update.extra)
    if not finite:
        seen += [*update.delta, *buffer_changes(update.buffers, asked.buffers)]
    return None if all(map(all_finite, seen)) else "it is not finite"


def same_shapes(tensors: Sequence[Tensor], others: Sequence[Tensor]) -> bool:
    """Return whether both have the same number of tensors, with the same shapes and dtypes."""
    # The tensors are often identical objects, without anything to compare.
    return len(tensors) == len(others) and all(
        one is other or (one.shape == other.shape and one.dtype == other.dtype)
        for one, other in zip(tensors, others, strict=True)
    )
