"""Lower bounds on epsilon by experiment, from the success of guesses about canaries.

An (epsilon, delta)-private mechanism hides the participation of any client. The audit adds
canaries, whose updates are as distinct as possible, and guesses from the published models which
canaries took part.

    paired      runs with the canary and without the canary, each with a score. The threshold is
                chosen on half of the runs. The other half must satisfy
                    TPR <= e^epsilon FPR + delta        TNR <= e^epsilon FNR + delta
                with Clopper-Pearson bounds for the rates
    one run     m canaries, each present by an independent fair coin. r of them are guessed, v
                rightly. The probability of v or more right guesses is at most
                    P[B >= v] + 2 m delta max over i of P[v > B >= v - i] / i,
                    B ~ Binomial(r, e^epsilon / (1 + e^epsilon))
                and epsilon is refuted if that value is below 1 - confidence

A correct bound is below the accountant's epsilon with the given confidence; a bound above the
accountant's epsilon reveals an error. A low bound proves nothing: a better attack may find more.

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
    """Return lower and upper bounds of probabilities, each wrong with probability `error`."""
    low = stats.beta.ppf(error, hits, tries - hits + 1)
    high = stats.beta.ppf(1 - error, hits + 1, tries - hits)
    return np.where(hits == 0, 0.0, low), np.where(hits == tries, 1.0, high)


def paired_epsilon(
    with_it: Sequence[float] | Tensor,
    without: Sequence[float] | Tensor,
    delta: float,
    confidence: float = CONFIDENCE,
) -> float:
    """Return a lower bound on epsilon from the scores of paired runs; 0 if no epsilon is refuted.

    Args:
        with_it: scores of runs with the canary, in random order; larger scores suggest the canary.
        without: scores of runs without the canary, in random order.
        delta: delta of the privacy guarantee.
        confidence: probability that the bound holds.

    Raises ValueError for fewer than two scores of either kind.
    """
    here = torch.as_tensor(with_it, dtype=torch.float64)
    away = torch.as_tensor(without, dtype=torch.float64)
    if min(len(here), len(away)) < 2:
        raise ValueError(
            "runs with a canary are compared with runs without: give at least 2 of each"
        )
    # Two rates are bounded, so each bound may use half of the error probability.
    error = (1 - confidence) / 2
    half = (len(here) // 2, len(away) // 2)
    thresholds = torch.cat([here[: half[0]], away[: half[1]]]).numpy()
    chosen = _bounds(here[: half[0]], away[: half[1]], thresholds, delta, error)
    threshold = thresholds[chosen.argmax()]
    found = _bounds(here[half[0] :], away[half[1] :], threshold[None], delta, error)
    return max(0.0, float(found[0]))


def _bounds(here: Tensor, away: Tensor, thresholds: Array, delta: float, error: float) -> Array:
    """Return the better bound of two directions at each threshold; may be below 0."""
    hits = len(here) - _below(here, thresholds)
    false = len(away) - _below(away, thresholds)
    tpr = clopper_pearson(hits, len(here), error)[0]
    fpr = clopper_pearson(false, len(away), error)[1]
    # The second direction compares true negatives with false negatives.
    return np.maximum(_log_ratio(tpr - delta, fpr), _log_ratio(1 - fpr - delta, 1 - tpr))


def _below(scores: Tensor, thresholds: Array) -> Array:
    """Return the number of scores below each threshold."""
    return np.searchsorted(scores.sort().values.numpy(), thresholds).astype(np.float64)


def _log_ratio(above: Array, below: Array) -> Array:
    """Return log(above / below); -inf for entries with `above` <= 0."""
    # The Clopper-Pearson bounds used as denominators are above 0, so no division by zero occurs.
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
