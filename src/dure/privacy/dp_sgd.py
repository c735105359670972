"""DP-SGD's settings: how much any single example may say in a step, and how much noise hides it."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar

from dure.privacy.protection import Protection
from dure.settings import read


@dataclass(frozen=True)
class DPSGD(Protection):
    """Differential privacy of examples (Abadi et al. 2016).

    clip: C, the largest norm of an example's gradient. noise: z, the deviation of the noise on
    their sum is z·C; 0: none, or what the epsilon asks for that is wanted.
    """

    clip: float = 1.0
    noise: float = 0.0

    name: ClassVar[str] = "dp-sgd"

    def __post_init__(self) -> None:
        if not self.clip > 0:
            raise ValueError(f"dp-sgd: clip is {self.clip}, but a largest norm is above 0")
        if not 0 <= self.noise < math.inf:
            raise ValueError(f"dp-sgd: noise is {self.noise}, but a deviation is 0 or more")


def parse_dp_sgd(text: str) -> DPSGD:
    """The inverse of `str`. Raises ValueError for text that is something else."""
    return read(text, {DPSGD.name: DPSGD}, "privacy")
