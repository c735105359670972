"""Poisson sampling: each of K clients independently, with probability q, in every round.

The sample of a round is stored (`Carrier.once`), so that a server that resumes from an earlier
state asks the same clients again. The draws use a secret key (`dure.randomness.secret`): if samples
can be guessed, differential privacy loses the amplification by sampling.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from dure.randomness.keystream import bernoulli_samples
from dure.randomness.secret import Secret

CarrierOnce = Callable[[str, Callable[[], dict[str, Any]]], dict[str, Any]]
"""Type of `Carrier.once`."""

PoissonSampler = Callable[[int], list[int]]
"""Number of a round -> its sampled clients, in ascending order."""


def poisson_sampler(secret: Secret, once: CarrierOnce, rate: float, clients: int) -> PoissonSampler:
    """Return the sampler of a run. rate: q; clients: K."""

    def sample_clients(number: int) -> list[int]:
        def make() -> dict[str, Any]:
            fell = bernoulli_samples(secret.key("coins", number), rate, clients)
            return {"clients": fell.nonzero().flatten().tolist()}

        chosen: list[int] = once(f"coins {number}", make)["clients"]
        return chosen

    return sample_clients
