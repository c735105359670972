"""What a run of parties tells of itself: who has what of the model, and who could learn what."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor

from dure.data.batches import Batches
from dure.split.leakage.exposure import parties_exposure
from dure.split.parties.messages import party
from dure.split.parties.model import Division, Part
from dure.split.parties.plan import PartiesPlan


def facts_of(
    plan: PartiesPlan,
    division: Division,
    activations: Sequence[Tensor],
    batches: Batches,
    people: int,
    known: int,
    measured: Mapping[str, float],
) -> dict[str, Any]:
    """activations: what leaves each head for one example. people: whom all know; known: whom a
    party knows. measured: what the meters last said."""
    parties = zip(division.features, division.heads, activations, strict=True)
    return {
        "vertical": {
            "holder": plan.holder,
            "join": division.join,
            "people": people,
            "known": known,
            "aligned": plan.align,
            "batch_size": batches.batch_size,
            "tail_weights": _weights(division.tail),
            "parties": [
                {
                    "columns": list(columns),
                    "weights": _weights(head),
                    "activation_bytes": own.nbytes,
                    "gradient_bytes": own.nbytes if own.requires_grad else 0,
                }
                for columns, head, own in parties
            ],
        },
        "leakage": _leakage(plan, activations, measured),
    }


def _leakage(
    plan: PartiesPlan, activations: Sequence[Tensor], measured: Mapping[str, float]
) -> dict[str, Any]:
    """The defence, who could learn what, and what the meters last said."""
    others = plan.others(len(activations))
    learning = [party(number) for number in others if activations[number].requires_grad]
    names = [party(number) for number in others]
    return {
        "defence": str(plan.defence),
        "exposure": parties_exposure(plan.holder, names, learning, plan.align, plan.defence),
        "measured": dict(measured),
    }


def _weights(part: Part) -> int:
    return sum(piece.here.numel() for piece in part.pieces)
