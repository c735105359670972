"""Under which conditions split learning is simulated."""

from __future__ import annotations

from dure.fleet.conditions import Conditions

_WITHOUT = ("availability", "arrival", "drop_out", "attack", "engine", "transfer_budget")


def check_conditions(conditions: Conditions) -> None:
    """Raises ValueError for conditions that the clients of split learning do not have."""
    ideal = Conditions()
    for name in _WITHOUT:
        # Over a network each client computes by itself, step by step, as it does here.
        if name == "engine" and conditions.engine == "loop":
            continue
        if getattr(conditions, name) != getattr(ideal, name):
            raise ValueError(
                f"split learning is simulated without {name.replace('_', ' ')}: leave it out"
            )
