"""What a run of split learning says of itself: where it was cut, and who could learn what."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from dure.parallel.pipeline.cut import CutModel
from dure.record.meter import Meter
from dure.split.compressed import message_bytes
from dure.split.leakage.exposure import exposure
from dure.split.plan import Plan
from dure.split.sides import Side

_WITH_HEADS = ("Turn", "Handed", "Ended")
"""Kinds of messages whose payload is a head."""

Sides = tuple[Side, Side]
"""That of clients, and the server's."""


def facts_of(
    plan: Plan,
    cut: CutModel,
    sides: Sides,
    clients: Sequence[Meter],
    *,
    shares: Sequence[float],
    flops: float,
    target_bytes: int,
    measured: Mapping[str, float],
) -> dict[str, Any]:
    """As JSON.

    clients: their meters. shares: of the stages in the operations; flops: of a step of the whole
    model. target_bytes: of the targets of a batch. measured: what the leak meter last said.
    """
    heads, tails = sides
    values, gradients = cut.message_bytes(0, cut.examples)
    compressed = [
        message_bytes(plan.compression, cut, boundary, cut.examples)
        for boundary in range(cut.stages - 1)
    ]
    return {
        "split": {
            "at": list(plan.at),
            "shares": list(shares),
            "head_weights": sum(one.numel() for one in heads.parameters.values()),
            "tail_weights": sum(one.numel() for one in tails.parameters.values()),
            "weights": [_weights_of(cut, sides, stage) for stage in range(cut.stages)],
            "smashed_bytes": values,
            "gradient_bytes": gradients,
            "examples": cut.examples,
            "messages_sent": [one.counters.messages_sent for one in clients],
            "compression": str(plan.compression),
            "compressed_bytes": [list(one) for one in compressed],
            "flops": flops,
            "formulas": _formulas(plan, heads, compressed, target_bytes),
        },
        "leakage": {
            "defence": str(plan.defence),
            "exposure": exposure(
                plan.rules.labels_stay,
                plan.rules.returns or plan.rules.sums,
                plan.rules.hands,
                plan.defence,
                plan.personal_heads,
            ),
            "measured": dict(measured),
        },
    }


def _weights_of(cut: CutModel, sides: Sides, stage: int) -> int:
    """How many weights a part of the model trains."""
    side = sides[1] if stage == 1 else sides[0]
    names = set(cut.names[stage])
    return sum(one.numel() for name, one in side.parameters.items() if name in names)


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
