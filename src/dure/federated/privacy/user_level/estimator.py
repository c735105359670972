"""Mean of clients' contributions with a fixed denominator, as differential privacy requires.

    f = ( Σ over the round's clients of w_k · clip(Δ_k)  +  N(0, (z·S·w_max)²) ) / (q·W)
    w_k = min(n_k / ŵ, 1)      w_max = 1      W = Σ over the roster of w_k, at the beginning

A single client moves f by at most S·w_max/(q·W), regardless of the others. A mean over the present
clients lacks this bound: among a hundred clients of 10 examples, a client of 1000 examples moves
the mean by half, not by a hundredth. The cost is that f is too short if clients are absent. Without
noise, and with S = inf, q = 1, equal weights and all clients present, f is the mean.

The sum is in float64, and is rounded to a grid after the noise is added, so that its last bits
reveal nothing (`dure.randomness.keystream`).

Source: McMahan et al. 2018, the estimator f_f.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from torch import Tensor

from dure.federated.privacy.user_level import clipping
from dure.federated.privacy.user_level.settings import UserLevel
from dure.randomness.keystream import normal, to_grid

W_MAX = 1.0
"""Largest weight of a client."""


class ClientPopulation(NamedTuple):
    """Population of clients, fixed at the beginning of a run.

    Args:
        rate: q, the probability that a client is in a round.
        clients: K.
        weight: W.
    """

    rate: float
    clients: int
    weight: float

    @property
    def expected(self) -> float:
        """q·W, the weight of a round if all clients are present."""
        return self.rate * self.weight


def client_population(settings: UserLevel, rate: float, sizes: Sequence[int]) -> ClientPopulation:
    """Return the roster of clients with these numbers of examples; an unknown size, 0, weighs 1."""
    weights = [weight(settings, size) if size else W_MAX for size in sizes]
    return ClientPopulation(rate, len(sizes), math.fsum(weights))


def weight(settings: UserLevel, examples: int) -> float:
    """Return w_k of a client with this number of examples."""
    most = settings.most_examples
    return W_MAX if not most else min(examples / most, W_MAX)


@dataclass
class Estimator:
    """Sum of a round's clipped contributions.

    Args:
        settings: settings of user-level privacy.
        roster: population of clients.
        sizes: sizes of the pieces of each tensor of a contribution.
        bound: S; adaptive clipping changes this value.
    """

    settings: UserLevel
    roster: ClientPopulation
    sizes: Sequence[Sequence[int]]
    bound: float
    _sums: list[Tensor] | None = None
    _counted: list[float] = field(default_factory=list)

    @property
    def adaptive(self) -> bool:
        """Whether S follows the contributions."""
        return self.settings.clipping == "adaptive"

    @property
    def elements(self) -> int:
        """Number of elements of a contribution."""
        return sum(map(sum, self.sizes))

    @property
    def count_noise(self) -> float:
        """σ_b of adaptive clipping."""
        return clipping.count_noise(self.roster.rate * self.roster.clients, self.settings.noise)

    @property
    def deviation(self) -> float:
        """Deviation of the noise on the sum: z·S·w_max, or z_Δ·S·w_max for adaptive clipping."""
        noise = self.settings.noise
        if self.adaptive:
            noise = clipping.noise_beside_count(noise, self.count_noise)
        # An infinite bound times zero noise would be NaN.
        return noise * self.bound * W_MAX if noise else 0.0

    def clipped(self, contribution: Sequence[Tensor]) -> list[Tensor]:
        """Return a contribution with norm at most S, in float64."""
        wide = [tensor.detach().double() for tensor in contribution]
        if self.settings.clipping == "layers":
            found = clipping.factors(wide, self.sizes, self.bound)
            return [
                _scaled_in_pieces(one, of, bys)
                for one, of, bys in zip(wide, self.sizes, found, strict=True)
            ]
        by = clipping.factor(clipping.norm_of(wide), self.bound)
        return [_scaled(one, by) for one in wide]

    def fold(self, contribution: Sequence[Tensor], examples: int) -> None:
        """Clip and add the contribution of a client with this number of examples."""
        if self.adaptive:
            short = clipping.norm_of(contribution) <= self.bound
            self._counted.append(0.5 if short else -0.5)
        self.add(self.clipped(contribution), weight(self.settings, examples))

    def add(self, clipped: Sequence[Tensor], share: float) -> None:
        """Add a clipped contribution, or a sum of them, with the weight `share`."""
        if self._sums is None:
            self._sums = [torch.zeros_like(one) for one in clipped]
        for total, one in zip(self._sums, clipped, strict=True):
            # Product and sum are rounded separately (no fused multiply-add): the same bits on every
            # processor.
            total.add_(one.double() * share)

    def forget(self) -> None:
        """Discard the contributions of the round."""
        self._sums = None
        self._counted = []

    def noised(self, like: Sequence[Tensor], key: bytes, count_key: bytes) -> list[Tensor]:
        """Return f, in float64, and move S for adaptive clipping.

        `like` are tensors of a contribution's shapes. `key` and `count_key` are for this round
        alone.
        """
        sums = self._sums
        if sums is None:
            sums = [torch.zeros(one.shape, dtype=torch.float64, device=one.device) for one in like]
        deviation = self.deviation
        if deviation:
            noise = normal(key, (self.elements,)).to(sums[0].device)
            pieces = torch.split(noise.mul_(deviation), [one.numel() for one in sums])
            sums = [
                to_grid(one + piece.view(one.shape), deviation)
                for one, piece in zip(sums, pieces, strict=True)
            ]
        if self.adaptive:
            self._follow(count_key)
        return [one / self.roster.expected for one in sums]

    def _follow(self, key: bytes) -> None:
        """Move S by the noisy fraction of short contributions."""
        counted = sum(self._counted)
        if self.count_noise:
            noise = normal(key, (1,)) * self.count_noise
            counted = float(to_grid(noise + counted, self.count_noise))
        expected = self.roster.rate * self.roster.clients
        self.bound = clipping.followed(self.bound, 0.5 + counted / expected)


def _scaled(tensor: Tensor, by: float) -> Tensor:
    # A product of 0 and a non-finite number would be NaN.
    return tensor * by if by else torch.zeros_like(tensor)


def _scaled_in_pieces(tensor: Tensor, sizes: Sequence[int], by: Sequence[float]) -> Tensor:
    pieces = torch.split(tensor.reshape(-1), list(sizes))
    return torch.cat(list(map(_scaled, pieces, by))).view(tensor.shape)
