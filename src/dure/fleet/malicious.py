"""Malicious clients: a fixed number of clients, drawn once for the run, or in every turn.

The malicious clients are the first f numbers of a random permutation of the clients
(`dure.randomness.permutation`), so that a membership test takes O(1), without a list of a million
clients.

Y. Chen, L. Su and J. Xu allow a draw in every turn ("Distributed Statistical Machine Learning in
Adversarial Settings", 2017): at most q malicious clients per turn, which may change from turn to
turn.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from typing import NamedTuple

from dure.fleet.attacks import Attack
from dure.randomness.permutation import Permutation
from dure.randomness.seeds import derive


class MaliciousClients(Collection[int]):
    """The malicious clients, in ascending order.

    The collection supports `client in liars`, `len(liars)` and `for client in liars`.
    """

    def __init__(self, permutation: Permutation, count: int) -> None:
        self._permutation = permutation
        self._count = count

    def __contains__(self, client: object) -> bool:
        # O(1): the client's place in the permutation, which is not stored.
        return isinstance(client, int) and self._permutation.inverse(client) < self._count

    def __len__(self) -> int:
        return self._count

    def __iter__(self) -> Iterator[int]:
        return iter(sorted(self._permutation.first(self._count)))


def malicious_clients(
    clients: int, attackers: float, seed: int, turn: int | None = None
) -> MaliciousClients:
    """Return the malicious clients among 0..clients-1.

    attackers: number of malicious clients (1 or more), or their share (less than 1, rounded to the
    nearest whole number).
    turn: None for the same malicious clients in the whole run; a turn's number for that turn's.

    Raises ValueError for attackers that are not a number of clients.
    """
    return MaliciousClients(_permutation(clients, seed, turn), attacker_count(clients, attackers))


class Attackers(NamedTuple):
    """The attackers of a run.

    attack: their attack. clients: number of all clients. attackers: number or share of the
    malicious clients, as in `malicious_clients`. change: whether they are drawn for each round.
    seed: of the run.
    """

    attack: Attack
    clients: int
    attackers: float
    change: bool
    seed: int

    def of(self, round: int) -> MaliciousClients:
        """Return the malicious clients of a round."""
        # The draw depends on the round only if attackers change.
        turn = round if self.change else None
        return malicious_clients(self.clients, self.attackers, self.seed, turn)


def attacker_count(clients: int, attackers: float) -> int:
    """Return the number of malicious clients among `clients`.

    Raises ValueError for attackers that are neither a number of clients nor a share below 1.
    """
    if 0 <= attackers < 1:
        return round(attackers * clients)
    if attackers != attackers or attackers < 0 or attackers % 1:
        raise ValueError(f"attackers has to be an integer, or a share in [0, 1), not {attackers}")
    if attackers > clients:
        raise ValueError(f"the run has {attackers:.0f} attackers, but only {clients} clients")
    return int(attackers)


def _permutation(clients: int, seed: int, turn: int | None) -> Permutation:
    position = () if turn is None else (turn,)
    return Permutation(clients, derive(seed, "liars", *position))
