"""Who lies: exactly so many clients, drawn once for the run, or anew in every turn.

The liars are the first f numbers of a random permutation of the clients
(`dure.randomness.permutation`), so that whether one client lies is answered in O(1), and no list of
a million clients is made.

Drawn anew in every turn is what Y. Chen, L. Su and J. Xu allow ("Distributed Statistical Machine
Learning in Adversarial Settings", 2017): at most q liars in each turn, never the same ones for
sure.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator

from dure.randomness.permutation import Permutation
from dure.randomness.seeds import derive


class Liars(Collection[int]):
    """The clients that lie, in ascending order.

    `client in liars`, `len(liars)` and `for client in liars` are what it knows.
    """

    def __init__(self, permutation: Permutation, count: int) -> None:
        self._permutation = permutation
        self._count = count

    def __contains__(self, client: object) -> bool:
        # O(1): where the client stands in the permutation, of which nothing is stored.
        return isinstance(client, int) and self._permutation.inverse(client) < self._count

    def __len__(self) -> int:
        return self._count

    def __iter__(self) -> Iterator[int]:
        return iter(sorted(self._permutation.first(self._count)))


def liars(clients: int, attackers: float, seed: int, turn: int | None = None) -> Liars:
    """Which of the clients 0..clients-1 lie.

    attackers: how many (1 or more), or which share of the clients (less than 1, rounded to the
        nearest whole number).
    turn: None for the same liars in the whole run; a turn's number for those of that turn only.

    Raises ValueError for attackers that are not a number of clients.
    """
    return Liars(_permutation(clients, seed, turn), count(clients, attackers))


def is_liar(
    client: int, clients: int, attackers: float, seed: int, turn: int | None = None
) -> bool:
    """Whether `client` is one of `liars(clients, attackers, seed, turn)`."""
    return client in liars(clients, attackers, seed, turn)


def count(clients: int, attackers: float) -> int:
    """How many of `clients` lie.

    Raises ValueError for attackers that are no number of clients, or share below 1.
    """
    if 0 <= attackers < 1:
        return round(attackers * clients)
    if attackers != attackers or attackers < 0 or attackers % 1:
        raise ValueError(
            f"attackers are a whole number of clients, or a share in [0, 1), not {attackers}"
        )
    if attackers > clients:
        raise ValueError(f"{attackers:.0f} attackers are more than the {clients} clients")
    return int(attackers)


def _permutation(clients: int, seed: int, turn: int | None) -> Permutation:
    position = () if turn is None else (turn,)
    return Permutation(clients, derive(seed, "liars", *position))
