"""Settings of DP-SGD: the clipping norm of an example's gradient, and the noise of a step."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import ClassVar, Literal, get_args

from dure.arguments import above, at_least, check_ranges
from dure.privacy.protection import Protection
from dure.settings import read

Draws = Literal["system", "seed"]


@dataclass(frozen=True)
class DPSGD(Protection):
    """Differential privacy of examples (Abadi et al. 2016).

    clip: C, the maximum norm of an example's gradient. noise: z, so that the noise on the sum of
    gradients has the standard deviation z·C; 0: none, or the noise that the requested epsilon
    needs. draws: source of noise and batches: the system, or the run's seed, so that the run is
    reproducible; then epsilon holds only against parties that do not know the seed. Simulated
    clients always draw from the seed.
    """

    clip: float = field(default=1.0, metadata=above(0))
    noise: float = field(default=0.0, metadata=at_least(0, finite=True))
    draws: Draws = "system"

    name: ClassVar[str] = "dp-sgd"

    def __post_init__(self) -> None:
        check_ranges(self, named=True)
        if self.noise and math.isinf(self.clip):
            raise ValueError("dp-sgd: noise needs a finite clip: give one")
        if self.draws not in get_args(Draws):
            raise ValueError(f"dp-sgd: draws is {self.draws!r}, but it has to be system or seed")


def parse_dp_sgd(text: str) -> DPSGD:
    """Return the settings that `str` wrote. Raises ValueError for any other text."""
    return read(text, {DPSGD.name: DPSGD}, "privacy")
