"""Random shares of each class: (p_1, ..., p_K) ~ Dirichlet(alpha, ..., alpha) over clients.

Sources: M. Yurochkin et al., "Bayesian Nonparametric Federated Learning of Neural Networks", ICML
2019; Q. Li et al., "Federated Learning on Non-IID Data Silos: An Experimental Study", ICDE 2022.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import ClassVar

import numpy as np
import torch
from torch import Tensor

from dure.arguments import above, at_least
from dure.data.examples import Examples
from dure.data.partition.partition import ClientParts, Partition, required_labels
from dure.data.partition.skew import shares, with_minimum
from dure.randomness.seeds import derive


@dataclass(frozen=True)
class Dirichlet(Partition):
    """The clients' shares of every class are drawn from a symmetric Dirichlet distribution.

    Args:
        alpha: small is skewed (0.1: a client has most of a few classes), large is even (100: like
            IID).
        minimum: least number of examples of a client.
    """

    name: ClassVar[str] = "dirichlet"
    alpha: float = field(default=0.5, metadata=above(0, finite=True))
    minimum: int = field(default=1, metadata=at_least(1))

    def _divide(self, clients: int, examples: Examples, seed: int) -> ClientParts:
        labels = required_labels(examples, self)
        random = np.random.default_rng(derive(seed, "partition"))
        # A generator of its own: rounding of shares must not change their draws.
        rounding = np.random.default_rng(derive(seed, "rounding of shares"))
        parts: list[list[Tensor]] = [[] for _ in range(clients)]
        # Class by class: each has shares of its own over all clients.
        for label in torch.unique(labels):
            members = (labels == label).nonzero().flatten()
            shuffled = members[torch.from_numpy(random.permutation(len(members)))]
            counts = _counts(shares(random, self.alpha, clients), len(members), rounding)
            for part, share in zip(parts, shuffled.split(counts), strict=True):
                part.append(share)
        return ClientParts.of(
            with_minimum([torch.cat(part) for part in parts], self.minimum, random)
        )

    @property
    def description(self) -> str:
        return f"label skew, Dirichlet({self.alpha:g})"


def _counts(shares: np.ndarray, n: int, random: np.random.Generator) -> list[int]:
    """Round `n` times the shares to whole numbers (systematic sampling).

    Each number is rounded up or down so that its expectation is exact. The choice is random in each
    call: otherwise the same clients would get the remainders of every class.
    """
    order = random.permutation(len(shares))
    ends = np.floor(shares[order].cumsum() / shares.sum() * n + random.random())
    # The sum of all shares may be rounded to slightly more or less than 1.
    ends[-1] = n
    counts = np.empty(len(shares), dtype=int)
    counts[order] = np.diff(np.minimum(ends, n), prepend=0)
    found: list[int] = counts.tolist()
    return found
