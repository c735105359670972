"""Facts of a split learning run: the cuts, and who could learn labels or inputs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from dure.collectives.compression import NoCompression
from dure.record.meter import Meter
from dure.split.divided_model import DividedModel
from dure.split.leakage.exposure import exposure
from dure.split.plan import SplitPlan
from dure.split.sides import Side

_WITH_HEADS = ("Turn", "Handed", "Ended")
"""Types of messages whose payload is a head."""


def facts_of(
    plan: SplitPlan,
    divided: DividedModel,
    clients: Sequence[Meter],
    *,
    flops: float,
    target_bytes: int,
    measured: Mapping[str, float],
) -> dict[str, Any]:
    """Return the facts as JSON values.

    Args:
        plan: the plan of the run.
        divided: the divided model.
        clients: the clients' meters.
        flops: FLOPs of a step of the whole model.
        target_bytes: bytes of the targets of a batch.
        measured: newest values of the leakage meter.
    """
    values, gradients = divided.message_bytes(NoCompression())[0]
    compressed = divided.message_bytes(plan.compression)
    return {
        "split": {
            "at": list(divided.at),
            "shares": list(divided.shares),
            "head_weights": sum(one.numel() for one in divided.heads.parameters.values()),
            "tail_weights": sum(one.numel() for one in divided.tails.parameters.values()),
            "weights": list(divided.weights),
            "smashed_bytes": values,
            "gradient_bytes": gradients,
            "examples": divided.examples,
            "messages_sent": [one.counters.messages_sent for one in clients],
            "compression": str(plan.compression),
            "compressed_bytes": [list(one) for one in compressed],
            "flops": flops,
            "formulas": _formulas(plan, divided.heads, compressed, target_bytes),
        },
        "leakage": leakage_of(plan, measured),
    }


def leakage_of(plan: SplitPlan, measured: Mapping[str, float]) -> dict[str, Any]:
    """Return the defence, the exposure of labels, inputs and heads, and the meter's values."""
    return {
        "defence": str(plan.defence),
        "exposure": exposure(
            plan.rules.labels_stay,
            plan.rules.returns or plan.rules.sums,
            plan.rules.hands,
            plan.defence,
            plan.personal_heads,
        ),
        "measured": dict(measured),
    }


def _formulas(
    plan: SplitPlan, heads: Side, cuts: Sequence[tuple[int, int]], target_bytes: int
) -> dict[str, int]:
    """Return the bytes of each type of message by the formula.

    The formula is for a full batch, and for a head's weights without optimizer state. cuts: bytes
    of values and of gradients at each cut.
    """
    weights = sum(one.nbytes for one in heads.parameters.values())
    head = weights + sum(one.nbytes for one in heads.buffers())
    values, gradients = cuts[0]
    of = {"Gradients": gradients, **dict.fromkeys(_WITH_HEADS, head)}
    of |= {"HeadGradients": weights, "HeadSum": weights}
    if plan.rules.labels_stay:
        outputs, back = cuts[-1]
        return of | {"Smashed": values, "Outputs": outputs, "OutputGradients": back}
    return of | {"Smashed": values + target_bytes}
