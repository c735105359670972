"""Which clients take part in a round: pure functions of (seed, round).

A selection names an order in which clients are asked; who is not there is passed over, so that
those who are there are chosen as if only they had been asked.

    uniform     m = max(C·K, 1) of K, without replacement
    weighted    m of K without replacement, each next one with probability ~ n_k
    poisson     each of K independently with probability C: m differs from round to round, and may
                be 0; so many of those who are there are then asked
    coins       each of K tosses a coin of its own, with probability C; who is not there, or fails,
                is missing, and nobody comes in its place

Sources: McMahan et al. 2017, algorithm 1 (uniform); Efraimidis, Spirakis 2006 (weighted).

A selection of a user's own may look at clients' losses (`ranked`): the last ones that they have
told with their updates, or those of the round's model, for which it asks some of them.

With coins no client is in a round with a larger probability than C, whoever else is away: what
differential privacy of clients counts on. The others fill up a round, so that somebody is asked the
more often the fewer are there.

More than m may be asked (over-selection) and a round may end before all have answered (a deadline),
as long as a minimum has: K. Bonawitz et al., "Towards Federated Learning at Scale: System Design",
2019.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import ClassVar, Protocol

import numpy as np

from dure.arguments import Told
from dure.randomness.permutation import Permutation
from dure.randomness.seeds import derive
from dure.settings import name_of, read, write

Candidates = Callable[[int], int]
"""The client that is asked at a position 0, 1, ... of a round's order."""


class Losses(Protocol):
    """What a server may know of its clients' losses when it chooses those of a round."""

    def last(self, client: int) -> float | None:
        """The mean over its local steps, of its last update that was taken; None before it."""

    def now(self, clients: Sequence[int]) -> list[float]:
        """Of the round's model, the mean over all examples of each, in their order.

        They are asked for it: each is sent the model, computes forward, and answers 8 bytes. NaN of
        one that is away. In a simulation alone.
        """


@dataclass(frozen=True)
class Selection(Told):
    """How a round chooses its clients.

    over: more clients are asked than are needed, by this factor. deadline: seconds after which a
    round ends with those who have answered; inf waits for all. minimum: with fewer answers than
    this at the deadline a round begins again.
    """

    over: float = 1.0
    deadline: float = math.inf
    minimum: int = 1

    name: ClassVar[str]
    varies: ClassVar[bool] = False
    """Whether rounds differ in how many answers they are to have."""
    tosses: ClassVar[bool] = False
    """Whether each client has a coin of its own, and nobody is asked in place of another."""
    asks: ClassVar[bool] = False
    """Whether `ranked` asks clients for their losses, by `Losses.now`."""
    by_size: ClassVar[bool] = False
    """Whether clients are chosen by how many examples they have."""

    @property
    def ranks(self) -> bool:
        """Whether `ranked` is its own, so that losses have a say."""
        return type(self).ranked is not Selection.ranked

    def __post_init__(self) -> None:
        if not 1 <= self.over < math.inf:
            raise ValueError(
                f"over is {self.over}, but a round asks at least those it needs: 1 or more"
            )
        if not self.deadline > 0:
            raise ValueError(f"deadline is {self.deadline}, but a round takes more than 0 seconds")
        if self.minimum < 1:
            raise ValueError(f"minimum is {self.minimum}, but a round needs at least one answer")

    def wanted(self, seed: int, round: int, clients: int, fraction: float) -> int:
        """How many answers the round is to have."""
        return clients_per_round(clients, fraction)

    def most(self, clients: int, fraction: float) -> int:
        """The most answers that any round is to have."""
        return clients_per_round(clients, fraction)

    def order(
        self, seed: int, round: int, attempt: int, sizes: Sequence[int], likely: int = 0
    ) -> Candidates:
        """The order in which clients are asked in this round.

        attempt: counts the times that it began again. sizes: of all clients. likely: how many are
        asked if all are there.
        """
        permutation = Permutation(len(sizes), _seed(seed, round, attempt))
        known = permutation.first(likely)

        def at(position: int) -> int:
            """The client at a position; more are drawn where some of the likely ones are away."""
            # Twice as many each time, so that drawing takes linear time however far somebody asks.
            if position >= len(known):
                known[:] = permutation.first(2 * position + 32)
            return known[position]

        # All are known already: plain indexing is faster than a function.
        return known.__getitem__ if len(known) == len(sizes) else at

    def ranked(
        self, seed: int, round: int, attempt: int, sizes: Sequence[int], losses: Losses
    ) -> Sequence[int]:
        """The clients that are asked before all others, the first ones first: by default none.

        The others follow in `order`. The rest is as there.
        """
        return ()

    def __str__(self) -> str:
        return write(self) if self != type(self)() else name_of(type(self))


@dataclass(frozen=True)
class Uniform(Selection):
    """All clients alike."""

    name: ClassVar[str] = "uniform"


@dataclass(frozen=True)
class Weighted(Selection):
    """Clients with more examples more often."""

    name: ClassVar[str] = "weighted"
    by_size: ClassVar[bool] = True

    def order(
        self, seed: int, round: int, attempt: int, sizes: Sequence[int], likely: int = 0
    ) -> Candidates:
        random = np.random.default_rng(_seed(seed, round, attempt))
        # An exponential variable divided by n_k has rate n_k, and the least of such is that of
        # client k with probability n_k / (sum of n): the order of keys is the draw without
        # replacement.
        keys = random.standard_exponential(len(sizes)) / np.asarray(sizes)
        order: list[int] = np.argsort(keys, kind="stable").tolist()
        return order.__getitem__


@dataclass(frozen=True)
class Poisson(Selection):
    """Every client tosses its own coin."""

    name: ClassVar[str] = "poisson"
    varies: ClassVar[bool] = True

    def wanted(self, seed: int, round: int, clients: int, fraction: float) -> int:
        # The number of those whose coin falls so; who they are is then the uniform order. That has
        # the same distribution as a coin each, without a coin for each of a million clients.
        return int(
            np.random.default_rng(derive(seed, "poisson", round)).binomial(clients, fraction)
        )

    def most(self, clients: int, fraction: float) -> int:
        return clients


@dataclass(frozen=True)
class Coins(Selection):
    """Every client tosses its own coin, and nobody comes in the place of one that is away.

    A round ends when all who were asked have answered or failed, or at its deadline. deadline: by
    which each client is late or not by itself. over and minimum are 1: how many others answer
    changes nothing.
    """

    name: ClassVar[str] = "coins"
    tosses: ClassVar[bool] = True

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.over != 1 or self.minimum != 1:
            raise ValueError(
                f"{self} asks more than are needed or begins rounds again, by which clients would "
                f"be asked more often than their coins say: write coins, or coins:1:60 for a "
                f"deadline of 60 s"
            )

    def most(self, clients: int, fraction: float) -> int:
        return clients


SELECTIONS: dict[str, type[Selection]] = {
    kind.name: kind for kind in (Uniform, Weighted, Poisson, Coins)
}
"""Every selection by the name its text form begins with."""


def parse(text: str) -> Selection:
    """The selection that `text` names: "uniform", "weighted", "uniform:1.3:60:8", ...

    The numbers are over, deadline and minimum; those of a class of a user's own follow.

    Raises ValueError for an unknown name and for values that do not fit.
    """
    return read(text, SELECTIONS, "selection", Selection)


def before(ranked: Sequence[int], order: Candidates, clients: int) -> Candidates:
    """The order of all clients in which these come first.

    Raises ValueError for clients that there are not, or that come twice.
    """
    first = list(ranked)
    if len(set(first)) != len(first) or not all(0 <= one < clients for one in first):
        raise ValueError(
            f"the selection ranks {first}, and there are clients 0 to {clients - 1}, each once"
        )
    known = set(first)
    rest = [one for one in map(order, range(clients)) if one not in known]
    return [*first, *rest].__getitem__


def clients_per_round(clients: int, fraction: float) -> int:
    """How many clients a round has: m = max(C·K, 1), with C·K rounded."""
    return max(round(fraction * clients), 1)


def uniform(seed: int, round: int, clients: int, fraction: float) -> list[int]:
    """The clients of a round in which all are there, in ascending order."""
    return sorted(
        Permutation(clients, _seed(seed, round, 0)).first(clients_per_round(clients, fraction))
    )


def _seed(seed: int, round: int, attempt: int) -> int:
    return derive(seed, "sample clients", round, attempt)
