"""The training data of a client with data of its own: a part of the data, over and over.

The data are divided once (`dure.data.partition`); each pass over a part has an order of its own. A
single client has the batches of a single worker.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import repeat

import torch
from torch import Tensor

from dure.data.batches import Batches
from dure.data.client_holdout import split_held_out
from dure.data.examples import Examples
from dure.data.partition import Partition

NOTHING = torch.empty(0, dtype=torch.int64)


@dataclass(frozen=True)
class ClientExamples:
    """A client's examples. held_out: indices of its examples for measuring; may be empty."""

    indices: Tensor
    batches: Batches
    held_out: Tensor

    def at(self, step: int) -> Tensor:
        """Return the indices of the examples of a step, int64."""
        return self.indices[self.batches.at(step)]


def divide(
    partition: Partition,
    owners: int,
    examples: Examples,
    batch_size: int | None,
    seed: int,
    joins: bool,
    held_out: float = 0.0,
) -> Sequence[ClientExamples]:
    """Return the part of each owner, the same in every process.

    Args:
        partition: division of the examples.
        owners: number of owners.
        examples: examples to divide.
        batch_size: examples of a step; None takes all of a part.
        seed: seed of the division and the orders.
        joins: as in `batches_per_epoch`.
        held_out: share of each part that is not trained on.
    """
    parts = partition.divide(owners, examples, seed)
    own, kept = split_held_out(parts, held_out, seed)
    return [
        ClientExamples(
            part, Batches(len(part), batch_size, seed, number, joins, examples.order(part)), rest
        )
        for number, (part, rest) in enumerate(zip(own, kept or repeat(NOTHING), strict=False))
    ]
