"""Hold out test examples, stratum by stratum.

Of n examples exactly ceil(fraction * n) are held out. Each stratum (a class, or a class within a
hospital) gives its share: first the whole part of fraction * size, then, until the number is
reached, another from the strata with the largest remainders (Hamilton's method). So the held-out
examples have the composition of all, to within 1 example a stratum.

Source: W. G. Cochran, "Sampling Techniques", chapter 5: stratified sampling with proportional
allocation.
"""

from __future__ import annotations

import math
from collections.abc import Hashable, Sequence
from fractions import Fraction

import torch
from torch import Tensor

from dure.randomness.seeds import generator


def hold_out(strata: Sequence[Hashable], fraction: float, seed: int) -> tuple[Tensor, Tensor]:
    """Return (training, test) indices, sorted int64, for the strata of the examples.

    A pure function. Raises ValueError if fraction is not between 0 and 1.
    """
    if not 0 < fraction < 1:
        raise ValueError(f"the fraction held out has to be between 0 and 1, not {fraction}")
    members: dict[Hashable, list[int]] = {}
    for index, stratum in enumerate(strata):
        members.setdefault(stratum, []).append(index)
    quotas = _quotas([len(indices) for indices in members.values()], fraction)
    is_test = torch.zeros(len(strata), dtype=torch.bool)
    for position, (indices, quota) in enumerate(zip(members.values(), quotas, strict=True)):
        # A random stream for each stratum: the size of a stratum changes the order of no other.
        order = torch.randperm(len(indices), generator=generator(seed, "hold out", position))
        is_test[torch.tensor(indices)[order[:quota]]] = True
    return (~is_test).nonzero().flatten(), is_test.nonzero().flatten()


def _quotas(sizes: list[int], fraction: float) -> list[int]:
    """Return the held-out number of each stratum; ties go to the earlier stratum."""
    # 0.2 means one fifth: binary rounding must not turn ceil(0.2 * 5) into 2.
    share = Fraction(str(fraction))
    quotas = [math.floor(share * size) for size in sizes]
    missing = math.ceil(share * sum(sizes)) - sum(quotas)
    by_remainder = sorted(range(len(sizes)), key=lambda i: -(share * sizes[i] - quotas[i]))
    for i in by_remainder[:missing]:
        quotas[i] += 1
    return quotas
