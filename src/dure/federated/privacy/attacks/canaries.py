"""Clients that leave as clear a trace as an update can: for auditing the privacy of clients.

Canary i sends, in every round, a vector v_i of the length L if its coin fell on "in", and nothing
(a change of 0, which is being absent where the denominator is fixed) if not. v_i is a random
direction: those of several canaries are nearly orthogonal in many dimensions. What the server
publishes is scored by

    score_i = <w_T - w_0, v_i> / L

and the highest scores are guessed to be "in", the lowest "out". `epsilon.one_run_epsilon` makes a
bound of the guesses. Where updates are clipped to S, L is chosen far above it: a canary is then as
long as anybody's update can be, and any direction is the worst one for noise that is the same in
all directions.

In a simulation canaries take the places of some clients, as liars do (`dure.fleet.attacks`).

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

from dure.federated.privacy.attacks.epsilon import one_run_epsilon
from dure.fleet.attacks.attack import Attack, Update
from dure.randomness.seeds import derive, generator


@dataclass(frozen=True)
class Canaries(Attack):
    """Liars that are canaries. seed: of directions and coins. length: L."""

    name: ClassVar[str] = "canaries"
    seed: int = 0
    length: float = 1e3

    def is_in(self, client: int) -> bool:
        """How the coin of a client fell."""
        return bool(derive(self.seed, "canary coin", client) & 1)

    def direction(self, client: int, like: Sequence[Tensor]) -> list[Tensor]:
        """v_i / L, of length 1 over all tensors, float64 of their shapes."""
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
        """What everybody sends, where those at the positions `liars` are canaries.

        clients: whose updates they are; without, clients are positions.
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
        """How far a model has moved in the client's direction."""
        pairs = zip(self.direction(client, moved), moved, strict=True)
        return sum(float((aim * one.cpu().double()).sum()) for aim, one in pairs)


def guesses(scores: Mapping[int, float], share: float = 0.5) -> dict[int, bool]:
    """Who is guessed to be in (the highest scores) and out (the lowest ones): client -> in.

    share: of all canaries that are guessed, the surest of each side; the rest is left out.
    """
    # Of equal scores by number, so that the same scores give the same guesses.
    order = sorted(scores, key=lambda client: (scores[client], client))
    each = max(1, int(len(order) * share / 2)) if len(order) > 1 else 0
    return dict.fromkeys(order[:each], False) | dict.fromkeys(order[len(order) - each :], True)


def audited_epsilon(
    canaries: Canaries, scores: Mapping[int, float], delta: float, share: float = 0.5
) -> tuple[float, int, int]:
    """(the lower bound on epsilon, guesses, right ones)."""
    guessed = guesses(scores, share)
    right = sum(canaries.is_in(client) == said for client, said in guessed.items())
    return one_run_epsilon(len(scores), len(guessed), right, delta), len(guessed), right
