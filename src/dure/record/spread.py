"""How a number is spread over runs that differ in their seed alone.

    mean m of n values, deviation s = sqrt(sum of (x - m)^2 / (n - 1)), and the interval in which
    the mean of all seeds lies with a probability of 95 %:   m -+ t(0.975, n - 1) * s / sqrt(n)

t is Student's (W. S. Gosset, "The Probable Error of a Mean", Biometrika 6, 1908), for values that
are normal. Of one value there is neither deviation nor interval.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

SURE = 0.95
"""The probability that the interval holds the mean."""


@dataclass(frozen=True)
class Spread:
    """Of so many values. deviation, low, high: None of fewer than two."""

    count: int
    mean: float
    deviation: float | None = None
    low: float | None = None
    high: float | None = None


def spread(values: Sequence[float]) -> Spread | None:
    """How these values are spread; None where there are none."""
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
    """t below which a value of Student's distribution lies with probability (1 + SURE) / 2."""
    # Loaded when it is needed: the report of a single run does without.
    from scipy.special import stdtrit

    return float(stdtrit(freedom, (1 + SURE) / 2))
