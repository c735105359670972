"""Known losses of clients, for a selection that ranks clients by loss."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

AskLosses = Callable[[Sequence[int]], list[float]]
"""(clients) -> losses: asks clients for the loss of the newest model on their data."""


@dataclass
class KnownLosses:
    """The last reported losses of clients, by number, and a function to ask for new losses.

    ask: None if clients cannot be asked.
    """

    ask: AskLosses | None = None
    told: dict[int, float] = field(default_factory=dict)

    def last(self, client: int) -> float | None:
        """Return the last loss that the client reported, as `ClientLosses.last`."""
        return self.told.get(client)

    def now(self, clients: Sequence[int]) -> list[float]:
        """Return the clients' losses of the newest model, as `ClientLosses.now`.

        Raises ValueError if clients cannot be asked.
        """
        if self.ask is None:
            raise ValueError(
                "the selection asks clients for their losses, but its class does not set asks = "
                "True; such a selection also needs a simulation"
            )
        return self.ask(clients)
