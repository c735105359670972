"""What a simulated federation costs its clients, next to what uploading their data would.

Counted are bytes down and up and the operations of local training, of every assignment that was
sent; of one that failed, the share that was done. break_even is the first round after which the
federation has sent more bytes, both ways together, than the data are.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from dure.fleet.energy import Energy
from dure.fleet.upload import Upload
from dure.protocol.carrier import Flight


class Cost:
    """What was spent so far.

    raw: what uploading the data would cost. per_example: operations of an example, forward and
    backward; infinite where these cannot be counted.
    """

    def __init__(self, raw: Upload, energy: Energy, per_example: float) -> None:
        self.raw = raw
        self.energy = energy
        self.per_example = per_example
        self.down = 0
        self.up = 0
        self.examples = 0.0
        self.break_even: int | None = None

    def count(self, number: int, flown: Sequence[Flight]) -> None:
        """These came to their end before model `number` was made."""
        for flight in flown:
            self.down += flight.down
            self.up += flight.up
            self.examples += flight.examples
        if self.break_even is None and self.down + self.up > self.raw.bytes:
            self.break_even = number

    @property
    def joules(self) -> float | None:
        """What the clients' devices have spent; None where it is not counted."""
        # 0 · inf is no number, and nothing computed costs nothing.
        operations = self.examples * self.per_example if self.examples else 0.0
        spent = self.energy.joules(operations, self.down, self.up)
        return spent if spent is not None and spent < float("inf") else None

    def facts(self) -> dict[str, Any]:
        """For the report: the cost so far, and that of the raw data."""
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
        """The inverse of `state`."""
        self.down = state["down"]
        self.up = state["up"]
        self.examples = state["examples"]
        self.break_even = state["break_even"]
