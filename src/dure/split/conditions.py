"""Conditions under which split learning is simulated."""

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
"""Conditions that a simulation of split learning does not support (`Strategy.without`).

The engine is not supported either: each client computes on its own, step by step, as in `loop`.
"""

LABELS_APART = (
    "a model that computes its own loss receives the labels, but split learning separates the "
    "labels from a side of the model: give a loss"
)


def check_conditions(conditions: Conditions | None, without: Collection[str]) -> None:
    """Raise ValueError for conditions of clients that split learning does not support.

    without: names of these conditions, from the strategy.
    """
    if conditions is None:
        return
    ideal = Conditions()
    unknown = sorted(without)
    # Clients of split learning always compute as with the engine "loop".
    if conditions.engine != "loop":
        unknown.append("engine")
    for name in unknown:
        if getattr(conditions, name) != getattr(ideal, name):
            raise ValueError(
                f"simulated split learning does not support {name.replace('_', ' ')}: leave it out"
            )
