"""Single random numbers, each a function of seed, purpose and position.

Nothing is drawn in advance, so a client that is never sampled costs nothing.
"""

from __future__ import annotations

from statistics import NormalDist

from dure.randomness.seeds import derive

_STANDARD = NormalDist()


def uniform(seed: int, purpose: str, *position: int) -> float:
    """Return a number in (0, 1), neither end included, with 52 random bits.

    The number is a function of the arguments (a single hash).
    """
    # 52 bits plus a half need 53 bits, the precision of float64: no rounding, so never 0 or 1.
    return ((derive(seed, purpose, *position) >> 11) + 0.5) * 2.0**-52


def normal(seed: int, purpose: str, *position: int) -> float:
    """Return a standard normal number, a function of the arguments (a single hash)."""
    return _STANDARD.inv_cdf(uniform(seed, purpose, *position))
