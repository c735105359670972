"""Canary clients with the most distinct updates possible, for auditing client-level privacy.

Canary i tosses a fair coin. If the coin says "in", the canary sends a vector v_i of length L in
every round. Otherwise the canary sends a change of 0, which equals absence because the denominator
of the mean is fixed. v_i is a random direction; random directions are nearly orthogonal in many
dimensions. The score of a canary on the published models is

    score_i = <w_T - w_0, v_i> / L

The canaries with the highest scores are guessed to be "in", the canaries with the lowest scores
"out". `epsilon.one_run_epsilon` turns the guesses into a bound. If updates are clipped to S, choose
L far above S: a canary's update is then as long as the longest possible update, and every direction
is a worst case for noise that is the same in all directions.

In a simulation canaries replace some clients, as malicious clients do (`dure.fleet.attacks`).

Sources: T. Steinke, M. Nasr, M. Jagielski, "Privacy Auditing with One (1) Training Run", NeurIPS
2023; G. Andrew et al., "One-shot Empirical Privacy Estimation for Federated Learning", ICLR 2024
(canary clients with random directions).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from dure.federated.attacks.epsilon import one_run_epsilon
from dure.fleet.attacks.attack import Attack, Update
from dure.randomness.seeds import derive, generator


@dataclass(frozen=True)
class Canaries(Attack):
    """Attack in which the malicious clients are canaries.

    Args:
        seed: seed of the directions and the coins.
        length: L, the norm of a canary's update.
    """

    name: ClassVar[str] = "canaries"
    seed: int = 0
    length: float = 1e3

    def is_in(self, client: int) -> bool:
        """Return whether the client's coin says "in"."""
        return bool(derive(self.seed, "canary coin", client) & 1)

    def direction(self, client: int, like: Sequence[Tensor]) -> list[Tensor]:
        """Return v_i / L: float64 tensors of the shapes of `like`, with joint norm 1."""
        draws = generator(self.seed, "canary", client)
        drawn = [torch.randn(one.shape, generator=draws, dtype=torch.float64) for one in like]
        norm = torch.stack([one.square().sum() for one in drawn]).sum().sqrt()
        return [one / norm for one in drawn]

    def forge(
        self,
        updates: Sequence[Update],
        liars: object,
        seed: int,
        turn: int,
        clients: Sequence[int] | None = None,
    ) -> Sequence[Update]:
        """Return all updates, with canaries' updates at the positions `liars`.

        Args:
            updates: honest updates, a list of tensors for each position.
            liars: positions of the malicious clients.
            seed: not used; the canaries have a seed of their own.
            turn: not used; a canary sends the same update in every round.
            clients: client number at each position; None if positions are client numbers.
        """
        positions = set(liars)  # type: ignore[call-overload]
        return [
            self._sent(position if clients is None else clients[position], update)
            if position in positions
            else update
            for position, update in enumerate(updates)
        ]

    def _sent(self, client: int, update: Update) -> Update:
        if not self.is_in(client):
            return [torch.zeros_like(one) for one in update]
        aims = self.direction(client, update)
        return [
            (self.length * aim).to(one.device, one.dtype)
            for aim, one in zip(aims, update, strict=True)
        ]

    def score(self, client: int, moved: Sequence[Tensor]) -> float:
        """Return the scalar product of the model's movement `moved` and the client's direction."""
        pairs = zip(self.direction(client, moved), moved, strict=True)
        return sum(float((aim * one.cpu().double()).sum()) for aim, one in pairs)


def guesses(scores: Mapping[int, float], share: float = 0.5) -> dict[int, bool]:
    """Return a guess for the surest canaries: client -> True for "in", False for "out".

    The highest scores are guessed "in", the lowest "out", in equal numbers. `share` is the fraction
    of all canaries that is guessed; the canaries in the middle get no guess.
    """
    # Ties are broken by client number, so that equal inputs give equal guesses.
    order = sorted(scores, key=lambda client: (scores[client], client))
    each = max(1, int(len(order) * share / 2)) if len(order) > 1 else 0
    return dict.fromkeys(order[:each], False) | dict.fromkeys(order[len(order) - each :], True)


def audited_epsilon(
    canaries: Canaries, scores: Mapping[int, float], delta: float, share: float = 0.5
) -> tuple[float, int, int]:
    """Return the lower bound on epsilon, the number of guesses, and the number of right guesses."""
    guessed = guesses(scores, share)
    right = sum(canaries.is_in(client) == said for client, said in guessed.items())
    return one_run_epsilon(len(scores), len(guessed), right, delta), len(guessed), right
