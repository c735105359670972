"""What noise bounds: epsilon of many noised releases together.

A mechanism is (epsilon, delta)-differentially private if for any two data sets that differ in one
unit (an example, a client) and any set O of outputs

    P[M(D) in O]  <=  exp(epsilon) · P[M(D') in O]  +  delta

Here a release is the sum of what units of at most norm S say, with noise N(0, (z·S)²) on each
coordinate, and each unit is in it with probability q, by a coin of its own that nobody sees (the
Poisson-sampled Gaussian mechanism). What T releases tell together is not T·epsilon but less:

    epsilon         from the distribution of the privacy loss (PLD) with "connect the dots"
    renyi_epsilon   from Rényi divergences (RDP): cheaper, looser, as most papers print it

Both are upper bounds: every rounding is upwards, and nothing is approximated by its limit, as
Gaussian DP does (which tells less than is lost). Where all take part in everything (q = 1) the
releases are one release with less noise, of which the exact value is known.

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
"""In what neighbouring data sets differ: a unit more or less, or another unit in one's place."""

FINEST = 1e-6
COARSEST = 5e-4
"""Widths within which losses of one release are told apart."""

MOST_POINTS = 100_000
"""About how many of them a release may have, so that it is computed in less than a second."""

MOST_NOISE = 2.0**20
LEAST_NOISE = 2.0**-10
"""Where the least noise for an epsilon is looked for."""

MEANINGLESS = 100.0
"""An epsilon that promises nothing: looser bounds do, which cost less."""

SMALLEST_DELTA = 1e-12
"""Below this the sums are no longer exact enough."""


class Releases(NamedTuple):
    """So many releases of one kind.

    rate: q, the probability of a unit to be in one; 1 where all always are. noise: z, the deviation
    of the noise over the largest norm S. times: T.
    """

    rate: float
    noise: float
    times: int = 1


def epsilon(spent: Sequence[Releases], delta: float, relation: Relation = "add-or-remove") -> float:
    """What releases tell of any unit, together: an upper bound, inf for one without noise.

    Raises ValueError for numbers that make no sense.
    """
    return _epsilon(tuple(spent), delta, relation)


# A round is looked at before it is paid for, and after.
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
    # One width for all: losses are added, so they have to lie on one grid.
    width = min(_width(one, relation) for one in sampled)
    parts = sampled if math.isinf(whole) else (*sampled, Releases(1.0, whole))
    # Both data sets may be the larger one: the library takes the worse.
    return float(_composed(parts, width, relation).get_epsilon_for_delta(delta))


def renyi_epsilon(spent: Sequence[Releases], delta: float) -> float:
    """As `epsilon`, by Rényi divergences, for a unit more or less."""
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
    """The least noise z with which so many releases tell at most epsilon = `wanted`.

    Of four digits, the last one rounded up. Raises ValueError for an epsilon that is not above 0,
    and for one that takes more noise than anybody adds.
    """
    if times < 1:
        return 0.0
    return least_noise(
        wanted, lambda noise: epsilon([Releases(rate, noise, times)], delta, relation)
    )


def least_noise(wanted: float, told: Callable[[float], float]) -> float:
    """As `noise_for`. told: the epsilon with a noise; it falls as the noise rises."""
    if not 0 < wanted < math.inf:
        raise ValueError(f"epsilon is {wanted}, but what may be told is above 0 and finite")
    high, low = 1.0, 0.5
    while (least := told(high)) > wanted:
        low, high = high, 2 * high
        if high > MOST_NOISE:
            raise ValueError(
                f"no noise keeps all that is released within an epsilon of {wanted}: ask for less, "
                f"or a larger epsilon"
            )
    while (most := told(low)) <= wanted and low > LEAST_NOISE:
        low, high, least = low / 2, low, most
    # Epsilon falls about as a power of the noise: the place between is guessed so, and looked at
    # from both sides.
    while high / low > 1.0004:
        # 0 is less than anybody asks for, and has no logarithm.
        spread = math.log(most / max(least, 1e-9))
        guess = low * (high / low) ** min(max(math.log(most / wanted) / spread, 0.05), 0.95)
        for noise in (guess * 1.00015, guess / 1.00015):
            if low < noise < high:
                found = told(noise)
                if found <= wanted:
                    high, least = noise, found
                else:
                    low, most = noise, found
    noise = upwards(high)
    # The grid of losses is another for another noise, so the bound may jump in its last digits.
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
    """How many more such releases are possible before epsilon is above `wanted`; at most `most`."""

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
    """Raise ValueError for a budget that nothing keeps to."""
    if not 0 < epsilon < math.inf:
        raise ValueError(f"epsilon is {epsilon}, but a budget is above 0 and finite")


def check_delta(delta: float) -> None:
    """Raises ValueError for a delta that promises nothing, or cannot be computed with."""
    if not SMALLEST_DELTA <= delta < 1:
        raise ValueError(
            f"delta is {delta}, but the probability that the bound fails is from "
            f"{SMALLEST_DELTA:g} to below 1; well below 1 / (number of units), such as 1e-5"
        )


def _gathered(
    spent: Sequence[Releases], relation: Relation
) -> tuple[float, tuple[Releases, ...]] | None:
    """Releases of a kind counted together; None where one has no noise.

    The noise of all that everybody is in, as of one release (inf of none), and the sampled ones.
    """
    # Between neighbours a sum moves by S, or by 2·S where somebody takes another's place.
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
            # Many looks at one number through noise are one look through less.
            precision += times * (apart / noise) ** 2
        else:
            sampled[rate, noise] = sampled.get((rate, noise), 0) + times
    whole = math.inf if precision == 0 else 1 / math.sqrt(precision)
    return whole, tuple(Releases(*kind, times) for kind, times in sampled.items())


def _check(rate: float, noise: float, times: int) -> None:
    if not 0 <= rate <= 1:
        raise ValueError(f"the sampling rate is {rate}, but a probability is in [0, 1]")
    if not noise >= 0:
        raise ValueError(f"noise is {noise}, but a deviation is 0 or more")
    if times < 0:
        raise ValueError(f"{times} releases: there are 0 or more")


def _of_gaussian(noise: float, delta: float) -> float:
    """Of one release that everybody is in: the exact value."""
    if math.isinf(noise):
        return 0.0
    return float(_library().get_epsilon_gaussian(noise, delta))


def _without_sampling(spent: Sequence[Releases], delta: float, relation: Relation) -> float:
    """As if all were in all of them, which tells more."""
    counted = _gathered([one._replace(rate=1.0) for one in spent if one.rate], relation)
    return math.inf if counted is None else _of_gaussian(counted[0], delta)


def _width(one: Releases, relation: Relation) -> float:
    """The grid on which the losses of a release are rounded up.

    A twentieth of their deviation, about, so that rounding costs a tenth of a percent.
    """
    apart = 2.0 if relation == "replace" else 1.0
    square = (apart / one.noise) ** 2
    deviation = one.rate * math.sqrt(math.expm1(min(square, 50.0)))
    # The largest loss that counts, ten deviations away.
    largest = square / 2 + 10 * apart / one.noise
    largest = max(largest + math.log(one.rate), math.log1p(one.rate * math.expm1(min(largest, 9))))
    wanted = min(max(deviation / 20, FINEST), COARSEST)
    return _round_number(max(wanted, largest / MOST_POINTS))


def _round_number(number: float) -> float:
    """The largest of 1, 2 and 5 times a power of ten that is not above it.

    So that releases that are almost alike share a grid.
    """
    power: float = 10.0 ** math.floor(math.log10(number))
    return max(k * power for k in (1.0, 2.0, 5.0) if k * power <= number * (1 + 1e-9))


# The first rounds of a run are the beginning of all later ones: what they come to is kept.
@lru_cache(maxsize=64)
def _composed(parts: tuple[Releases, ...], width: float, relation: Relation) -> Any:
    *before, last = parts
    one = _loss(last.rate, last.noise, width, relation)
    many = one.self_compose(last.times) if last.times > 1 else one
    return _composed(tuple(before), width, relation).compose(many) if before else many


@lru_cache(maxsize=64)
def _loss(rate: float, noise: float, width: float, relation: Relation) -> Any:
    """The distribution of the privacy loss of one release."""
    library = _library()
    relations = library.privacy_accountant.NeighboringRelation
    # What everybody is in has its noise over the distance between neighbours already.
    replaces = relation == "replace" and rate < 1
    return library.privacy_loss_distribution.from_gaussian_mechanism(
        noise,
        value_discretization_interval=width,
        sampling_prob=rate,
        neighboring_relation=relations.REPLACE_ONE if replaces else relations.ADD_OR_REMOVE_ONE,
    )


@contextmanager
def _quiet() -> Iterator[None]:
    """Orders of which a divergence cannot be computed are left out, and nobody need be told."""
    logger = logging.getLogger("absl")
    before = logger.level
    logger.setLevel(logging.ERROR)
    try:
        yield
    finally:
        logger.setLevel(before)


def upwards(number: float) -> float:
    """A number, rounded up to four digits."""
    digit = 10.0 ** (math.floor(math.log10(number)) - 3)
    return float(f"{math.ceil(number / digit - 1e-9) * digit:.4g}")


def _library() -> Any:
    """dp-accounting, imported where it is needed: it takes a second.

    Raises ImportError that says how to install it.
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
