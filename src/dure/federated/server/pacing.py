"""Pacing: policies of the coordinator for requests to clients and for new models.

    Rounds          m clients per round, all from the same model; the new model when m have
                    answered, or at a deadline
    Asynchronous    a number of clients at work at any time; a new model with every update
    Buffered        a number of clients at work at any time; a new model with every K updates

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
    ClientLosses,
    Selection,
    Uniform,
    clients_per_round,
)
from dure.randomness.permutation import Permutation
from dure.randomness.seeds import derive

OrderFunction = Callable[[int, int, int, Sequence[int], int], Candidates]
"""(seed, round, attempt, sizes, likely) -> client at each position, as `Selection.order`."""


RankingFunction = Callable[[int, int, int, Sequence[int], ClientLosses], Sequence[int]]
"""(seed, round, attempt, sizes, losses) -> clients before that order, as `Selection.ranked`."""


@dataclass(frozen=True)
class Pacing:
    """Interface between the coordinator and a policy."""

    synchronous: ClassVar[bool]
    """Whether there are rounds.

    All clients of a round are asked at its start, and answers after its end are refused.
    """

    @property
    def varies(self) -> bool:
        """Whether `asked` and `needed` differ from model to model."""
        return False

    @property
    def samples_independently(self) -> bool:
        """Whether each client is sampled independently; `asked` and `needed` then have no effect.

        A round ends when all asked clients have answered or failed, or at its deadline.
        """
        return False

    @property
    def deadline(self) -> float:
        """Seconds after which a round ends with the answers so far; inf without a deadline."""
        return math.inf

    @property
    def minimum(self) -> int:
        """Fewest answers that make a new model."""
        raise NotImplementedError

    @property
    def oldest(self) -> int | None:
        """Largest age of a model in an assignment, in versions, drawn at random.

        None for always the newest model.
        """
        return None

    def asked(self, seed: int, round: int, clients: int) -> int:
        """Return the number of clients to ask in a round, or to keep at work at any time."""
        raise NotImplementedError

    def needed(self, seed: int, round: int, clients: int) -> int:
        """Return the number of answers that make a new model."""
        raise NotImplementedError

    @property
    def order(self) -> OrderFunction:
        """Function from a round to the order in which clients are asked."""
        raise NotImplementedError

    @property
    def ranked(self) -> RankingFunction | None:
        """Function from a round to the clients ranked before that order; None without a ranking."""
        return None

    @property
    def asks(self) -> bool:
        """Whether clients are asked for their losses before a round."""
        return False

    def updates(self, clients: int) -> int:
        """Return the usual number of updates of a new model."""
        raise NotImplementedError

    def most(self, clients: int) -> int:
        """Return the largest number of clients in a new model."""
        return self.updates(clients)

    def models_per_epoch(self, clients: int) -> int:
        """Return the number of models in which every client has answered about once."""
        return max(1, round(clients / self.updates(clients)))

    def check(self, clients: int) -> None:
        """Raise ValueError if the policy can never make a model with `clients` clients."""


@dataclass(frozen=True)
class SynchronousPacing(Pacing):
    """Synchronous rounds of a fraction of the clients."""

    fraction: float = 1.0
    selection: Selection = field(default_factory=Uniform)

    synchronous: ClassVar[bool] = True

    @property
    def varies(self) -> bool:
        return self.selection.varies

    @property
    def samples_independently(self) -> bool:
        return self.selection.samples_independently

    @property
    def deadline(self) -> float:
        return self.selection.deadline

    @property
    def minimum(self) -> int:
        return self.selection.minimum

    def asked(self, seed: int, round: int, clients: int) -> int:
        # More than needed, so that the round need not wait for slow clients and dropouts.
        return self._over(self.needed(seed, round, clients), clients)

    def needed(self, seed: int, round: int, clients: int) -> int:
        return self.selection.wanted(seed, round, clients, self.fraction)

    @property
    def order(self) -> OrderFunction:
        return self.selection.order

    @property
    def ranked(self) -> RankingFunction | None:
        return self.selection.ranked if self.selection.ranks else None

    @property
    def asks(self) -> bool:
        return self.selection.asks

    def updates(self, clients: int) -> int:
        return clients_per_round(clients, self.fraction)

    def most(self, clients: int) -> int:
        return self.selection.most(clients, self.fraction)

    def models_per_epoch(self, clients: int) -> int:
        return 1  # an epoch is shown as one round, whatever the share of the clients

    def check(self, clients: int) -> None:
        most = self._over(self.selection.most(clients, self.fraction), clients)
        if self.minimum > most:
            raise ValueError(
                f"minimum is {self.minimum}, but a round asks at most {most} of the {clients} "
                "clients: set a smaller minimum, or select more clients"
            )

    def _over(self, needed: int, clients: int) -> int:
        # 1e-9: 10 · 1.1 is a little more than 11 in floating point, and 11 is intended.
        return min(math.ceil(min(needed * self.selection.over - 1e-9, clients)), clients)


@dataclass(frozen=True)
class BufferedPacing(Pacing):
    """`concurrency` clients are always at work; `size` updates make a new model.

    stale: for experiments such as Xie et al.'s: one client at a time, which gets a model that is 0
    to `stale` versions old, at random; None for always the newest model.
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

    # With `stale` the server ages the models: a single client at work adds no delay of its own.
    def asked(self, seed: int, round: int, clients: int) -> int:
        return 1 if self.stale is not None else min(self.concurrency, clients)

    def needed(self, seed: int, round: int, clients: int) -> int:
        return self.size

    @property
    def order(self) -> OrderFunction:
        return _endless

    def updates(self, clients: int) -> int:
        return self.size


def _endless(seed: int, round: int, attempt: int, sizes: Sequence[int], likely: int) -> Candidates:
    """Return the endless order of clients, which does not depend on the round."""
    return _Endless(seed, len(sizes)).at


class _Endless:
    """Endless repetition of all clients, each time in another random order."""

    def __init__(self, seed: int, clients: int) -> None:
        self.seed = seed
        self.clients = clients
        self._epoch = -1
        self._order: Permutation | None = None

    def at(self, position: int) -> int:
        epoch, place = divmod(position, self.clients)
        # Positions only rise, so a single pass's order is stored.
        if self._order is None or epoch != self._epoch:
            self._epoch = epoch
            self._order = Permutation(self.clients, derive(self.seed, "candidates", epoch))
        return self._order[place]


def asynchronous(concurrency: int, stale: int | None = None) -> BufferedPacing:
    """Return a buffer of size 1: a new model with every update."""
    return BufferedPacing(concurrency, 1, stale)
