"""IID in the labels, with random sizes: (q_1, ..., q_K) ~ Dirichlet(alpha, ..., alpha).

Source: Q. Li et al., "Federated Learning on Non-IID Data Silos: An Experimental Study", ICDE 2022.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import ClassVar

import numpy as np
import torch
from torch import Tensor

from dure.arguments import above, at_least
from dure.data.examples import Examples
from dure.data.partition.partition import ClientParts, Partition
from dure.data.partition.skew import shares, with_minimum
from dure.randomness.seeds import derive


@dataclass(frozen=True)
class QuantitySkew(Partition):
    """The clients' sizes are drawn from a symmetric Dirichlet distribution, the labels are IID.

    Args:
        alpha: small is skewed (one client has most), large is even.
        minimum: least number of examples of a client.
    """

    name: ClassVar[str] = "quantity-skew"
    alpha: float = field(default=0.5, metadata=above(0, finite=True))
    minimum: int = field(default=1, metadata=at_least(1))

    def _divide(self, clients: int, examples: Examples, seed: int) -> ClientParts:
        random = np.random.default_rng(derive(seed, "partition"))
        shuffled = torch.from_numpy(random.permutation(len(examples)))
        return ClientParts.of(
            with_minimum(_cut(shuffled, shares(random, self.alpha, clients)), self.minimum, random)
        )

    @property
    def description(self) -> str:
        return f"quantity skew, Dirichlet({self.alpha:g})"


def _cut(indices: Tensor, shares: np.ndarray) -> list[Tensor]:
    """Cut `indices` into consecutive parts with these shares of its length."""
    ends = np.rint(shares.cumsum()[:-1] * len(indices)).astype(int)
    return list(indices.tensor_split(ends.tolist()))
