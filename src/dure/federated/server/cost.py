"""Costs of a simulated federation for its clients, next to the cost of uploading their data.

The meter counts bytes down and up and the operations of local training, for every assignment that
was sent; for a failed assignment, the share that was done. break_even is the first round after
which the federation has sent more bytes, both ways together, than the size of the data.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from dure.fleet.energy import Energy
from dure.fleet.upload import UploadCost
from dure.protocol.carrier import AssignmentRecord


class ClientCosts:
    """Costs of the clients so far.

    raw: cost of uploading the data. per_example: operations per example, forward and backward;
    infinite if they cannot be counted.
    """

    def __init__(self, raw: UploadCost, energy: Energy, per_example: float) -> None:
        self.raw = raw
        self.energy = energy
        self.per_example = per_example
        self.down = 0
        self.up = 0
        self.examples = 0.0
        self.break_even: int | None = None

    def count(self, number: int, flown: Sequence[AssignmentRecord]) -> None:
        """Add the assignments that ended before model `number` was made."""
        for flight in flown:
            self.down += flight.down
            self.up += flight.up
            self.examples += flight.examples
        if self.break_even is None and self.down + self.up > self.raw.bytes:
            self.break_even = number

    @property
    def joules(self) -> float | None:
        """Energy that the clients' devices have spent, in joules; None if not counted."""
        # 0 · inf is no number, and no computation costs nothing.
        operations = self.examples * self.per_example if self.examples else 0.0
        spent = self.energy.joules(operations, self.down, self.up)
        return spent if spent is not None and spent < float("inf") else None

    def facts(self) -> dict[str, Any]:
        """Return the costs so far, and the cost of the raw data, for the report."""
        return {
            "cost": {
                "bytes": self.down + self.up,
                "examples": self.examples,
                "joules": self.joules,
                "raw_data": self.raw._asdict(),
                "break_even": self.break_even,
            }
        }

    def state(self) -> dict[str, Any]:
        return {
            "down": self.down,
            "up": self.up,
            "examples": self.examples,
            "break_even": self.break_even,
        }

    def restore(self, state: Mapping[str, Any]) -> None:
        """Restore the result of `state`."""
        self.down = state["down"]
        self.up = state["up"]
        self.examples = state["examples"]
        self.break_even = state["break_even"]
