"""Why an update cannot be right: what a server can tell without knowing the client's data.

    it answers what was asked    the same client and round, as many tensors, of the same shapes and
                                 types
    it is of examples            at least one, and not more than the client has
    it counts no more            than the loss can count in so many examples
    it is of steps               at least one, and each of at least one example
    it is finite                 the loss, deltas, buffers that changed, extras

Rules count the updates that are refused among the broken ones that they withstand.

Cost: one pass over the update, unless somebody has seen to its numbers.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from torch import Tensor

from dure.federated.engines.products import Deferred
from dure.federated.server.global_model import changes
from dure.protocol.messages import Assignment, Update
from dure.tensors.finite import all_finite

ROUNDING = 1 + 1e-5
"""Sums of weights of classes may be a little more than so many of the largest."""


def unfit(
    update: Update,
    asked: Assignment,
    extra: Sequence[Tensor],
    examples: int,
    most_counted: float,
    finite: bool,
) -> str | None:
    """The reason, None where there is none.

    extra: what its extras look like. examples: that its client has at most. most_counted: what the
    loss counts in one of them at most. finite: the numbers of
    its delta and buffers are known to be.
    """
    if update.failure is not None:
        return update.failure
    if update.client != asked.client or update.round != asked.round:
        return "it is not an answer to what was asked"
    if len(update.delta) != len(asked.weights) or len(update.buffers) != len(asked.buffers):
        return "it has not the model's tensors"
    # An update that is not formed yet is not formed for this: `like` has its shape and dtype.
    delta = [update.delta.like] if isinstance(update.delta, Deferred) and finite else update.delta
    if not (alike(delta, asked.weights) and alike(update.buffers, asked.buffers)):
        return "its tensors have not the model's shapes and types"
    if not alike(update.extra, extra):
        return "what it sends besides has not the tensors that the algorithm wants"
    # n_k is a weight of the mean: below 1 it would turn the client's update around.
    if update.samples <= 0 or update.examples <= 0:
        return "it is of no examples"
    if not 1 <= update.steps <= update.samples:
        return f"it says that {update.samples} examples made {update.steps} steps"
    # n_k is what the client says: with a larger one its update would count for more than its data.
    if update.examples > examples:
        return "it is of more examples than its client has"
    if not 0 <= update.count < math.inf:
        return f"its loss counts {update.count}, which is no weight"
    # The weight of the mean follows from it: a count that is made up is one of made-up examples.
    if update.count > most_counted * update.samples * ROUNDING:
        return "its loss counts more than its examples have"
    # It would be the round's, in the mean.
    if not math.isfinite(update.loss):
        return "its loss is not finite"
    # Engines do not see extras.
    seen = list(update.extra)
    if not finite:
        seen += [*update.delta, *changes(update.buffers, asked.buffers)]
    return None if all(map(all_finite, seen)) else "it is not finite"


def alike(tensors: Sequence[Tensor], others: Sequence[Tensor]) -> bool:
    """Whether they are as many, of the same shapes and dtypes."""
    # Often they are the very same: then there is nothing to compare.
    return len(tensors) == len(others) and all(
        one is other or (one.shape == other.shape and one.dtype == other.dtype)
        for one, other in zip(tensors, others, strict=True)
    )
