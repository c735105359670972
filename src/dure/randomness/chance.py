"""One random number for one question.

Nothing is drawn in advance, so a client about whom nobody asks costs nothing.
"""

from __future__ import annotations

from statistics import NormalDist

from dure.randomness.seeds import derive

_STANDARD = NormalDist()


def uniform(seed: int, purpose: str, *position: int) -> float:
    """A number in (0, 1), neither end included, with 52 random bits.

    It is a function of the arguments (one hash).
    """
    # 52 bits and a half more are 53, all that a float64 holds: no rounding, so never 0 or 1.
    return ((derive(seed, purpose, *position) >> 11) + 0.5) * 2.0**-52


def normal(seed: int, purpose: str, *position: int) -> float:
    """A number from the standard normal distribution: a function of the arguments (one hash)."""
    return _STANDARD.inv_cdf(uniform(seed, purpose, *position))


def check_share(value: float, what: str) -> None:
    """Raises ValueError unless `value` is in [0, 1].

    what: whose share, such as "stragglers: the share".
    """
    if not 0 <= value <= 1:
        raise ValueError(f"{what} is between 0 and 1, not {value}")
