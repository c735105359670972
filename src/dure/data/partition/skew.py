"""Common parts of partitions by a symmetric Dirichlet distribution: shares, and minimum sizes.

If a draw leaves a client with fewer than `minimum` examples, it gets examples of the client with
the most. (The papers draw again until every client has enough, which for many clients and a small
alpha never ends.)
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

EVEN = 1e100
"""Alpha from which on all shares of a Dirichlet distribution are equal in float64.

Sums of much larger values overflow.
"""


def shares(random: np.random.Generator, alpha: float, clients: int) -> np.ndarray:
    """Return random shares of the clients, which sum to 1."""
    # A very large alpha is reduced to a value whose sum float64 represents.
    return random.dirichlet(np.full(clients, min(alpha, EVEN)))


def with_minimum(parts: list[Tensor], minimum: int, random: np.random.Generator) -> list[Tensor]:
    """Return the parts with at least `minimum` examples each.

    Missing examples are taken at random from the largest part. Raises ValueError if the examples
    are too few.
    """
    total = sum(map(len, parts))
    sizes = [len(part) for part in parts]
    if minimum * len(parts) > total:
        raise ValueError(f"{len(parts)} clients cannot have {minimum} of {total} examples each")
    for poor in range(len(parts)):
        while sizes[poor] < minimum:
            # Searched each time: another client may be the largest after a transfer.
            rich = max(range(len(parts)), key=sizes.__getitem__)
            # The giver keeps its minimum. The largest part has more than that, or the total would
            # be too small.
            count = min(minimum - sizes[poor], sizes[rich] - minimum)
            shuffled = parts[rich][torch.from_numpy(random.permutation(sizes[rich]))]
            parts[poor] = torch.cat([parts[poor], shuffled[:count]])
            parts[rich] = shuffled[count:]
            sizes[poor] = len(parts[poor])
            sizes[rich] = len(parts[rich])
    return parts
