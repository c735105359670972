"""Attacks of malicious clients that know only their own updates.

g_i is the honest update of client i; the client sends

    sign-flip:SCALE    -SCALE · g_i
    gaussian:SIGMA     N(0, SIGMA²)
    noise:SIGMA        g_i + N(0, SIGMA²)
    nan, inf, large:VALUE    this value in every coordinate

Cost: O(d) per malicious client. Sources are with the classes.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import ClassVar

import torch
from torch import Tensor

from dure.arguments import above
from dure.fleet.attacks.attack import Attack, Random, Update, scaled


@dataclass(frozen=True)
class SignFlip(Attack):
    """Send the own update with a flipped sign, `scale` times as long.

    Defeats the mean: with scale > (n-f)/f the mean moves uphill. Source: L. Li et al., "RSA:
    Byzantine-Robust Stochastic Aggregation Methods for Distributed Learning from Heterogeneous
    Datasets", AAAI 2019.
    """

    name: ClassVar[str] = "sign-flip"
    scale: float = field(default=1.0, metadata=above(0, finite=True))

    def _lies(
        self, updates: Sequence[Update], liars: Sequence[int], random: Random
    ) -> Mapping[int, Update]:
        return {liar: scaled(updates[liar], -self.scale) for liar in liars}


@dataclass(frozen=True)
class Gaussian(Attack):
    """Send only noise N(0, sigma²), independent for each malicious client.

    Defeats the mean; any robust rule withstands it while malicious clients are few enough. Source:
    P. Blanchard et al., "Machine Learning with Adversaries: Byzantine Tolerant Gradient Descent",
    NIPS 2017 (sigma 200, a third of the workers).
    """

    name: ClassVar[str] = "gaussian"
    sigma: float = field(default=200.0, metadata=above(0, finite=True))

    def _lies(
        self, updates: Sequence[Update], liars: Sequence[int], random: Random
    ) -> Mapping[int, Update]:
        return {liar: _noise(updates[liar], self.sigma, random(liar)) for liar in liars}


@dataclass(frozen=True)
class AdditiveNoise(Attack):
    """Send the own update plus noise N(0, sigma²), independent for each malicious client.

    Slows the mean down, like noise of bad hardware or of a bad link; with a small sigma robust
    rules rightly accept the update. Source: the "mean and noise" variant of the Gaussian attack, as
    in L. Li et al., AAAI 2019.
    """

    name: ClassVar[str] = "noise"
    sigma: float = field(default=1.0, metadata=above(0, finite=True))

    def _lies(
        self, updates: Sequence[Update], liars: Sequence[int], random: Random
    ) -> Mapping[int, Update]:
        return {
            liar: _sum(updates[liar], _noise(updates[liar], self.sigma, random(liar)))
            for liar in liars
        }


@dataclass(frozen=True)
class NotANumber(Attack):
    """Send NaN in every coordinate.

    A single malicious client in a single round destroys the mean permanently, and defeats every
    rule that compares without calling `isfinite` first: comparisons with NaN are false. Overflows
    of honest clients look the same; E. M. El Mhamdi, R. Guerraoui, S. Rouault, "The Hidden
    Vulnerability of Distributed Learning in Byzantium", ICML 2018, allow a malicious client any
    value at all.
    """

    name: ClassVar[str] = "nan"

    def _lies(
        self, updates: Sequence[Update], liars: Sequence[int], random: Random
    ) -> Mapping[int, Update]:
        return _constant(updates, liars, math.nan)


@dataclass(frozen=True)
class Infinite(Attack):
    """Send infinity in every coordinate.

    Destroys the mean permanently, and defeats rules that subtract before they compare: inf - inf is
    NaN, between two malicious clients too. Source: as `NotANumber`.
    """

    name: ClassVar[str] = "inf"

    def _lies(
        self, updates: Sequence[Update], liars: Sequence[int], random: Random
    ) -> Mapping[int, Update]:
        return _constant(updates, liars, math.inf)


@dataclass(frozen=True)
class Large(Attack):
    """Send the same large number in every coordinate, at most the largest number of the dtype.

    Defeats the mean, and rules that sum squares in float32, where 1e30² is infinite. Source: as
    `NotANumber`.
    """

    name: ClassVar[str] = "large"
    value: float = 1e30

    def __post_init__(self) -> None:
        if not math.isfinite(self.value):
            raise ValueError(
                f"large: the value has to be finite, not {self.value}; for others use the attacks "
                "nan and inf"
            )

    def _lies(
        self, updates: Sequence[Update], liars: Sequence[int], random: Random
    ) -> Mapping[int, Update]:
        return _constant(updates, liars, self.value)


def _noise(like: Update, sigma: float, random: torch.Generator) -> list[Tensor]:
    # Drawn on the CPU and in the default dtype, so that the forged update does not depend on the
    # device or dtype.
    drawn = (torch.randn(tensor.shape, generator=random) for tensor in like)
    return [(noise * sigma).to(tensor) for noise, tensor in zip(drawn, like, strict=True)]


def _sum(one: Update, other: Update) -> list[Tensor]:
    return [a + b for a, b in zip(one, other, strict=True)]


def _constant(updates: Sequence[Update], liars: Sequence[int], value: float) -> dict[int, Update]:
    def filled(tensor: Tensor) -> Tensor:
        largest = torch.finfo(tensor.dtype).max
        return torch.full_like(
            tensor, max(-largest, min(value, largest)) if math.isfinite(value) else value
        )

    return {liar: list(map(filled, updates[liar])) for liar in liars}
