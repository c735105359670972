"""In which order an epoch visits examples, where their owner says it.

    shuffled     a permutation, drawn under the seed: what nobody has to ask for
    in a row     as they lie
    by weight    n draws of n examples, with replacement: example i with probability w_i / sum w

The draws of an epoch are a function of (seed, epoch, client), so that a resumed run draws the same.
By weight an epoch has n examples too, of which some come twice and others not at all.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from functools import partial
from typing import Literal, get_args

import torch
from torch import Tensor

from dure.data.arrangement import Order
from dure.randomness.seeds import generator, shuffled

Way = Literal["a stream", "a sampler with weights", "shuffle=False", "drop_last"]
"""What the owner of data may ask of those who draw batches, in words."""

JOINTLY: frozenset[Way] = frozenset(get_args(Way))
"""Of a system that goes through all data in joint batches: it does all of them."""

APART: frozenset[Way] = frozenset({"a sampler with weights", "shuffle=False"})
"""Of clients or workers that go through parts of their own: each draws of its own examples, by the
weights of these, as many as it has."""


@dataclass(frozen=True)
class Sampling:
    """How examples are visited.

    in_a_row: as they lie. weights: of each example, float64 of shape (n,); None draws none.
    drop_last: an epoch ends before a last batch that is not full. batch_size: what their owner says
    that batches have; None where nothing is said.
    """

    in_a_row: bool = False
    weights: Tensor | None = field(default=None, compare=False)
    drop_last: bool = False
    batch_size: int | None = None

    @property
    def asks(self) -> frozenset[Way]:
        """What is asked that a system could do otherwise."""
        asked: dict[Way, bool] = {
            "a sampler with weights": self.weights is not None,
            "shuffle=False": self.in_a_row,
            "drop_last": self.drop_last,
        }
        return frozenset(way for way, there in asked.items() if there)

    def of(self, part: Tensor) -> Sampling:
        """The same of a part of the examples."""
        if self.weights is None:
            return self
        weights = self.weights[part]
        if not bool(weights.any()):
            raise ValueError(
                "none of the examples that are left to train on, to one who has them alone, has a "
                "weight above 0: give weights, a partition, or a validation set that leave some"
            )
        return replace(self, weights=weights)

    def order(self, n: int, part: Tensor | None = None) -> Order:
        """As `Examples.order`. n: of all examples."""
        count = n if part is None else len(part)
        if self.weights is not None:
            own = self if part is None else self.of(part)
            assert own.weights is not None
            return partial(drawn, own.weights)
        return partial(_in_a_row, count) if self.in_a_row else partial(shuffled, count)


SHUFFLED = Sampling()


def drawn(weights: Tensor, seed: int, epoch: int, client: int) -> Tensor:
    """As many draws as there are weights, with replacement, int64 of shape (n,)."""
    # Places in the row of all weights: `multinomial` takes 2^24 at the most.
    ends = weights.cumsum(0)
    own = generator(seed, "weighted", epoch, client)
    thrown = torch.rand(len(weights), dtype=torch.float64, generator=own) * ends[-1]
    # Rounding may throw the end of all, which is nobody's.
    last = int(weights.nonzero()[-1])
    return torch.searchsorted(ends, thrown, right=True).clamp(max=last)


def class_weights(labels: Tensor) -> Tensor:
    """A weight of each class, n / (classes · examples of the class), float32.

    With them in `cross_entropy` every class counts alike. labels: int64 of shape (n,), such as
    `Examples.labels()`. A class that has no example has the weight 0.
    """
    counts = torch.bincount(labels.long())
    there = counts > 0
    shares = len(labels) / (int(there.sum()) * counts.clamp(min=1).double())
    return torch.where(there, shares, 0.0).float()


def _in_a_row(count: int, seed: int, epoch: int, client: int) -> Tensor:
    return torch.arange(count)
