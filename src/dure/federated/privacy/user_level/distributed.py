"""Distributed noise inside secure aggregation: the Skellam mechanism.

No party is trusted with the noise: each client adds a share of the noise to its update before the
sum is formed, and the server sees only the sum. Secure aggregation sums integers, so the noise is
integer-valued:

    clip       |w_k·Δ_k| <= S                                    w_k <= 1
    rotate     v = H·D·Δ·s             D: random signs, H: Hadamard's matrix over √d, s: the scale
    round      each coordinate up or down at random, with mean v, again until
               |x|² <= Δ₂² = min( (S·s + √d)²,  S²s² + d/4 + √(2·log(1/β))·(S·s + √d/2) )
               β = e^-½
    noise      + Skellam(μ/t) on each coordinate                 the difference of two Poissons
    sum        of n >= t clients, modulo R                       inside secure aggregation
    decode     (H·D)^-1 · sum / s

Sums of Skellam numbers are Skellam: t clients together add variance μ = (z·Δ₂)², n > t add more.
**Shares are scaled to t**, the fewest clients in a sum of secure aggregation: fewer clients than
planned would add less noise than guaranteed. Rotation and this rounding hardly lengthen the vector,
so z is nearly the noise multiplier of a Gaussian.

    RDP of order α:  α·Δ₂²/(2μ) + min( ((2α-1)·Δ₂² + 6·Δ₁) / (4μ²),  3·Δ₁/(2μ) )
                     Δ₁ <= min(√d·Δ₂, Δ₂²)

There are two epsilons. The **server** knows the selected clients, so sampling does not amplify
privacy against the server, and only the rounds of a client's participation count. **Recipients** of
the models do not know the selection: against them the RDP is that of a Poisson-sampled mechanism,
by a bound that holds for any mechanism.

Numbers are drawn by inverting the distribution, from 53 bits: the tail beyond adds below 2^-50 to
delta for each coordinate. Cost: d log d for the rotation; up to twice the elements travel, as d is
padded to a power of two. s is so large that rounding costs next to nothing, and so small that no
sum wraps around.

Sources: N. Agarwal, P. Kairouz, Z. Liu, "The Skellam Mechanism for Differentially Private Federated
Learning", NeurIPS 2021 (theorem 3.5); P. Kairouz, Z. Liu, T. Steinke, "The Distributed Discrete
Gaussian Mechanism for Federated Learning with Secure Aggregation", ICML 2021 (rounding); Y. Zhu,
Y.-X. Wang, "Poisson Subsampled Rényi Differential Privacy", ICML 2019 (theorem 5).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any

import numpy as np
import torch
from torch import Tensor

from dure.privacy.accountant import Releases, check_delta, least_noise
from dure.randomness.keystream import bernoulli_samples, uniform

ORDERS = (*range(2, 64), 72, 96, 128, 192, 256)
"""Orders of Rényi divergences: whole numbers, as the bounds require."""

FINE = 64
"""S·s in units of √d: rounding then lengthens a vector by less than a ten-thousandth."""

MOST_VARIANCE = 2.0**28
"""Largest variance of a client's share of the noise for which the sampler uses a table."""

ATTEMPTS = 100
"""Largest number of attempts at rounding: each succeeds with probability at least 1 - e^-½."""

TAIL = 12.0
"""Deviations of noise that fit the modulus: the tail has a probability below 10^-30."""

Keys = Callable[[str, int], bytes]
"""Function (purpose, attempt) -> a key of the client, as `Secret.key` makes them for a round."""


@dataclass(frozen=True)
class DistributedNoisePlan:
    """Numbers of a round that all clients and the server know.

    Args:
        elements: d, the length of an update.
        clip: S.
        noise: z, of the smallest sum.
        clients: largest number of clients in a sum.
        threshold: t, the smallest number of clients in a sum.
        bits: bits of the modulus R.

    Raises ValueError for numbers that do not fit each other.
    """

    elements: int
    clip: float
    noise: float
    clients: int
    threshold: int
    bits: int = 32

    def __post_init__(self) -> None:
        if not 1 <= self.threshold <= self.clients:
            raise ValueError(
                f"distributed noise: threshold is {self.threshold}, but a sum can have 1 to "
                f"{self.clients} clients"
            )
        if not (0 < self.clip < math.inf and 0 <= self.noise < math.inf):
            raise ValueError(
                f"distributed noise: clip is {self.clip} and noise {self.noise}, but both have to "
                "be finite, and clip greater than 0"
            )
        if not self.scale * self.clip >= 1:
            raise ValueError(
                f"distributed noise: {self.bits} bits are too few for {self.clients} clients with "
                f"noise {self.noise}: use more bits, or less noise"
            )

    @property
    def padded(self) -> int:
        """d rounded up to a power of two: the number of integers that travel."""
        return 1 << max(0, self.elements - 1).bit_length()

    @property
    def scale(self) -> float:
        """s: a power of two; with this scale no sum wraps around."""
        # A coordinate of one client is at most S·s after the rotation, and one more by rounding;
        # n clients add n/t times the noise of t.
        spread = TAIL * self.noise * math.sqrt(self.clients / self.threshold)
        room = 2.0 ** (self.bits - 2) / (self.clip * (self.clients + 2 * spread))
        wanted = FINE * math.sqrt(self.padded) / self.clip
        if self.noise:
            most = math.sqrt(MOST_VARIANCE * self.threshold) / (2 * self.noise * self.clip)
            wanted = min(wanted, most)
        return 2.0 ** math.floor(math.log2(min(room, wanted)))

    @property
    def l2(self) -> float:
        """Δ₂, the largest norm of a client's rounded vector."""
        length, size = self.clip * self.scale, self.padded
        worst = (length + math.sqrt(size)) ** 2
        likely = length**2 + size / 4 + (length + math.sqrt(size) / 2)  # √(2 log(1/β)) = 1
        return math.sqrt(min(worst, likely))

    @property
    def l1(self) -> float:
        """Δ₁, the largest L1 norm of a client's rounded vector."""
        return min(math.sqrt(self.padded) * self.l2, self.l2**2)

    @property
    def variance(self) -> float:
        """μ, the variance of the noise on each coordinate of a sum of `threshold` clients."""
        return (self.noise * self.l2) ** 2

    @property
    def share(self) -> float:
        """Variance of the noise that each client adds."""
        return self.variance / self.threshold


def encode(plan: DistributedNoisePlan, update: Tensor, signs: bytes, keys: Keys) -> Tensor:
    """Return a client's input to secure aggregation: int64 [padded], with its share of the noise.

    Args:
        plan: numbers of the round.
        update: float64 [elements], weighted and no longer than S.
        signs: public key of the round's rotation.
        keys: keys of this client and round alone.

    Raises ValueError for an update that is longer than S, or not finite.
    """
    norm = float(torch.linalg.vector_norm(update, dtype=torch.float64))
    if not norm <= plan.clip * (1 + 1e-9):
        raise ValueError(f"the update has the norm {norm:g}, but it has to be clipped to S")
    rotated = rotate(plan, update.double().cpu(), signs) * plan.scale
    rounded = _rounded(plan, rotated, keys)
    if not plan.noise:
        return rounded
    return rounded + skellam(keys("skellam noise", 0), plan.share, plan.padded)


def decode(plan: DistributedNoisePlan, total: Tensor, signs: bytes) -> Tensor:
    """Return the sum of the updates with its noise: float64 [elements].

    `total` is int64 [padded], any representative of the sum modulo R.
    """
    half = 1 << (plan.bits - 1)
    centred = (total.long() + half).remainder(1 << plan.bits) - half
    return unrotate(plan, centred.double() / plan.scale, signs)


def rotate(plan: DistributedNoisePlan, vector: Tensor, signs: bytes) -> Tensor:
    """Return H·D·vector: float64 [elements] -> [padded]. The rotation preserves the norm."""
    padded = torch.zeros(plan.padded, dtype=torch.float64)
    padded[: plan.elements] = vector
    return _hadamard(padded * _signs(plan, signs))


def unrotate(plan: DistributedNoisePlan, rotated: Tensor, signs: bytes) -> Tensor:
    """Return the inverse of `rotate`: float64 [padded] -> [elements]."""
    # Hadamard's matrix over √d is its own inverse.
    return (_hadamard(rotated) * _signs(plan, signs))[: plan.elements]


def _signs(plan: DistributedNoisePlan, key: bytes) -> Tensor:
    return bernoulli_samples(key, 0.5, plan.padded).double() * 2 - 1


def _hadamard(vector: Tensor) -> Tensor:
    """Return Hadamard's matrix over √d times a vector of d = 2^k elements, in d log d steps."""
    size = len(vector)
    result = vector.clone()
    width = 1
    while width < size:
        pairs = result.view(-1, 2, width)
        result = torch.stack([pairs[:, 0] + pairs[:, 1], pairs[:, 0] - pairs[:, 1]], 1)
        result = result.reshape(size)
        width *= 2
    return result / math.sqrt(size)


def _rounded(plan: DistributedNoisePlan, vector: Tensor, keys: Keys) -> Tensor:
    """Return the vector rounded at random without bias, again until its norm is at most Δ₂."""
    low = vector.floor()
    part = vector - low
    for attempt in range(ATTEMPTS):
        drawn = uniform(keys("stochastic rounding", attempt), plan.padded)
        rounded = low + (drawn < part)
        if float(rounded.norm()) <= plan.l2:
            return rounded.long()
    raise ArithmeticError(f"rounding has failed {ATTEMPTS} times, which happens once in 10^40")


def skellam(key: bytes, variance: float, count: int) -> Tensor:
    """Return `count` Skellam numbers of mean 0 and this variance: int64.

    Raises ValueError for a variance outside of 0 to `MOST_VARIANCE`.
    """
    if not 0 <= variance <= MOST_VARIANCE:
        raise ValueError(
            f"the variance of Skellam noise is {variance}, but it has to be 0 to {MOST_VARIANCE:g}"
        )
    if not variance:
        return torch.zeros(count, dtype=torch.int64)
    first, below = _table(variance)
    return torch.from_numpy(np.searchsorted(below, uniform(key, count).numpy(), "right") + first)


@lru_cache(maxsize=8)
def _table(variance: float) -> tuple[int, Any]:
    """Return the smallest number k in the table, and P[X <= j] for j = k, k + 1, …."""
    special = _scipy()
    # Twelve deviations, and 30 more for a small variance, whose tails are Poisson's.
    far = math.ceil(TAIL * math.sqrt(variance) + 30)
    mass = special.ive(np.abs(np.arange(-far, far + 1)), variance)
    below = np.cumsum(mass)
    # The last sum is 1 up to rounding; normalised, so that no draw falls beyond the table.
    below /= below[-1]
    return -far, below


def _scipy() -> Any:
    try:
        from scipy import special
    except ImportError as error:
        raise ImportError(
            'differential privacy needs the extra: pip install "dure[privacy]"'
        ) from error
    return special


# The account


def divergences(plan: DistributedNoisePlan, survivors: int | None = None) -> list[float]:
    """Return the RDP of a sum for `ORDERS`. `survivors`: clients in the sum; None is the threshold.

    Raises ValueError for fewer than the threshold, which add less noise.
    """
    clients = plan.threshold if survivors is None else survivors
    if clients < plan.threshold:
        raise ValueError(
            f"a sum of {clients} clients has less noise than planned for {plan.threshold} "
            "clients: it must not be released"
        )
    return [divergence(plan.share * clients, plan.l2, plan.l1, order) for order in ORDERS]


def divergence(variance: float, l2: float, l1: float, order: int) -> float:
    """Return the RDP of Skellam noise for sensitivities `l2` and `l1`; inf without noise."""
    if not variance:
        return math.inf
    least = order * l2**2 / (2 * variance)
    near = ((2 * order - 1) * l2**2 + 6 * l1) / (4 * variance**2)
    return least + min(near, 3 * l1 / (2 * variance))


def sampled(rate: float, alone: Callable[[int], float]) -> list[float]:
    """Return the RDP of a mechanism on Poisson-sampled clients, for `ORDERS`.

    `alone` gives the mechanism's RDP without sampling, by order.
    """
    return [_sampled(order, rate, alone) for order in ORDERS]


def _sampled(order: int, rate: float, alone: Callable[[int], float]) -> float:
    if rate == 1:
        return alone(order)
    if not rate:
        return 0.0
    gone, there = math.log1p(-rate), math.log(rate)
    terms = [(order - 1) * gone + math.log1p((order - 1) * rate)]
    for many in range(2, order + 1):
        chosen = math.lgamma(order + 1) - math.lgamma(many + 1) - math.lgamma(order - many + 1)
        factor = 0.0 if many == 2 else math.log(3)
        terms.append(
            factor + chosen + (order - many) * gone + many * there + (many - 1) * alone(many)
        )
    largest = max(terms)
    whole = largest + math.log(math.fsum(math.exp(term - largest) for term in terms))
    # Never more than without sampling, and never below 0.
    return min(max(whole, 0.0) / (order - 1), alone(order))


def epsilon_of(divergences: Sequence[float], delta: float) -> float:
    """Return the epsilon of RDP values at `ORDERS`; rounds compose by addition of their values."""
    check_delta(delta)
    if not all(map(math.isfinite, divergences)):
        return math.inf
    try:
        from dp_accounting.rdp import rdp_privacy_accountant
    except ImportError as error:
        raise ImportError(
            'differential privacy needs the extra: pip install "dure[privacy]"'
        ) from error
    least, _ = rdp_privacy_accountant.compute_epsilon(
        np.array(ORDERS, dtype=float), np.array(divergences), delta
    )
    return max(float(least), 0.0)


def against_server(plan: DistributedNoisePlan, times: int, delta: float) -> float:
    """Return epsilon against the server for a client that took part in `times` rounds."""
    return epsilon_of([times * one for one in divergences(plan)], delta)


def against_recipients(plan: DistributedNoisePlan, rate: float, times: int, delta: float) -> float:
    """Return epsilon against recipients of the models of `times` rounds at sampling rate `rate`."""
    return composed_epsilon(plan, [Releases(rate, plan.noise, times)], delta)


def composed_epsilon(plan: DistributedNoisePlan, spent: Sequence[Releases], delta: float) -> float:
    """Return epsilon of rounds with this plan's noise.

    The value also bounds rounds with more elements or fewer clients: their integers are larger, so
    that Skellam noise is closer to a Gaussian's.
    """
    whole = [0.0] * len(ORDERS)
    for rate, noise, times in spent:
        if rate and times:
            one = _sampled_of(replace(plan, noise=noise), rate)
            whole = [sum_ + times * more for sum_, more in zip(whole, one, strict=True)]
    return epsilon_of(whole, delta) if any(whole) else 0.0


@lru_cache(maxsize=64)
def _sampled_of(plan: DistributedNoisePlan, rate: float) -> tuple[float, ...]:
    def alone(order: int) -> float:
        return divergence(plan.variance, plan.l2, plan.l1, order)

    return tuple(sampled(rate, alone)) if plan.noise else (math.inf,) * len(ORDERS)


def noise_for(wanted: float, delta: float, rate: float, times: int, clients: int) -> float:
    """Return the least z with which recipients learn at most epsilon = `wanted` in `times` rounds.

    `clients` is the largest number of clients in a sum. Raises ValueError if no noise suffices.
    """

    return least_noise(
        wanted,
        lambda noise: against_recipients(account_plan(1.0, noise, clients), rate, times, delta),
    )


def account_plan(clip: float, noise: float, clients: int) -> DistributedNoisePlan:
    """Return a plan whose account bounds those of all rounds with at most `clients` clients."""
    return DistributedNoisePlan(1, clip, noise, clients, 1)
