"""What a run of split learning says of itself: where it was cut, and who could learn what."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from dure.collectives.compression import NoCompression
from dure.record.meter import Meter
from dure.split.divided import Divided
from dure.split.leakage.exposure import exposure
from dure.split.plan import Plan
from dure.split.sides import Side

_WITH_HEADS = ("Turn", "Handed", "Ended")
"""Kinds of messages whose payload is a head."""


def facts_of(
    plan: Plan,
    divided: Divided,
    clients: Sequence[Meter],
    *,
    flops: float,
    target_bytes: int,
    measured: Mapping[str, float],
) -> dict[str, Any]:
    """As JSON.

    clients: their meters. flops: of a step of the whole model. target_bytes: of the targets of a
    batch. measured: what the leak meter last said.
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


def leakage_of(plan: Plan, measured: Mapping[str, float]) -> dict[str, Any]:
    """Who could learn what."""
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
    plan: Plan, heads: Side, cuts: Sequence[tuple[int, int]], target_bytes: int
) -> dict[str, int]:
    """Bytes of each kind of message, by the formula: of a full batch, and of a head's weights,
    without what its optimizer remembers.

    cuts: bytes of values and of gradients that cross each cut.
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
