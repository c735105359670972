"""When the server asks clients, and when it makes a new model of what they sent: three policies of
one coordinator.

    Rounds          m clients a round, all from the same model; the new one when m have answered, or at a deadline
    Asynchronous    so many clients at work at any time; a new model with every update
    Buffered        so many clients at work at any time; a new model with every K updates

Sources: McMahan et al. 2017 and Bonawitz et al. 2019 (rounds); Xie, Koyejo, Gupta 2019
(asynchronous); Nguyen et al. 2022 (buffered).
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field

from dure.federated.server.sampling import Selection, Uniform


@dataclass(frozen=True)
class Rounds:
    """Synchronous rounds of a fraction of the clients."""

    fraction: float = 1.0
    selection: Selection = field(default_factory=Uniform)

    synchronous = True

    def asked(self, seed: int, round: int, clients: int) -> int:
        """How many clients are asked in a round."""
        return self._over(self.needed(seed, round, clients), clients)

    def needed(self, seed: int, round: int, clients: int) -> int:
        """How many answers end a round."""
        return self.selection.wanted(seed, round, clients, self.fraction)

    def check(self, clients: int) -> None:
        """Raises ValueError for a minimum that can never be met."""
        most = self._over(self.selection.most(clients, self.fraction), clients)
        if self.selection.minimum > most:
            raise ValueError(
                f"minimum is {self.selection.minimum}, but a round asks no more than {most} of the "
                f"{clients} clients: "
                "take a smaller one, or ask more"
            )

    def _over(self, needed: int, clients: int) -> int:
        return min(math.ceil(min(needed * self.selection.over - 1e-9, clients)), clients)


@dataclass(frozen=True)
class Buffered:
    """A number of clients, `concurrency`, is always at work; `size` updates make a new model.

    stale: for experiments as Xie et al. make them: one client at a time, which is handed a model
    that is 0 to so many versions old, at random; None hands out the newest.
    """

    concurrency: int
    size: int
    stale: int | None = None

    synchronous = False

    def asked(self, seed: int, round: int, clients: int) -> int:
        return 1 if self.stale is not None else min(self.concurrency, clients)

    def needed(self, seed: int, round: int, clients: int) -> int:
        return self.size


def asynchronous(concurrency: int, stale: int | None = None) -> Buffered:
    """A new model with every update: a buffer of one."""
    return Buffered(concurrency, 1, stale)


Pacing = Rounds | Buffered
