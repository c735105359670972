"""Privacy accounting: epsilon of many noisy releases together.

A mechanism is (epsilon, delta)-differentially private if for any two data sets that differ in one
unit (an example, a client) and any set O of outputs

    P[M(D) in O]  <=  exp(epsilon) · P[M(D') in O]  +  delta

Here a release is the sum of the units' contributions of norm at most S, with noise N(0, (z·S)²) on
each coordinate, and each unit takes part with probability q, independently and secretly (the
Poisson-sampled Gaussian mechanism). T releases together cost less than T·epsilon:

    epsilon         from the distribution of the privacy loss (PLD) with "connect the dots"
    renyi_epsilon   from Rényi divergences (RDP): cheaper, looser, as in most papers

Both are upper bounds: every rounding is upwards, and no quantity is replaced by its limit, as in
Gaussian DP (which underestimates the loss). If all units take part in every release (q = 1), the
releases are equivalent to a single release with less noise, whose exact value is known.

Cost: a sampled release some 40 ms, its T-fold composition some 20 ms, each once for its numbers.

Sources: M. Abadi et al. 2016 (sampling); I. Mironov, K. Talwar, L. Zhang 2019 (RDP of it); S.
Meiser, E. Mohammadi 2018 and A. Koskela, J. Jälkö, A. Honkela 2020 (PLD); V. Doroshenko et al.
2022 (connect the dots); B. Balle, Y.-X. Wang 2018 (q = 1). All as in dp-accounting.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import lru_cache
from typing import Any, Literal, NamedTuple

Relation = Literal["add-or-remove", "replace"]
"""Difference of neighbouring data sets: a unit added or removed, or a unit replaced by another."""

FINEST = 1e-6
COARSEST = 5e-4
"""Limits of the discretization interval of a release's privacy loss."""

MOST_POINTS = 100_000
"""Approximate maximum number of intervals of a release, to compute it in less than a second."""

MOST_NOISE = 2.0**20
LEAST_NOISE = 2.0**-10
"""Range of the search for the least noise for an epsilon."""

MEANINGLESS = 100.0
"""Epsilon above which looser, cheaper bounds suffice, because it guarantees nothing."""

SMALLEST_DELTA = 1e-12
"""Minimum delta, below which the sums are not exact enough."""


class Releases(NamedTuple):
    """Number of releases of one kind.

    rate: q, the probability that a unit takes part; 1 if all always do. noise: z, the standard
    deviation of the noise over the largest norm S. times: T.
    """

    rate: float
    noise: float
    times: int = 1


def epsilon(spent: Sequence[Releases], delta: float, relation: Relation = "add-or-remove") -> float:
    """Return an upper bound on the epsilon of all releases together; inf without noise.

    Raises ValueError for invalid numbers.
    """
    return _epsilon(tuple(spent), delta, relation)


# Cached, since epsilon is needed before a round is charged and again afterwards.
@lru_cache(maxsize=256)
def _epsilon(spent: tuple[Releases, ...], delta: float, relation: Relation) -> float:
    check_delta(delta)
    counted = _gathered(spent, relation)
    if counted is None:
        return math.inf
    whole, sampled = counted
    if not sampled:
        return _of_gaussian(whole, delta)
    loose = renyi_epsilon(spent, delta)
    if loose > MEANINGLESS:
        return loose if relation == "add-or-remove" else _without_sampling(spent, delta, relation)
    # A single interval for all: losses are added, so they need a common grid.
    width = min(_width(one, relation) for one in sampled)
    parts = sampled if math.isinf(whole) else (*sampled, Releases(1.0, whole))
    # Either data set may be the larger: the library takes the worse case.
    return float(_composed(parts, width, relation).get_epsilon_for_delta(delta))


def renyi_epsilon(spent: Sequence[Releases], delta: float) -> float:
    """Return epsilon by Rényi divergences, for a unit added or removed; as `epsilon`."""
    check_delta(delta)
    counted = _gathered(spent, "add-or-remove")
    if counted is None:
        return math.inf
    whole, sampled = counted
    library = _library()
    accountant = library.rdp.RdpAccountant()
    if not math.isinf(whole):
        accountant.compose(library.GaussianDpEvent(whole))
    for rate, noise, times in sampled:
        event = library.PoissonSampledDpEvent(rate, library.GaussianDpEvent(noise))
        with _quiet():
            accountant.compose(library.SelfComposedDpEvent(event, times))
    with _quiet():
        return float(accountant.get_epsilon(delta))


def noise_for(
    wanted: float,
    delta: float,
    rate: float,
    times: int,
    relation: Relation = "add-or-remove",
) -> float:
    """Return the least noise z for which `times` releases have at most epsilon = `wanted`.

    The result has four digits, the last rounded up. Raises ValueError for an epsilon that is not
    above 0, or that requires more noise than `MOST_NOISE`.

    Args:
        wanted: epsilon.
        delta: probability that the bound fails.
        rate: q.
        times: T.
        relation: difference of neighbouring data sets.
    """
    if times < 1:
        return 0.0
    return least_noise(
        wanted, lambda noise: epsilon([Releases(rate, noise, times)], delta, relation)
    )


def least_noise(wanted: float, told: Callable[[float], float]) -> float:
    """Return the least noise for `wanted`; as `noise_for`.

    told: returns the epsilon of a noise; decreasing.
    """
    if not 0 < wanted < math.inf:
        raise ValueError(f"epsilon is {wanted}, but it has to be greater than 0 and finite")
    high, low = 1.0, 0.5
    while (least := told(high)) > wanted:
        low, high = high, 2 * high
        if high > MOST_NOISE:
            raise ValueError(
                f"no amount of noise keeps all releases within an epsilon of {wanted}: release "
                "less, or give a larger epsilon"
            )
    while (most := told(low)) <= wanted and low > LEAST_NOISE:
        low, high, least = low / 2, low, most
    # Epsilon falls about as a power of the noise: interpolate in logarithms, and test both sides of
    # the guess.
    while high / low > 1.0004:
        # An epsilon of 0 has no logarithm.
        spread = math.log(most / max(least, 1e-9))
        guess = low * (high / low) ** min(max(math.log(most / wanted) / spread, 0.05), 0.95)
        for noise in (guess * 1.00015, guess / 1.00015):
            if low < noise < high:
                found = told(noise)
                if found <= wanted:
                    high, least = noise, found
                else:
                    low, most = noise, found
    # Rounded upwards, so that the printed noise still satisfies the epsilon.
    noise = upwards(high)
    # The grid of losses depends on the noise, so the bound may jump in its last digits.
    while told(noise) > wanted:
        noise = upwards(noise * 1.0002)
    return noise


def times_within(
    wanted: float,
    spent: Sequence[Releases],
    rate: float,
    noise: float,
    delta: float,
    most: int = 2**31,
    relation: Relation = "add-or-remove",
) -> int:
    """Return the number of further releases with total epsilon at most `wanted`; at most `most`.

    Args:
        wanted: epsilon.
        spent: releases so far.
        rate: q of the further releases.
        noise: z of the further releases.
        delta: probability that the bound fails.
        most: upper limit of the result.
        relation: difference of neighbouring data sets.
    """

    def fits(times: int) -> bool:
        return epsilon([*spent, Releases(rate, noise, times)], delta, relation) <= wanted

    if not fits(1):
        return 0
    low, high = 1, 2
    while high <= most and fits(high):
        low, high = high, 2 * high
    high = min(high, most + 1)
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if fits(middle) else (low, middle)
    return low


def check_epsilon(epsilon: float) -> None:
    """Raise ValueError for an epsilon that is not positive and finite."""
    if not 0 < epsilon < math.inf:
        raise ValueError(f"epsilon is {epsilon}, but it has to be greater than 0 and finite")


def check_delta(delta: float) -> None:
    """Raise ValueError for a delta of 1 or more, or too small to compute with."""
    if not SMALLEST_DELTA <= delta < 1:
        raise ValueError(
            f"delta is {delta}, but it has to be from {SMALLEST_DELTA:g} to below 1, and should "
            "be well below 1 / (number of units), such as 1e-5"
        )


def _gathered(
    spent: Sequence[Releases], relation: Relation
) -> tuple[float, tuple[Releases, ...]] | None:
    """Return the releases grouped by kind; None if a release has no noise.

    Returns the noise of all unsampled releases, combined to a single release (inf for none), and
    the sampled releases.
    """
    # Between neighbours a sum moves by S, or by 2·S if a unit is replaced.
    apart = 2.0 if relation == "replace" else 1.0
    precision = 0.0
    sampled: dict[tuple[float, float], int] = {}
    for rate, noise, times in spent:
        _check(rate, noise, times)
        if rate == 0 or times == 0:
            continue
        if noise == 0:
            return None
        if rate == 1:
            # Many noisy releases of the same number equal a single release with less noise.
            precision += times * (apart / noise) ** 2
        else:
            sampled[rate, noise] = sampled.get((rate, noise), 0) + times
    whole = math.inf if precision == 0 else 1 / math.sqrt(precision)
    return whole, tuple(Releases(*kind, times) for kind, times in sampled.items())


def _check(rate: float, noise: float, times: int) -> None:
    if not 0 <= rate <= 1:
        raise ValueError(f"the sampling rate is {rate}, but it has to be in [0, 1]")
    if not noise >= 0:
        raise ValueError(f"noise is {noise}, but it has to be 0 or more")
    if times < 0:
        raise ValueError(f"the number of releases is {times}, but it has to be 0 or more")


def _of_gaussian(noise: float, delta: float) -> float:
    """Return the exact epsilon of a single unsampled release."""
    if math.isinf(noise):
        return 0.0
    return float(_library().get_epsilon_gaussian(noise, delta))


def _without_sampling(spent: Sequence[Releases], delta: float, relation: Relation) -> float:
    """Return epsilon as if all units took part in every release, an upper bound."""
    counted = _gathered([one._replace(rate=1.0) for one in spent if one.rate], relation)
    return math.inf if counted is None else _of_gaussian(counted[0], delta)


def _width(one: Releases, relation: Relation) -> float:
    """Return the interval of the grid to which a release's losses are rounded up.

    The interval is about a twentieth of their standard deviation, so that rounding costs about a
    tenth of a percent.
    """
    apart = 2.0 if relation == "replace" else 1.0
    square = (apart / one.noise) ** 2
    deviation = one.rate * math.sqrt(math.expm1(min(square, 50.0)))
    # The largest loss of significant probability, ten deviations away.
    largest = square / 2 + 10 * apart / one.noise
    largest = max(largest + math.log(one.rate), math.log1p(one.rate * math.expm1(min(largest, 9))))
    wanted = min(max(deviation / 20, FINEST), COARSEST)
    return _round_number(max(wanted, largest / MOST_POINTS))


def _round_number(number: float) -> float:
    """Return the largest of 1, 2 and 5 times a power of ten that is not above the number.

    Thus releases with similar parameters share a grid.
    """
    power: float = 10.0 ** math.floor(math.log10(number))
    return max(k * power for k in (1.0, 2.0, 5.0) if k * power <= number * (1 + 1e-9))


# Cached by prefix: the composition of a run's first rounds begins that of all later rounds.
@lru_cache(maxsize=64)
def _composed(parts: tuple[Releases, ...], width: float, relation: Relation) -> Any:
    *before, last = parts
    one = _loss(last.rate, last.noise, width, relation)
    many = one.self_compose(last.times) if last.times > 1 else one
    return _composed(tuple(before), width, relation).compose(many) if before else many


@lru_cache(maxsize=64)
def _loss(rate: float, noise: float, width: float, relation: Relation) -> Any:
    """Return the distribution of the privacy loss of a single release."""
    library = _library()
    relations = library.privacy_accountant.NeighboringRelation
    # The noise of unsampled releases is already divided by the distance between neighbours.
    replaces = relation == "replace" and rate < 1
    return library.privacy_loss_distribution.from_gaussian_mechanism(
        noise,
        value_discretization_interval=width,
        sampling_prob=rate,
        neighboring_relation=relations.REPLACE_ONE if replaces else relations.ADD_OR_REMOVE_ONE,
    )


@contextmanager
def _quiet() -> Iterator[None]:
    """Context manager: hides warnings about Rényi orders without a computable divergence."""
    logger = logging.getLogger("absl")
    before = logger.level
    logger.setLevel(logging.ERROR)
    try:
        yield
    finally:
        logger.setLevel(before)


def upwards(number: float) -> float:
    """Return a number rounded up to four digits."""
    digit = 10.0 ** (math.floor(math.log10(number)) - 3)
    return float(f"{math.ceil(number / digit - 1e-9) * digit:.4g}")


def _library() -> Any:
    """Return dp-accounting, imported on demand because the import takes a second.

    Raises ImportError with the command to install the library.
    """
    try:
        import dp_accounting
        from dp_accounting.pld import privacy_loss_distribution
        from dp_accounting.rdp import rdp_privacy_accountant
    except ImportError as error:
        raise ImportError(
            'differential privacy needs the extra: pip install "dure[privacy]"'
        ) from error
    return _Library(dp_accounting, privacy_loss_distribution, rdp_privacy_accountant)


class _Library:
    """Modules of dp-accounting under one name."""

    def __init__(self, base: Any, pld: Any, rdp: Any) -> None:
        self.base = base
        self.privacy_loss_distribution = pld
        self.rdp = rdp

    def __getattr__(self, name: str) -> Any:
        return getattr(self.base, name)
