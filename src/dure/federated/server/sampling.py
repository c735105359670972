"""Selection of a round's clients: pure functions of (seed, round).

A selection defines an order in which clients are asked. Unavailable clients are skipped, so that
the available clients are chosen as if only they existed.

    uniform     m = max(C·K, 1) of K, without replacement
    weighted    m of K without replacement, each next client with probability ~ n_k
    poisson     each of K independently with probability C: m differs from round to round, and may
                be 0; m available clients are then asked
    coins       each of K independently with probability C; a sampled client that is unavailable or
                fails is not replaced

Sources: McMahan et al. 2017, algorithm 1 (uniform); Efraimidis, Spirakis 2006 (weighted).

A user-defined selection may rank clients by loss (`ranked`): by the last losses that they reported
with their updates, or by the loss of the round's model, for which the server asks some of them.

With coins, a client's probability of being in a round is at most C, whichever others are
unavailable; user-level differential privacy assumes this bound. The other selections fill up a
round, so that a client is asked more often if fewer are available.

The server may ask more than m clients (over-selection), and a round may end before all have
answered (a deadline) if at least a minimum has: K. Bonawitz et al., "Towards Federated Learning at
Scale: System Design", 2019.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import ClassVar, Protocol

import numpy as np

from dure.arguments import CheckedSettings, above, at_least, check_ranges
from dure.randomness.permutation import Permutation
from dure.randomness.seeds import derive
from dure.settings import name_of, read, write

Candidates = Callable[[int], int]
"""Client at position 0, 1, ... of a round's order."""


class ClientLosses(Protocol):
    """Losses of clients that a server can use to choose a round's clients."""

    def last(self, client: int) -> float | None:
        """Return the mean loss over the steps of the client's last accepted update, or None."""

    def now(self, clients: Sequence[int]) -> list[float]:
        """Return the mean loss of the round's model over all examples of each client.

        Each client receives the model, computes a forward pass, and answers 8 bytes. NaN for an
        unavailable client. Works in a simulation only.
        """


@dataclass(frozen=True)
class Selection(CheckedSettings):
    """Base class of selections.

    over: factor of over-selection. deadline: seconds after which a round ends with the answers so
    far; inf waits for all. minimum: fewest answers at the deadline; with fewer, the round restarts.
    """

    over: float = field(default=1.0, metadata=at_least(1, finite=True))
    deadline: float = field(default=math.inf, metadata=above(0))
    minimum: int = field(default=1, metadata=at_least(1))

    name: ClassVar[str]
    varies: ClassVar[bool] = False
    """Whether rounds differ in their number of wanted answers."""
    samples_independently: ClassVar[bool] = False
    """Whether each client is sampled independently, and absent clients are not replaced."""
    asks: ClassVar[bool] = False
    """Whether `ranked` asks clients for their losses, by `ClientLosses.now`."""
    by_size: ClassVar[bool] = False
    """Whether the choice depends on the clients' numbers of examples."""

    @property
    def ranks(self) -> bool:
        """Whether the selection overrides `ranked`, so that losses have an influence."""
        return type(self).ranked is not Selection.ranked

    def __post_init__(self) -> None:
        check_ranges(self)

    def wanted(self, seed: int, round: int, clients: int, fraction: float) -> int:
        """Return the number of wanted answers of the round."""
        return clients_per_round(clients, fraction)

    def most(self, clients: int, fraction: float) -> int:
        """Return the largest number of wanted answers of any round."""
        return clients_per_round(clients, fraction)

    def order(
        self, seed: int, round: int, attempt: int, sizes: Sequence[int], likely: int = 0
    ) -> Candidates:
        """Return the order in which clients are asked in this round.

        Args:
            seed: of the run.
            round: number of the round.
            attempt: number of restarts of the round.
            sizes: examples of all clients.
            likely: number of requests if all clients are available.
        """
        permutation = Permutation(len(sizes), _seed(seed, round, attempt))
        known = permutation.first(likely)

        def at(position: int) -> int:
            """Return the client at a position; draws more clients on demand."""
            # Doubled each time, so that drawing takes linear time for any number of positions.
            if position >= len(known):
                known[:] = permutation.first(2 * position + 32)
            return known[position]

        # All clients are drawn already: plain indexing is faster than a function.
        return known.__getitem__ if len(known) == len(sizes) else at

    def ranked(
        self, seed: int, round: int, attempt: int, sizes: Sequence[int], losses: ClientLosses
    ) -> Sequence[int]:
        """Return the clients to ask before all others, in order; by default none.

        The other clients follow in `order`. The other parameters are as in `order`.
        """
        return ()

    def __str__(self) -> str:
        return write(self) if self != type(self)() else name_of(type(self))


@dataclass(frozen=True)
class Uniform(Selection):
    """Selection of all clients with the same probability."""

    name: ClassVar[str] = "uniform"


@dataclass(frozen=True)
class Weighted(Selection):
    """Selection of clients with probabilities by their numbers of examples."""

    name: ClassVar[str] = "weighted"
    by_size: ClassVar[bool] = True

    def order(
        self, seed: int, round: int, attempt: int, sizes: Sequence[int], likely: int = 0
    ) -> Candidates:
        random = np.random.default_rng(_seed(seed, round, attempt))
        # An exponential variable divided by n_k has rate n_k, and client k has the least variable
        # with probability n_k / (sum of n): the order of keys is the draw without replacement.
        keys = random.standard_exponential(len(sizes)) / np.asarray(sizes)
        order: list[int] = np.argsort(keys, kind="stable").tolist()
        return order.__getitem__


@dataclass(frozen=True)
class Poisson(Selection):
    """Poisson sampling of the round's size; unavailable clients are replaced by others."""

    name: ClassVar[str] = "poisson"
    varies: ClassVar[bool] = True

    def wanted(self, seed: int, round: int, clients: int, fraction: float) -> int:
        # Draws the number of sampled clients; the clients are then the first of the uniform order.
        # The distribution is the same as sampling each client, without a draw for each of a million
        # clients.
        return int(
            np.random.default_rng(derive(seed, "poisson", round)).binomial(clients, fraction)
        )

    def most(self, clients: int, fraction: float) -> int:
        return clients


@dataclass(frozen=True)
class PerClientPoisson(Selection):
    """Poisson sampling of each client; unavailable clients are not replaced.

    A round ends when all asked clients have answered or failed, or at its deadline. Whether a
    client meets the deadline depends on the client alone. over and minimum are 1: the number of
    other answers has no effect.
    """

    name: ClassVar[str] = "coins"
    samples_independently: ClassVar[bool] = True

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.over != 1 or self.minimum != 1:
            raise ValueError(
                f"{self} asks more clients than needed or restarts rounds, so clients would be "
                "asked more often than their coins determine: write coins, or coins:1:60 for a "
                "deadline of 60 s"
            )

    def most(self, clients: int, fraction: float) -> int:
        return clients


SELECTIONS: dict[str, type[Selection]] = {
    kind.name: kind for kind in (Uniform, Weighted, Poisson, PerClientPoisson)
}
"""Built-in selections by the name with which their text form begins."""


def parse(text: str) -> Selection:
    """Return the selection that `text` names: "uniform", "weighted", "uniform:1.3:60:8", ...

    The numbers are over, deadline and minimum; fields of a user-defined class follow.

    Raises ValueError for an unknown name and for invalid values.
    """
    return read(text, SELECTIONS, "selection", Selection)


def ranked_first(ranked: Sequence[int], order: Candidates, clients: int) -> Candidates:
    """Return the order of all clients that starts with the ranked clients.

    Raises ValueError for ranked clients that do not exist, or occur twice.
    """
    first = list(ranked)
    if len(set(first)) != len(first) or not all(0 <= one < clients for one in first):
        raise ValueError(
            f"the selection ranks {first}, but it has to rank each of the clients 0 to "
            f"{clients - 1} once"
        )
    known = set(first)
    rest = [one for one in map(order, range(clients)) if one not in known]
    return [*first, *rest].__getitem__


def clients_per_round(clients: int, fraction: float) -> int:
    """Return the number of clients per round: m = max(C·K, 1), with C·K rounded."""
    return max(round(fraction * clients), 1)


def uniform(seed: int, round: int, clients: int, fraction: float) -> list[int]:
    """Return the clients of a round in which all are available, in ascending order."""
    return sorted(
        Permutation(clients, _seed(seed, round, 0)).first(clients_per_round(clients, fraction))
    )


def _seed(seed: int, round: int, attempt: int) -> int:
    return derive(seed, "sample clients", round, attempt)
