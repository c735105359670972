"""Statistics of a number over runs that differ only in their seed.

    mean m of n values, deviation s = sqrt(sum of (x - m)^2 / (n - 1)), and the interval that
    contains the mean of all seeds with a probability of 95 %:   m -+ t(0.975, n - 1) * s / sqrt(n)

t is Student's (W. S. Gosset, "The Probable Error of a Mean", Biometrika 6, 1908), for values with a
normal distribution. A single value has neither deviation nor interval.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

SURE = 0.95
"""Probability that the interval contains the mean."""


@dataclass(frozen=True)
class Spread:
    """Statistics of `count` values. deviation, low, high: None for fewer than two values."""

    count: int
    mean: float
    deviation: float | None = None
    low: float | None = None
    high: float | None = None


def spread(values: Sequence[float]) -> Spread | None:
    """Return the statistics of these values; None without values."""
    count = len(values)
    if not count:
        return None
    mean = math.fsum(values) / count
    if count < 2:
        return Spread(count, mean)
    deviation = math.sqrt(math.fsum((value - mean) ** 2 for value in values) / (count - 1))
    half = _student(count - 1) * deviation / math.sqrt(count)
    return Spread(count, mean, deviation, mean - half, mean + half)


def _student(freedom: int) -> float:
    """Return the quantile of Student's distribution at probability (1 + SURE) / 2."""
    # Loaded on demand: the report of a single run does not need scipy.
    from scipy.special import stdtrit

    return float(stdtrit(freedom, (1 + SURE) / 2))
