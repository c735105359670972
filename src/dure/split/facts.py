"""What a run of split learning says of itself: where it was cut, and who could learn what."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from dure.collectives.compression import NoCompression
from dure.record.meter import Meter
from dure.split.divided import Divided
from dure.split.leakage.exposure import exposure
from dure.split.plan import Plan


def facts_of(
    plan: Plan, divided: Divided, clients: Sequence[Meter], measured: Mapping[str, float]
) -> dict[str, Any]:
    """As JSON. clients: their meters. measured: what the leak meter last said."""
    values, gradients = divided.message_bytes(NoCompression())[0]
    compressed = divided.message_bytes(plan.compression)
    return {
        "split": {
            "at": list(divided.at),
            "shares": list(divided.shares),
            "head_weights": sum(one.numel() for one in divided.heads.parameters.values()),
            "tail_weights": sum(one.numel() for one in divided.tails.parameters.values()),
            "smashed_bytes": values,
            "gradient_bytes": gradients,
            "examples": divided.examples,
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
