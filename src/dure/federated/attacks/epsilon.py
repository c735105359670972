"""Lower bounds on epsilon by experiment, from the success of guesses about canaries.

An (epsilon, delta)-private mechanism hides the participation of any client. The audit adds
canaries, whose updates are as distinct as possible, and guesses from the published models which
canaries took part.

A single run has m canaries, each present by an independent fair coin. r of them are guessed, v
rightly. The probability of v or more right guesses is at most

    P[B >= v] + 2 m delta max over i of P[v > B >= v - i] / i,
    B ~ Binomial(r, e^epsilon / (1 + e^epsilon))

and epsilon is refuted if that value is below 1 - confidence.

A correct bound is below the accountant's epsilon with the given confidence; a bound above the
accountant's epsilon reveals an error. A low bound proves nothing: a better attack may find more.

Source: T. Steinke, M. Nasr, M. Jagielski, "Privacy Auditing with One (1) Training Run", NeurIPS
2023.
"""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import NDArray
from scipy import stats

Array = NDArray[np.float64]

CONFIDENCE = 0.95


def one_run_epsilon(
    canaries: int,
    guessed: int,
    right: int,
    delta: float,
    confidence: float = CONFIDENCE,
) -> float:
    """Return a lower bound on epsilon from the guesses of a single run; 0 if no epsilon is refuted.

    Args:
        canaries: m, the number of canaries.
        guessed: r, the number of canaries with a guess.
        right: v, the number of right guesses.
        delta: delta of the privacy guarantee.
        confidence: probability that the bound holds.

    Raises ValueError unless 0 <= v <= r <= m.
    """
    if not 0 <= right <= guessed <= canaries:
        raise ValueError(
            f"{right} right guesses of {guessed} about {canaries} canaries are impossible"
        )

    def refuted(epsilon: float) -> bool:
        return _probability(canaries, guessed, right, epsilon, delta) < 1 - confidence

    if not refuted(0.0):
        return 0.0
    low = 0.0
    high = 1.0
    # The loop ends even if all guesses are right: the probability of r right guesses tends to 1.
    while refuted(high):
        low = high
        high *= 2
    for _ in range(40):
        middle = (low + high) / 2
        low, high = (middle, high) if refuted(middle) else (low, middle)
    return low


def _probability(canaries: int, guessed: int, right: int, epsilon: float, delta: float) -> float:
    """Return an upper bound of the probability of `right` or more right guesses."""
    coin = stats.binom(guessed, 1 / (1 + math.exp(-epsilon)))
    if not right:
        return 1.0
    # P[v > B >= v - i] for i = 1, 2, ..., v.
    below = np.cumsum(coin.pmf(np.arange(right - 1, -1, -1)))
    largest = float((below / np.arange(1, right + 1)).max())
    return min(1.0, float(coin.sf(right - 1)) + 2 * canaries * delta * largest)
