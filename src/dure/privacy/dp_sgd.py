"""DP-SGD's settings: how much any single example may say in a step, and how much noise hides it."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar, Literal, get_args

from dure.privacy.protection import Protection
from dure.settings import read

Draws = Literal["system", "seed"]


@dataclass(frozen=True)
class DPSGD(Protection):
    """Differential privacy of examples (Abadi et al. 2016).

    clip: C, the largest norm of an example's gradient. noise: z, the deviation of the noise on
    their sum is z·C; 0: none, or what the epsilon asks for that is wanted. draws: where noise and
    batches come from: the system, or the run's seed, so that the run repeats itself; then epsilon
    holds only against those who do not know the seed. Simulated clients always draw from the seed.
    """

    clip: float = 1.0
    noise: float = 0.0
    draws: Draws = "system"

    name: ClassVar[str] = "dp-sgd"

    def __post_init__(self) -> None:
        if not self.clip > 0:
            raise ValueError(f"dp-sgd: clip is {self.clip}, but a largest norm is above 0")
        if not 0 <= self.noise < math.inf:
            raise ValueError(f"dp-sgd: noise is {self.noise}, but a deviation is 0 or more")
        if self.noise and math.isinf(self.clip):
            raise ValueError("dp-sgd: no noise hides what no clip bounds: give a finite clip")
        if self.draws not in get_args(Draws):
            raise ValueError(
                f"dp-sgd: draws is {self.draws!r}, but noise comes from the system or the seed"
            )


def parse_dp_sgd(text: str) -> DPSGD:
    """The inverse of `str`. Raises ValueError for text that is something else."""
    return read(text, {DPSGD.name: DPSGD}, "privacy")
