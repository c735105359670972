"""Which turn it is: what a round's random choices are a function of."""

from __future__ import annotations

from typing import NamedTuple

import torch

from dure.randomness.seeds import generator


class Turn(NamedTuple):
    """The run's seed and the number of the global model that is being made, from 0."""

    seed: int
    number: int

    def generator(self, purpose: str) -> torch.Generator:
        """Random numbers for `purpose` in this turn: the same wherever they are drawn."""
        return generator(self.seed, purpose, self.number)
