"""What someone with data of its own trains on: a part of the data, over and over.

The data are divided once (`dure.data.partition`); each pass over a part has an order of its own. So
one alone has the batches of a single worker.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from dure.data.batches import Batches
from dure.data.examples import Examples
from dure.data.partition import Partition


@dataclass(frozen=True)
class OwnPart:
    """Someone's examples."""

    indices: Tensor
    batches: Batches

    def at(self, step: int) -> Tensor:
        """The indices of the examples of a step, int64."""
        return self.indices[self.batches.at(step)]


def divide(
    partition: Partition,
    owners: int,
    examples: Examples,
    batch_size: int | None,
    seed: int,
    joins: bool,
) -> Sequence[OwnPart]:
    """The part of each owner, the same wherever it is asked for.

    batch_size: of a step; None is all of a part. joins: as in `batches_per_epoch`.
    """
    parts = partition.divide(owners, len(examples), examples.labels(), examples.keys, seed=seed)
    return [
        OwnPart(part, Batches(len(part), batch_size, seed, number, joins))
        for number, part in enumerate(parts)
    ]
