"""Why an update cannot be right: what a server can tell without knowing the client's data.

    it answers what was asked    the same client and round, as many tensors, of the same shapes and
                                 types
    it is of examples            at least one
    it is finite                 deltas, buffers that changed, extras

Rules that collect updates count those that are not finite among the broken ones themselves; they
see deltas and buffers as they are.

Cost: one pass over the update, unless somebody has seen to its numbers.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from dure.federated.engines.products import Deferred
from dure.federated.server.global_model import changes
from dure.protocol.messages import Assignment, Update


def unfit(update: Update, asked: Assignment, finite: bool, collected: bool) -> str | None:
    """The reason, None where there is none.

    finite: its numbers are known to be; collected: the rule collects.
    """
    if update.client != asked.client or update.round != asked.round:
        return "it is not an answer to what was asked"
    if len(update.delta) != len(asked.weights) or len(update.buffers) != len(asked.buffers):
        return "it has not the model's tensors"
    # An update that is not formed yet is not formed for this: `like` has its shape and dtype.
    delta = [update.delta.like] if isinstance(update.delta, Deferred) and finite else update.delta
    for one, other in (
        *zip(delta, asked.weights, strict=True),
        *zip(update.buffers, asked.buffers, strict=True),
    ):
        # `like` is often the weights themselves: then there is nothing to compare.
        if one is not other and (one.shape != other.shape or one.dtype != other.dtype):
            return "its tensors have not the model's shapes and types"
    # n_k is a weight of the mean: below 0 it would turn the client's update around.
    if update.samples <= 0 or update.examples <= 0:
        return "it is of no examples"
    if not 0 <= update.count < math.inf:
        return f"its loss counts {update.count}, which is no weight"
    if finite:
        return None
    # Extras are always combined by a mean, which a single NaN would spoil, so they are looked at
    # for rules that collect too.
    seen = list(update.extra)
    if not collected:
        seen += [*update.delta, *changes(update.buffers, asked.buffers)]
    return None if all(_finite(tensor) for tensor in seen) else "it is not finite"


def _finite(tensor: Tensor) -> bool:
    """Whether no element is NaN or infinite.

    A product with itself says so in one pass, where it does not overflow.
    """
    flat = tensor.reshape(-1)
    if flat.dtype in (torch.float32, torch.float64) and math.isfinite(float(torch.dot(flat, flat))):
        return True
    return bool(tensor.isfinite().all())
