"""When the server asks clients, and when it makes a new model: three policies of one coordinator.

    Rounds          m clients a round, all from the same model; the new one when m have answered, or
                    at a deadline
    Asynchronous    so many clients at work at any time; a new model with every update
    Buffered        so many clients at work at any time; a new model with every K updates

Sources: McMahan et al. 2017 and Bonawitz et al. 2019 (rounds); Xie, Koyejo, Gupta 2019
(asynchronous); Nguyen et al. 2022 (buffered).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import ClassVar

from dure.federated.server.sampling import (
    Candidates,
    Losses,
    Selection,
    Uniform,
    clients_per_round,
)
from dure.randomness.permutation import Permutation
from dure.randomness.seeds import derive

Order = Callable[[int, int, int, Sequence[int], int], Candidates]
"""(seed, round, attempt, sizes, likely) -> who is asked at each position.

`Selection.order` says what these are.
"""


Ranked = Callable[[int, int, int, Sequence[int], Losses], Sequence[int]]
"""(seed, round, attempt, sizes, losses) -> who comes before that order; `Selection.ranked`."""


@dataclass(frozen=True)
class Pacing:
    """What the coordinator asks of a policy."""

    synchronous: ClassVar[bool]
    """Whether there are rounds.

    All clients of a round are asked at its beginning, and answers that come after its end are
    refused.
    """

    @property
    def varies(self) -> bool:
        """Whether `asked` and `needed` are others for each model."""
        return False

    @property
    def tosses(self) -> bool:
        """Whether each client has a coin of its own; then `asked` and `needed` are of no account.

        A round ends when all who were asked have answered or failed, or at its deadline.
        """
        return False

    @property
    def deadline(self) -> float:
        """Seconds after which a round ends with those who have answered."""
        return math.inf

    @property
    def minimum(self) -> int:
        """The fewest answers that make a new model."""
        raise NotImplementedError

    @property
    def oldest(self) -> int | None:
        """How many versions old a model may be that is handed out.

        Its age is drawn at random; None hands out the newest.
        """
        return None

    def asked(self, seed: int, round: int, clients: int) -> int:
        """How many clients are asked in a round, or are at work at any time."""
        raise NotImplementedError

    def needed(self, seed: int, round: int, clients: int) -> int:
        """How many answers make a new model."""
        raise NotImplementedError

    @property
    def order(self) -> Order:
        """Who is asked at each position."""
        raise NotImplementedError

    @property
    def ranked(self) -> Ranked | None:
        """Who comes before that order, where losses have a say."""
        return None

    @property
    def asks(self) -> bool:
        """Whether clients are asked for their losses before a round."""
        return False

    def updates(self, clients: int) -> int:
        """Updates that usually make a new model."""
        raise NotImplementedError

    def most(self, clients: int) -> int:
        """The most clients whose updates make one new model."""
        return self.updates(clients)

    def models_per_epoch(self, clients: int) -> int:
        """New models in which every client has answered once, about."""
        return max(1, round(clients / self.updates(clients)))

    def check(self, clients: int) -> None:
        """Raises ValueError for a policy that can never make a model with so many clients."""


@dataclass(frozen=True)
class Rounds(Pacing):
    """Synchronous rounds of a fraction of the clients."""

    fraction: float = 1.0
    selection: Selection = field(default_factory=Uniform)

    synchronous: ClassVar[bool] = True

    @property
    def varies(self) -> bool:
        return self.selection.varies

    @property
    def tosses(self) -> bool:
        return self.selection.tosses

    @property
    def deadline(self) -> float:
        return self.selection.deadline

    @property
    def minimum(self) -> int:
        return self.selection.minimum

    def asked(self, seed: int, round: int, clients: int) -> int:
        # More than are needed, so that the slow and those who drop out need not be waited for.
        return self._over(self.needed(seed, round, clients), clients)

    def needed(self, seed: int, round: int, clients: int) -> int:
        return self.selection.wanted(seed, round, clients, self.fraction)

    @property
    def order(self) -> Order:
        return self.selection.order

    @property
    def ranked(self) -> Ranked | None:
        return self.selection.ranked if self.selection.ranks else None

    @property
    def asks(self) -> bool:
        return self.selection.asks

    def updates(self, clients: int) -> int:
        return clients_per_round(clients, self.fraction)

    def most(self, clients: int) -> int:
        return self.selection.most(clients, self.fraction)

    def models_per_epoch(self, clients: int) -> int:
        return 1  # a round is shown as one, whatever its share of the clients

    def check(self, clients: int) -> None:
        most = self._over(self.selection.most(clients, self.fraction), clients)
        if self.minimum > most:
            raise ValueError(
                f"minimum is {self.minimum}, but a round asks no more than {most} of the "
                f"{clients} clients: "
                "take a smaller one, or ask more"
            )

    def _over(self, needed: int, clients: int) -> int:
        # 1e-9: 10 · 1.1 is a little more than 11 in floating point, and 11 are meant.
        return min(math.ceil(min(needed * self.selection.over - 1e-9, clients)), clients)


@dataclass(frozen=True)
class Buffered(Pacing):
    """A number of clients, `concurrency`, is always at work; `size` updates make a new model.

    stale: for experiments such as those of Xie et al.: one client at a time, which is handed a
    model that is 0 to so many versions old, at random; None hands out the newest.
    """

    concurrency: int
    size: int
    stale: int | None = None

    synchronous: ClassVar[bool] = False

    @property
    def minimum(self) -> int:
        return self.size

    @property
    def oldest(self) -> int | None:
        return self.stale

    # With `stale` it is the server that ages the models: a single client at work adds no delay of
    # its own.
    def asked(self, seed: int, round: int, clients: int) -> int:
        return 1 if self.stale is not None else min(self.concurrency, clients)

    def needed(self, seed: int, round: int, clients: int) -> int:
        return self.size

    @property
    def order(self) -> Order:
        return _endless

    def updates(self, clients: int) -> int:
        return self.size


def _endless(seed: int, round: int, attempt: int, sizes: Sequence[int], likely: int) -> Candidates:
    """The same order whatever the round is."""
    return _Endless(seed, len(sizes)).at


class _Endless:
    """All clients in an order of their own, again and again, each time in another."""

    def __init__(self, seed: int, clients: int) -> None:
        self.seed = seed
        self.clients = clients
        self._epoch = -1
        self._order: Permutation | None = None

    def at(self, position: int) -> int:
        epoch, place = divmod(position, self.clients)
        # Positions only rise, so the order of one pass is all that is remembered.
        if self._order is None or epoch != self._epoch:
            self._epoch = epoch
            self._order = Permutation(self.clients, derive(self.seed, "candidates", epoch))
        return self._order[place]


def asynchronous(concurrency: int, stale: int | None = None) -> Buffered:
    """A new model with every update: a buffer of one."""
    return Buffered(concurrency, 1, stale)
