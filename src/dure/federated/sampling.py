"""Which clients take part in a round: a pure function of (seed, round).

m = max(C·K, 1) of K clients, uniformly without replacement (McMahan et al. 2017, algorithm 1).
"""

from __future__ import annotations

import torch

from dure.randomness import generator


def clients_per_round(clients: int, fraction: float) -> int:
    """m = max(C·K, 1), C·K rounded to the nearest whole number."""
    return max(round(fraction * clients), 1)


def uniform(seed: int, round: int, clients: int, fraction: float) -> list[int]:
    """The clients of `round`, in ascending order."""
    drawn = torch.randperm(clients, generator=generator(seed, "sample clients", round))
    return sorted(drawn[: clients_per_round(clients, fraction)].tolist())
