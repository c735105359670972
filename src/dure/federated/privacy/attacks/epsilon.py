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

import torch
from scipy import stats
from torch import Tensor

CONFIDENCE = 0.95


def clopper_pearson(hits: int, tries: int, error: float) -> tuple[float, float]:
    """Bounds of a probability, each of which is wrong with probability `error` at the most."""
    low = 0.0 if hits == 0 else float(stats.beta.ppf(error, hits, tries - hits + 1))
    high = 1.0 if hits == tries else float(stats.beta.ppf(1 - error, hits + 1, tries - hits))
    return low, high


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
    chosen = [(here[: half[0]], away[: half[1]]), (here[half[0] :], away[half[1] :])]
    thresholds = torch.cat(chosen[0])
    threshold = max(
        thresholds.tolist(), key=lambda one: _at(chosen[0][0], chosen[0][1], one, delta, error)
    )
    return max(0.0, _at(chosen[1][0], chosen[1][1], threshold, delta, error))


def _at(here: Tensor, away: Tensor, threshold: float, delta: float, error: float) -> float:
    """The bound at a threshold, which may be below 0; of two, the better one."""
    hits = int((here >= threshold).sum())
    false = int((away >= threshold).sum())
    tpr = clopper_pearson(hits, len(here), error)[0]
    fpr = clopper_pearson(false, len(away), error)[1]
    # And the other way round: those who are found not to be there.
    return max(_log_ratio(tpr - delta, fpr), _log_ratio(1 - fpr - delta, 1 - tpr))


def _log_ratio(above: float, below: float) -> float:
    if above <= 0:
        return -math.inf
    return math.log(above / below) if below > 0 else math.inf


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
    largest = 0.0
    total = 0.0
    for i in range(1, right + 1):
        total += float(coin.pmf(right - i))
        largest = max(largest, total / i)
    return min(1.0, float(coin.sf(right - 1)) + 2 * canaries * delta * largest)
