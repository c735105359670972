"""A lower bound on epsilon by experiment: what nobody could guess if the promise held.

Whoever is (epsilon, delta)-private hides whether any one took part. So put in canaries, whose trace
is as clear as can be, and guess from what is published who was there.

    paired      runs with the canary and without it, each with a score. At a threshold that was
                chosen on half of them, of the other half
                    TPR <= e^epsilon FPR + delta        TNR <= e^epsilon FNR + delta
                with Clopper-Pearson bounds for the rates
    one run     m canaries, each in it by a fair coin of its own. r of them are guessed, v rightly:
                the probability of v or more is at most
                    P[B >= v] + 2 m delta max over i of P[v > B >= v - i] / i,
                    B ~ Binomial(r, e^epsilon / (1 + e^epsilon))
                and epsilon is refuted where that is below 1 less the confidence

Such a bound lies below the accountant's epsilon, with the given confidence; one above it has found
an error. A low bound proves nothing: a better attack may find more.

Sources: M. Jagielski, J. Ullman, A. Oprea, "Auditing Differentially Private Machine Learning",
NeurIPS 2020; T. Steinke, M. Nasr, M. Jagielski, "Privacy Auditing with One (1) Training Run",
NeurIPS 2023; C. Clopper, E. Pearson, 1934.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from scipy import stats
from torch import Tensor

Array = NDArray[np.float64]

CONFIDENCE = 0.95


def clopper_pearson(hits: Array, tries: int, error: float) -> tuple[Array, Array]:
    """Bounds of probabilities, each of which is wrong with probability `error` at the most."""
    low = stats.beta.ppf(error, hits, tries - hits + 1)
    high = stats.beta.ppf(1 - error, hits + 1, tries - hits)
    return np.where(hits == 0, 0.0, low), np.where(hits == tries, 1.0, high)


def paired_epsilon(
    with_it: Sequence[float] | Tensor,
    without: Sequence[float] | Tensor,
    delta: float,
    confidence: float = CONFIDENCE,
) -> float:
    """Scores of runs with the canary and without it, larger ones speak for it; in random order.

    Raises ValueError for fewer than two of each.
    """
    here = torch.as_tensor(with_it, dtype=torch.float64)
    away = torch.as_tensor(without, dtype=torch.float64)
    if min(len(here), len(away)) < 2:
        raise ValueError("runs with a canary and without one are compared: 2 of each at the least")
    # Two bounds, of which each may be wrong.
    error = (1 - confidence) / 2
    half = (len(here) // 2, len(away) // 2)
    thresholds = torch.cat([here[: half[0]], away[: half[1]]]).numpy()
    chosen = _bounds(here[: half[0]], away[: half[1]], thresholds, delta, error)
    threshold = thresholds[chosen.argmax()]
    found = _bounds(here[half[0] :], away[half[1] :], threshold[None], delta, error)
    return max(0.0, float(found[0]))


def _bounds(here: Tensor, away: Tensor, thresholds: Array, delta: float, error: float) -> Array:
    """The bound at each threshold, which may be below 0; of two, the better one."""
    hits = len(here) - _below(here, thresholds)
    false = len(away) - _below(away, thresholds)
    tpr = clopper_pearson(hits, len(here), error)[0]
    fpr = clopper_pearson(false, len(away), error)[1]
    # And the other way round: those who are found not to be there.
    return np.maximum(_log_ratio(tpr - delta, fpr), _log_ratio(1 - fpr - delta, 1 - tpr))


def _below(scores: Tensor, thresholds: Array) -> Array:
    """How many scores are below each threshold."""
    return np.searchsorted(scores.sort().values.numpy(), thresholds).astype(np.float64)


def _log_ratio(above: Array, below: Array) -> Array:
    """-inf where there is nothing above."""
    # Bounds of rates are above 0 and below 1, where they are divided by.
    ratio: Array = np.log(
        np.maximum(above, 0) / below, where=above > 0, out=np.full_like(above, -np.inf)
    )
    return ratio


def one_run_epsilon(
    canaries: int,
    guessed: int,
    right: int,
    delta: float,
    confidence: float = CONFIDENCE,
) -> float:
    """canaries: m. guessed: r, for the rest nobody has guessed. right: v.

    Raises ValueError unless 0 <= v <= r <= m.
    """
    if not 0 <= right <= guessed <= canaries:
        raise ValueError(f"{right} right guesses of {guessed} about {canaries} canaries cannot be")

    def refuted(epsilon: float) -> bool:
        return _probability(canaries, guessed, right, epsilon, delta) < 1 - confidence

    if not refuted(0.0):
        return 0.0
    low = 0.0
    high = 1.0
    # With all right there is an end: of r fair coins that all fell well.
    while refuted(high):
        low = high
        high *= 2
    for _ in range(40):
        middle = (low + high) / 2
        low, high = (middle, high) if refuted(middle) else (low, middle)
    return low


def _probability(canaries: int, guessed: int, right: int, epsilon: float, delta: float) -> float:
    """That so many guesses are right, or more, at the most, under (epsilon, delta)."""
    coin = stats.binom(guessed, 1 / (1 + math.exp(-epsilon)))
    if not right:
        return 1.0
    # P[v > B >= v - i] for i = 1, 2, ..., v.
    below = np.cumsum(coin.pmf(np.arange(right - 1, -1, -1)))
    largest = float((below / np.arange(1, right + 1)).max())
    return min(1.0, float(coin.sf(right - 1)) + 2 * canaries * delta * largest)
