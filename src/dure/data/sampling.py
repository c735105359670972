"""Orders of an epoch, as the owner of the data may request them.

    shuffled     a permutation, drawn under the seed: the default
    in a row     the order of the data
    by weight    n draws of n examples, with replacement: example i with probability w_i / sum w

The draws of an epoch are a function of (seed, epoch, client), so that a resumed run draws the same.
By weight an epoch has n draws too, in which some examples occur twice and others not at all.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from functools import partial
from typing import Literal, get_args

import torch
from torch import Tensor

from dure.data.block_shuffling import Order
from dure.randomness.seeds import generator, shuffled

SamplingRequest = Literal["a stream", "a sampler with weights", "shuffle=False", "drop_last"]
"""Requests of the data's owner about batches, in words."""

JOINT_SAMPLING: frozenset[SamplingRequest] = frozenset(get_args(SamplingRequest))
"""Requests supported by a system that visits all data in joint batches: all of them."""

SEPARATE_SAMPLING: frozenset[SamplingRequest] = frozenset(
    {"a sampler with weights", "shuffle=False"}
)
"""Requests supported by clients or workers with parts of their own.

Each draws from its own examples, by their weights, as many as it has.
"""


@dataclass(frozen=True)
class Sampling:
    """Sampling of examples.

    Args:
        in_a_row: visit them in the order of the data.
        weights: weight of each example, float64 of shape (n,); None without weights.
        drop_last: an epoch ends before a last batch that is not full.
        batch_size: batch size set by the owner; None if not set.
    """

    in_a_row: bool = False
    weights: Tensor | None = field(default=None, compare=False)
    drop_last: bool = False
    batch_size: int | None = None

    @property
    def asks(self) -> frozenset[SamplingRequest]:
        """Requests that a system might not support."""
        asked: dict[SamplingRequest, bool] = {
            "a sampler with weights": self.weights is not None,
            "shuffle=False": self.in_a_row,
            "drop_last": self.drop_last,
        }
        return frozenset(way for way, there in asked.items() if there)

    def of(self, part: Tensor) -> Sampling:
        """Return the sampling of a part. Raises ValueError if no example has a weight above 0."""
        if self.weights is None:
            return self
        weights = self.weights[part]
        if not bool(weights.any()):
            raise ValueError(
                "none of the training examples of a rank or client has a weight above 0: change "
                "the weights, the partition, or the validation set"
            )
        return replace(self, weights=weights)

    def order(self, n: int, part: Tensor | None = None) -> Order:
        """Return the order, as `Examples.order`. n: number of all examples."""
        count = n if part is None else len(part)
        if self.weights is not None:
            own = self if part is None else self.of(part)
            assert own.weights is not None
            return partial(weighted_indices, own.weights)
        return partial(_in_a_row, count) if self.in_a_row else partial(shuffled, count)


SHUFFLED = Sampling()


def weighted_indices(weights: Tensor, seed: int, epoch: int, client: int) -> Tensor:
    """Draw as many indices as there are weights, with replacement, int64 of shape (n,)."""
    # By inversion of the cumulative weights: `multinomial` supports at most 2^24 weights.
    ends = weights.cumsum(0)
    own = generator(seed, "weighted", epoch, client)
    thrown = torch.rand(len(weights), dtype=torch.float64, generator=own) * ends[-1]
    # Rounding may give the end of the range, so clamp to the last example with a weight.
    last = int(weights.nonzero()[-1])
    return torch.searchsorted(ends, thrown, right=True).clamp(max=last)


def class_weights(labels: Tensor) -> Tensor:
    """Return a weight of each class, n / (classes · examples of the class), float32.

    With them in `cross_entropy` every class counts alike. labels: int64 of shape (n,), such as
    `Examples.labels()`. A class without examples has the weight 0.
    """
    counts = torch.bincount(labels.long())
    there = counts > 0
    shares = len(labels) / (int(there.sum()) * counts.clamp(min=1).double())
    return torch.where(there, shares, 0.0).float()


def _in_a_row(count: int, seed: int, epoch: int, client: int) -> Tensor:
    return torch.arange(count)
