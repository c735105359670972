"""Facts of a vertical split learning run: parts of the model, and who could learn labels."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor

from dure.data.batches import Batches
from dure.split.leakage.exposure import parties_exposure
from dure.split.parties.messages import party
from dure.split.parties.model import VerticalDivision, VerticalPart
from dure.split.parties.plan import VerticalPlan


def facts_of(
    plan: VerticalPlan,
    division: VerticalDivision,
    activations: Sequence[Tensor],
    batches: Batches,
    people: int,
    known: int,
    measured: Mapping[str, float],
) -> dict[str, Any]:
    """Return the facts that a run records: parts of the model, bytes per example, and leakage.

    Args:
        plan: the settings of the run.
        division: the heads and the tail, with the columns of each party.
        activations: output of each head for one example, in the order of parties.
        batches: the batches of the run, for their size.
        people: number of people whom all parties know.
        known: number of people whom one party knows.
        measured: newest values of the leakage meters, by metric.
    """
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
    plan: VerticalPlan, activations: Sequence[Tensor], measured: Mapping[str, float]
) -> dict[str, Any]:
    """Return the defence, the exposure of labels and columns, and the values of the meters."""
    others = plan.others(len(activations))
    learning = [party(number) for number in others if activations[number].requires_grad]
    names = [party(number) for number in others]
    return {
        "defence": str(plan.defence),
        "exposure": parties_exposure(plan.holder, names, learning, plan.align, plan.defence),
        "measured": dict(measured),
    }


def _weights(part: VerticalPart) -> int:
    return sum(piece.here.numel() for piece in part.pieces)
