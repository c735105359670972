"""The mean of clients' contributions, as differential privacy wants it: with a fixed denominator.

    f = ( Σ over the round's clients of w_k · clip(Δ_k)  +  N(0, (z·S·w_max)²) ) / (q·W)
    w_k = min(n_k / ŵ, 1)      w_max = 1      W = Σ over the roster of w_k, at the beginning

Any one client moves f by S·w_max/(q·W) at most, whatever others do. A mean over those who came does
not have that: with one client of 1000 examples among a hundred of 10, the one moves it by half, and
not by a hundredth. The price is that f is too short where clients are away. With no noise, S = inf,
q = 1, all alike and all there it is the mean.

The sum is in float64, and is rounded to a grid after the noise is added, so that its last bits say
nothing (`dure.randomness.keystream`).

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
"""No client weighs more."""


class Roster(NamedTuple):
    """Who may take part, fixed at the beginning of a run.

    rate: q, the probability of each to be in a round. clients: K. weight: W.
    """

    rate: float
    clients: int
    weight: float

    @property
    def expected(self) -> float:
        """q·W, the weight of a round, if nobody is ever away."""
        return self.rate * self.weight


def roster(settings: UserLevel, rate: float, sizes: Sequence[int]) -> Roster:
    """The roster of clients with so many examples; 0 where that is not known yet: it weighs 1."""
    weights = [weight(settings, size) if size else W_MAX for size in sizes]
    return Roster(rate, len(sizes), math.fsum(weights))


def weight(settings: UserLevel, examples: int) -> float:
    """w_k of a client with so many examples."""
    most = settings.most_examples
    return W_MAX if not most else min(examples / most, W_MAX)


@dataclass
class Estimator:
    """The sum of a round's contributions, clipped.

    settings, roster: as above. sizes: of the pieces of each tensor of a contribution. bound: S,
    which adaptive clipping moves.
    """

    settings: UserLevel
    roster: Roster
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
        """Numbers of a contribution."""
        return sum(map(sum, self.sizes))

    @property
    def count_noise(self) -> float:
        """σ_b of adaptive clipping."""
        return clipping.count_noise(self.roster.rate * self.roster.clients, self.settings.noise)

    @property
    def deviation(self) -> float:
        """Of the noise on the sum: z·S·w_max, or z_Δ·S·w_max where the bound is learned too."""
        noise = self.settings.noise
        if self.adaptive:
            noise = clipping.noise_beside_count(noise, self.count_noise)
        # No bound and no noise: not a number otherwise.
        return noise * self.bound * W_MAX if noise else 0.0

    def clipped(self, contribution: Sequence[Tensor]) -> list[Tensor]:
        """A contribution that is no longer than S, in float64."""
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
        """Takes the contribution of a client with so many examples."""
        if self.adaptive:
            short = clipping.norm_of(contribution) <= self.bound
            self._counted.append(0.5 if short else -0.5)
        self.add(self.clipped(contribution), weight(self.settings, examples))

    def add(self, clipped: Sequence[Tensor], share: float) -> None:
        """Takes what is clipped already, or a sum of such."""
        if self._sums is None:
            self._sums = [torch.zeros_like(one) for one in clipped]
        for total, one in zip(self._sums, clipped, strict=True):
            # The product rounded apart: the same bits on every processor.
            total.add_(one.double() * share)

    def forget(self) -> None:
        """Forgets what was folded."""
        self._sums = None
        self._counted = []

    def noised(self, like: Sequence[Tensor], key: bytes, count_key: bytes) -> list[Tensor]:
        """f, in float64, and S for the next round. like: shapes of a contribution.

        key, count_key: for this round alone.
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
        """Moves S by the share of short contributions, as noise tells it."""
        counted = sum(self._counted)
        if self.count_noise:
            noise = normal(key, (1,)) * self.count_noise
            counted = float(to_grid(noise + counted, self.count_noise))
        expected = self.roster.rate * self.roster.clients
        self.bound = clipping.followed(self.bound, 0.5 + counted / expected)


def _scaled(tensor: Tensor, by: float) -> Tensor:
    # What is not finite does not become 0 by a product with 0.
    return tensor * by if by else torch.zeros_like(tensor)


def _scaled_in_pieces(tensor: Tensor, sizes: Sequence[int], by: Sequence[float]) -> Tensor:
    pieces = torch.split(tensor.reshape(-1), list(sizes))
    return torch.cat(list(map(_scaled, pieces, by))).view(tensor.shape)
