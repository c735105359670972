"""What partitions by a symmetric Dirichlet distribution share: shares, and what is then missing.

Where a draw leaves a client with fewer than `minimum` examples, it is given some of the client's
that then has most. (The papers draw again until nobody is short, which for many clients and a small
alpha never ends.)
"""

from __future__ import annotations

import math

import numpy as np
import torch
from torch import Tensor

EVEN = 1e100
"""An alpha from which on all shares of a Dirichlet distribution are equal in float64.

Sums of much larger ones overflow.
"""


def check_skew(name: str, alpha: float, minimum: int) -> None:
    """Raises ValueError for values that make no sense."""
    if not (alpha > 0 and math.isfinite(alpha)):
        raise ValueError(f"{name}: alpha has to be a positive number, not {alpha}")
    if minimum < 1:
        raise ValueError(f"{name}: a client needs at least 1 example, not {minimum}")


def shares(random: np.random.Generator, alpha: float, clients: int) -> np.ndarray:
    """The share of each client; all shares add up to 1."""
    # A very large alpha is cut to one that float64 can sum.
    return random.dirichlet(np.full(clients, min(alpha, EVEN)))


def filled(parts: list[Tensor], minimum: int, random: np.random.Generator) -> list[Tensor]:
    """The parts with at least `minimum` examples each.

    The missing ones are taken at random from the largest.
    """
    total = sum(map(len, parts))
    sizes = [len(part) for part in parts]
    if minimum * len(parts) > total:
        raise ValueError(f"{len(parts)} clients cannot have {minimum} of {total} examples each")
    for poor in range(len(parts)):
        while sizes[poor] < minimum:
            # Looked for each time: a gift may leave another client the largest.
            rich = max(range(len(parts)), key=sizes.__getitem__)
            # The giver keeps its minimum. The largest has more than that, or the total would not be
            # enough.
            count = min(minimum - sizes[poor], sizes[rich] - minimum)
            shuffled = parts[rich][torch.from_numpy(random.permutation(sizes[rich]))]
            parts[poor] = torch.cat([parts[poor], shuffled[:count]])
            parts[rich] = shuffled[count:]
            sizes[poor] = len(parts[poor])
            sizes[rich] = len(parts[rich])
    return parts
