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


def facts_of(
    plan: Plan,
    cut: CutModel,
    heads: Side,
    tails: Side,
    shares: Sequence[float],
    clients: Sequence[Meter],
    measured: Mapping[str, float],
) -> dict[str, Any]:
    """As JSON. shares: of the stages in the operations. clients: their meters. measured: what the
    leak meter last said.
    """
    examples = cut.examples
    values, gradients = cut.message_bytes(0, examples)
    compressed = [
        message_bytes(plan.compression, cut, boundary, examples)
        for boundary in range(cut.stages - 1)
    ]
    return {
        "split": {
            "at": list(plan.at),
            "shares": list(shares),
            "head_weights": sum(one.numel() for one in heads.parameters.values()),
            "tail_weights": sum(one.numel() for one in tails.parameters.values()),
            "smashed_bytes": values,
            "gradient_bytes": gradients,
            "examples": examples,
            "messages_sent": [one.counters.messages_sent for one in clients],
            "compression": str(plan.compression),
            "compressed_bytes": [list(one) for one in compressed],
        },
        "leakage": {
            "defence": str(plan.defence),
            "exposure": exposure(
                plan.rules.labels_stay,
                plan.rules.returns or plan.rules.sums,
                plan.rules.hands,
                plan.defence,
            ),
            "measured": dict(measured),
        },
    }
