"""Attacks of liars who know all honest updates, and work together.

mu and sigma are the mean and the deviation (with n-1) of the honest ones, coordinate by coordinate;
where nobody is honest, of what the liars would have sent. They send

    alie:Z                   mu - Z · sigma, small enough to hide
    inner-product:EPSILON    -EPSILON · mu
    mimic                    g_h of one honest client h

Cost: O(n·d) additions a round. Sources are with the classes.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import NormalDist
from typing import ClassVar, Literal

import torch
from torch import Tensor

from dure.fleet.attacks.attack import Attack, Random, Update, check_positive


@dataclass(frozen=True)
class ALIE(Attack):
    """A Little Is Enough: all send mu - z·sigma, near enough to be taken for honest.

    z: 0 is the largest with which enough honest clients are farther from mu than the liars to make
        up a majority with
    them: s = floor(n/2 + 1) - f, z_max = Phi^-1((n-f-s) / (n-f)). Where liars are the majority, and
    need none, s = 1.

    Defeats Krum, trimmed mean, median and Bulyan, which look for outliers; the more the honest
    differ, the better. Source: G. Baruch, M. Baruch, Y. Goldberg, "A Little Is Enough:
    Circumventing Defenses For Distributed Learning", NeurIPS 2019 (z = 1.5 in most experiments).
    """

    name: ClassVar[str] = "alie"
    sees: ClassVar[Literal["own", "honest"]] = "honest"
    z: float = 0.0

    def __post_init__(self) -> None:
        if not (self.z >= 0 and math.isfinite(self.z)):
            raise ValueError(
                f"alie: z is a number of deviations, or 0 for the largest that hides, not {self.z}"
            )

    def _lies(
        self, updates: Sequence[Update], liars: Sequence[int], random: Random
    ) -> Mapping[int, Update]:
        z = self.z or z_max(len(updates), len(liars))
        of_each = zip(updates[0], _moments(_honest(updates, liars)), strict=True)
        sent = [(mean - z * deviation).to(own.dtype) for own, (mean, deviation) in of_each]
        return dict.fromkeys(liars, sent)


@dataclass(frozen=True)
class InnerProduct(Attack):
    """Inner-product manipulation: all send -epsilon·mu.

    Defeats the mean where epsilon > (n-f)/f: the sum of all then points uphill. A small epsilon
    (0.1 to 0.5) defeats Krum, which takes a short vector for one that is near, and the median; a
    large one is an outlier. Source: C. Xie, O. Koyejo, I. Gupta, "Fall of Empires: Breaking
    Byzantine-Tolerant SGD by Inner Product Manipulation", UAI 2019.
    """

    name: ClassVar[str] = "inner-product"
    sees: ClassVar[Literal["own", "honest"]] = "honest"
    epsilon: float = 0.5

    def __post_init__(self) -> None:
        check_positive(self.epsilon, "inner-product: epsilon")

    def _lies(
        self, updates: Sequence[Update], liars: Sequence[int], random: Random
    ) -> Mapping[int, Update]:
        of_each = zip(updates[0], _moments(_honest(updates, liars)), strict=True)
        sent = [(-self.epsilon * mean).to(own.dtype) for own, (mean, _) in of_each]
        return dict.fromkeys(liars, sent)


@dataclass(frozen=True)
class Mimic(Attack):
    """All copy the first honest client, who then counts f+1 times.

    No copy differs from an honest update.

    Defeats rules that choose among clients, where clients have different data: the others are
    hardly heard. Source: S. P. Karimireddy, L. He, M. Jaggi, "Byzantine-Robust Learning on
    Heterogeneous Datasets via Bucketing", ICLR 2022 (who choose the client that is farthest out
    over the first rounds).
    """

    name: ClassVar[str] = "mimic"
    sees: ClassVar[Literal["own", "honest"]] = "honest"

    def _lies(
        self, updates: Sequence[Update], liars: Sequence[int], random: Random
    ) -> Mapping[int, Update]:
        # A copy, so that what the honest client sent stays its own.
        sent = [tensor.clone() for tensor in _honest(updates, liars)[0]]
        return dict.fromkeys(liars, sent)


def z_max(n: int, f: int) -> float:
    """How many deviations f of n clients may be from the mean and still hide: see `ALIE`.

    At least 0; f of at most n-2 are given an honest crowd to hide in, for more it is 0.
    """
    honest = n - f
    # The honest clients that the liars need on their side for a majority.
    supporters = max(n // 2 + 1 - f, 1)
    if supporters >= honest:
        return 0.0
    return max(NormalDist().inv_cdf((honest - supporters) / honest), 0.0)


def _honest(updates: Sequence[Update], liars: Sequence[int]) -> list[Update]:
    """The honest updates; where there are none, all."""
    lying = set(liars)
    return [update for position, update in enumerate(updates) if position not in lying] or list(
        updates
    )


def _moments(updates: Sequence[Update]) -> list[tuple[Tensor, Tensor]]:
    """(mean, deviation with n-1) of each of their tensors, in float64.

    The deviation of a single one is 0.
    """
    return [_moments_of(tensors) for tensors in zip(*updates, strict=True)]


def _moments_of(tensors: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
    # Updated one by one (Welford), so that no matrix of all is made, and tensors that are equal
    # have exactly their own value as mean and 0 as deviation.
    mean = tensors[0].to(torch.float64, copy=True)
    squares = torch.zeros_like(mean)
    for count, tensor in enumerate(tensors[1:], 2):
        difference = tensor - mean
        mean += difference / count
        squares += difference * (tensor - mean)
    return mean, (squares / max(len(tensors) - 1, 1)).sqrt_()
