"""Identity of a round, of which the round's random choices are a function."""

from __future__ import annotations

from typing import NamedTuple

import torch

from dure.randomness.seeds import generator


class RoundSeed(NamedTuple):
    """Seed of the run and number of the global model that the round computes, from 0."""

    seed: int
    number: int

    def generator(self, purpose: str) -> torch.Generator:
        """Return a generator for `purpose` in this round: the same numbers in every process."""
        return generator(self.seed, purpose, self.number)
