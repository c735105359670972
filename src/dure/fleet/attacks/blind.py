"""Attacks of liars who know their own update alone.

g_i is what client i would have sent honestly; it sends

    sign-flip:SCALE    -SCALE · g_i
    gaussian:SIGMA     N(0, SIGMA²)
    noise:SIGMA        g_i + N(0, SIGMA²)
    nan, inf, large:VALUE    that, in every coordinate

Cost: O(d) for each liar. Sources are with the classes.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from dure.fleet.attacks.attack import Attack, Random, Update, check_positive, scaled


@dataclass(frozen=True)
class SignFlip(Attack):
    """Sends its own update backwards, `scale` times as long.

    Defeats the mean: with scale > (n-f)/f it moves uphill. Source: L. Li et al., "RSA:
    Byzantine-Robust Stochastic Aggregation Methods for Distributed Learning from Heterogeneous
    Datasets", AAAI 2019.
    """

    name: ClassVar[str] = "sign-flip"
    scale: float = 1.0

    def __post_init__(self) -> None:
        check_positive(self.scale, "sign-flip: the scale")

    def _lies(
        self, updates: Sequence[Update], liars: Sequence[int], random: Random
    ) -> Mapping[int, Update]:
        return {liar: scaled(updates[liar], -self.scale) for liar in liars}


@dataclass(frozen=True)
class Gaussian(Attack):
    """Sends noise N(0, sigma²) and nothing else, each liar its own.

    Defeats the mean; any robust rule withstands it while liars are few enough. Source: P. Blanchard
    et al., "Machine Learning with Adversaries: Byzantine Tolerant Gradient Descent", NIPS 2017
    (sigma 200, a third of the workers).
    """

    name: ClassVar[str] = "gaussian"
    sigma: float = 200.0

    def __post_init__(self) -> None:
        check_positive(self.sigma, "gaussian: sigma")

    def _lies(
        self, updates: Sequence[Update], liars: Sequence[int], random: Random
    ) -> Mapping[int, Update]:
        return {liar: _noise(updates[liar], self.sigma, random(liar)) for liar in liars}


@dataclass(frozen=True)
class Noise(Attack):
    """Sends its own update plus noise N(0, sigma²), each liar its own.

    Slows the mean down, as the noise of bad hardware or of a bad link would; with a small sigma
    robust rules keep it, which is right. Source: the "mean and noise" variant of the Gaussian
    attack, as in L. Li et al., AAAI 2019.
    """

    name: ClassVar[str] = "noise"
    sigma: float = 1.0

    def __post_init__(self) -> None:
        check_positive(self.sigma, "noise: sigma")

    def _lies(
        self, updates: Sequence[Update], liars: Sequence[int], random: Random
    ) -> Mapping[int, Update]:
        return {
            liar: _sum(updates[liar], _noise(updates[liar], self.sigma, random(liar)))
            for liar in liars
        }


@dataclass(frozen=True)
class NotANumber(Attack):
    """Sends NaN in every coordinate.

    Defeats the mean for good, by one liar in one round, and every rule that compares without asking
    `isfinite` first: comparisons with NaN are false. As in overflows of honest clients; E. M. El
    Mhamdi, R. Guerraoui, S. Rouault, "The Hidden Vulnerability of Distributed Learning in
    Byzantium", ICML 2018, allow a liar any value at all.
    """

    name: ClassVar[str] = "nan"

    def _lies(
        self, updates: Sequence[Update], liars: Sequence[int], random: Random
    ) -> Mapping[int, Update]:
        return _constant(updates, liars, math.nan)


@dataclass(frozen=True)
class Infinite(Attack):
    """Sends infinity in every coordinate.

    Defeats the mean for good, and rules that subtract before they compare: inf - inf is NaN,
    between two liars too. Source: as `NotANumber`.
    """

    name: ClassVar[str] = "inf"

    def _lies(
        self, updates: Sequence[Update], liars: Sequence[int], random: Random
    ) -> Mapping[int, Update]:
        return _constant(updates, liars, math.inf)


@dataclass(frozen=True)
class Large(Attack):
    """Sends one large number in every coordinate, or the largest that the dtype has if it is less.

    Defeats the mean, and rules that sum squares in float32, where 1e30² is infinite. Source: as
    `NotANumber`.
    """

    name: ClassVar[str] = "large"
    value: float = 1e30

    def __post_init__(self) -> None:
        if not math.isfinite(self.value):
            raise ValueError(
                f"large: the value is finite, not {self.value}; there are nan and inf for others"
            )

    def _lies(
        self, updates: Sequence[Update], liars: Sequence[int], random: Random
    ) -> Mapping[int, Update]:
        return _constant(updates, liars, self.value)


def _noise(like: Update, sigma: float, random: torch.Generator) -> list[Tensor]:
    # Drawn on the CPU and in the default dtype, so that a liar sends the same whatever the device
    # or dtype.
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
