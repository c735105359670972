"""The training data of a client with data of its own: a part of the data, over and over.

The data are divided once (`dure.data.partition`); each pass over a part has an order of its own. A
single client has the batches of a single worker. A share of the examples can be held out, to
measure models with.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import repeat
from typing import Literal

import torch
from torch import Tensor

from dure.data.batches import Batches
from dure.data.examples import Examples
from dure.data.partition import Partition
from dure.randomness.seeds import generator

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


HeldOutOrder = Literal["random", "newest"]
"""Choice of the held-out examples of a client: random, or its last."""


def split_held_out(
    parts: Sequence[Tensor], share: float, seed: int, which: HeldOutOrder = "random"
) -> tuple[Sequence[Tensor], Sequence[Tensor]]:
    """Return (training indices, held-out indices) of each client. parts: indices of each client.

    A client holds out the end of a random order, or of the order of its data; a client with a
    single example trains on it. Without a share, the second result is empty.
    """
    if not share:
        return parts, []
    own = []
    kept = []
    for client, part in enumerate(parts):
        # A client on another machine has no examples here.
        if not len(part):
            own.append(part)
            kept.append(part)
            continue
        # At least one example to measure with, and at least one to train on, which has priority.
        count = min(max(round(share * len(part)), 1), len(part) - 1)
        if which == "newest":
            order = torch.arange(len(part))
        else:
            order = torch.randperm(len(part), generator=generator(seed, "held out", client))
        # Sorted: the choice of held-out examples is random, but the remaining examples keep the
        # order of the data, which arrival depends on.
        own.append(part[order[: len(part) - count].sort().values])
        kept.append(part[order[len(part) - count :].sort().values])
    return own, kept
