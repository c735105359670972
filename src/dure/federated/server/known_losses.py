"""What a server knows of its clients' losses, for a selection that looks at them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

AskLosses = Callable[[Sequence[int]], list[float]]
"""Asks clients for the loss of the newest model on their data."""


@dataclass
class KnownLosses:
    """The last losses that clients have told, by number, and how they are asked.

    ask: None where nobody can be asked.
    """

    ask: AskLosses | None = None
    told: dict[int, float] = field(default_factory=dict)

    def last(self, client: int) -> float | None:
        """`Losses.last`."""
        return self.told.get(client)

    def now(self, clients: Sequence[int]) -> list[float]:
        """`Losses.now`. Raises ValueError where clients cannot be asked."""
        if self.ask is None:
            raise ValueError(
                "the selection asks clients for their losses without saying so: its class needs "
                "asks = True, and a simulation"
            )
        return self.ask(clients)
