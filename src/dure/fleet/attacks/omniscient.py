"""Attacks of colluding malicious clients that know all honest updates.

mu and sigma are the mean and the standard deviation (with n-1) of the honest updates, coordinate by
coordinate; without honest clients, of the malicious clients' honest updates. They send

    alie:Z                   mu - Z · sigma, small enough to hide
    inner-product:EPSILON    -EPSILON · mu
    mimic                    g_h of an honest client h

Cost: O(n·d) additions per round. Sources are with the classes.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from statistics import NormalDist
from typing import ClassVar, Literal

import torch
from torch import Tensor

from dure.arguments import above, at_least
from dure.fleet.attacks.attack import Attack, Random, Update


@dataclass(frozen=True)
class ALIE(Attack):
    """A Little Is Enough: all send mu - z·sigma, close enough to pass as honest.

    z: 0 is the largest z with which enough honest clients are farther from mu than the malicious
    clients to make up a majority with them: s = floor(n/2 + 1) - f, z_max = Phi^-1((n-f-s) /
    (n-f)). If the malicious clients are a majority on their own, s = 1.

    Defeats Krum, trimmed mean, median and Bulyan, which look for outliers; the more the honest
    updates differ, the better. Source: G. Baruch, M. Baruch, Y. Goldberg, "A Little Is Enough:
    Circumventing Defenses For Distributed Learning", NeurIPS 2019 (z = 1.5 in most experiments).
    """

    name: ClassVar[str] = "alie"
    sees: ClassVar[Literal["own", "honest"]] = "honest"
    z: float = field(default=0.0, metadata=at_least(0, finite=True))

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

    Defeats the mean if epsilon > (n-f)/f: the sum of all updates then points uphill. A small
    epsilon (0.1 to 0.5) defeats Krum, for which a short vector is near, and the median; a large
    epsilon gives an outlier. Source: C. Xie, O. Koyejo, I. Gupta, "Fall of Empires: Breaking
    Byzantine-Tolerant SGD by Inner Product Manipulation", UAI 2019.
    """

    name: ClassVar[str] = "inner-product"
    sees: ClassVar[Literal["own", "honest"]] = "honest"
    epsilon: float = field(default=0.5, metadata=above(0, finite=True))

    def _lies(
        self, updates: Sequence[Update], liars: Sequence[int], random: Random
    ) -> Mapping[int, Update]:
        of_each = zip(updates[0], _moments(_honest(updates, liars)), strict=True)
        sent = [(-self.epsilon * mean).to(own.dtype) for own, (mean, _) in of_each]
        return dict.fromkeys(liars, sent)


@dataclass(frozen=True)
class Mimic(Attack):
    """Copy the first honest client's update, which then counts f+1 times.

    No copy differs from an honest update.

    Defeats rules that choose among clients, if clients have different data: the other clients lose
    their influence. Source: S. P. Karimireddy, L. He, M. Jaggi, "Byzantine-Robust Learning on
    Heterogeneous Datasets via Bucketing", ICLR 2022 (who choose the client that is farthest out
    over the first rounds).
    """

    name: ClassVar[str] = "mimic"
    sees: ClassVar[Literal["own", "honest"]] = "honest"

    def _lies(
        self, updates: Sequence[Update], liars: Sequence[int], random: Random
    ) -> Mapping[int, Update]:
        # A copy, so that the honest client's update does not share memory.
        sent = [tensor.clone() for tensor in _honest(updates, liars)[0]]
        return dict.fromkeys(liars, sent)


def z_max(n: int, f: int) -> float:
    """Return how many deviations f of n clients may be from the mean and still hide: see `ALIE`.

    At least 0; for f above n-2 the value is 0, because too few honest clients are left.
    """
    honest = n - f
    # Number of honest clients that the malicious clients need on their side for a majority.
    supporters = max(n // 2 + 1 - f, 1)
    if supporters >= honest:
        return 0.0
    return max(NormalDist().inv_cdf((honest - supporters) / honest), 0.0)


def _honest(updates: Sequence[Update], liars: Sequence[int]) -> list[Update]:
    """Return the honest updates; all updates if none are honest."""
    lying = set(liars)
    return [update for position, update in enumerate(updates) if position not in lying] or list(
        updates
    )


def _moments(updates: Sequence[Update]) -> list[tuple[Tensor, Tensor]]:
    """Return (mean, deviation with n-1) of each of their tensors, in float64.

    The deviation of a single update is 0.
    """
    return [_moments_of(tensors) for tensors in zip(*updates, strict=True)]


def _moments_of(tensors: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
    # Updated one by one (Welford), so that no matrix of all updates is made, and equal tensors have
    # exactly their own value as mean and 0 as deviation.
    mean = tensors[0].to(torch.float64, copy=True)
    squares = torch.zeros_like(mean)
    for count, tensor in enumerate(tensors[1:], 2):
        difference = tensor - mean
        mean += difference / count
        squares += difference * (tensor - mean)
    return mean, (squares / max(len(tensors) - 1, 1)).sqrt_()
