"""Under which conditions split learning is simulated."""

from __future__ import annotations

from collections.abc import Sequence

from dure.fleet.conditions import Conditions

WITHOUT = (
    "availability",
    "arrival",
    "drop_out",
    "attack",
    "engine",
    "energy",
    "transfer_budget",
    "keep_updates",
    "deadline",
)
"""Conditions that a simulation of split learning does not have."""


def check_conditions(conditions: Conditions, known: Sequence[str] = ()) -> None:
    """Raises ValueError for conditions that a simulation of split learning does not have.

    known: those that it has besides devices and links.
    """
    ideal = Conditions()
    for name in WITHOUT:
        # Over a network each client computes by itself, step by step, as it does here.
        if name in known or (name == "engine" and conditions.engine == "loop"):
            continue
        if getattr(conditions, name) != getattr(ideal, name):
            raise ValueError(
                f"split learning is simulated without {name.replace('_', ' ')}: leave it out"
            )
