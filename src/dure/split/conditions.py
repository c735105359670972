"""Under which conditions split learning is simulated."""

from __future__ import annotations

from collections.abc import Collection

from dure.fleet.conditions import Conditions

WITHOUT = frozenset(
    {
        "availability",
        "arrival",
        "drop_out",
        "attack",
        "energy",
        "transfer_budget",
        "keep_updates",
        "deadline",
    }
)
"""Conditions that a simulation of split learning does not have (`Strategy.without`).

Nor does it choose an engine: each client computes by itself, step by step, as in `loop`.
"""

LABELS_APART = (
    "labels are kept from a side of the model, and a model that computes its own loss is given "
    "them: give a loss"
)


def check_conditions(conditions: Conditions, without: Collection[str]) -> None:
    """Raises ValueError for conditions that a simulation of split learning does not have.

    without: their names, as the strategy says them.
    """
    ideal = Conditions()
    unknown = sorted(without)
    # Which is what a network has for its clients.
    if conditions.engine != "loop":
        unknown.append("engine")
    for name in unknown:
        if getattr(conditions, name) != getattr(ideal, name):
            raise ValueError(
                f"split learning is simulated without {name.replace('_', ' ')}: leave it out"
            )
