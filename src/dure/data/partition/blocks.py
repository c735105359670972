"""Consecutive examples stay together: n examples in their order, cut into s * clients blocks.

Consecutive examples often depend on each other: recordings of a person, frames of a film, days of a
season. A permutation hides that, and blocks preserve it: with a block for each client, client k has
the k-th stretch of time, and clients differ by any drift. The order is that of the data, so time
series are given in order of time.

Only the choice of a client's s blocks is random; for s = 1 nothing is.

Source: dure's own; P. Kairouz et al., "Advances and Open Problems in Federated Learning", 2021,
section 3.1, describe data that are not independent.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import ClassVar

import torch

from dure.arguments import at_least
from dure.data.examples import Examples
from dure.data.partition.partition import ClientParts, Partition, assign_parts
from dure.randomness.seeds import generator


@dataclass(frozen=True)
class Blocks(Partition):
    """Blocks of consecutive examples, equal to within 1; each client draws `per_client`."""

    name: ClassVar[str] = "blocks"
    per_client: int = field(default=1, metadata=at_least(1))

    def _divide(self, clients: int, examples: Examples, seed: int) -> ClientParts:
        n = len(examples)
        count = self.per_client * clients
        if count > n:
            raise ValueError(
                f"{n} examples cannot be cut into {count} blocks ({self.per_client} per client): "
                "use fewer clients or fewer blocks per client"
            )
        owners = torch.arange(clients)
        if self.per_client > 1:
            drawn = torch.randperm(count, generator=generator(seed, "partition"))
            # The first `per_client` drawn blocks are client 0's, and so on.
            owner_of_block = torch.empty_like(drawn)
            owner_of_block[drawn] = owners.repeat_interleave(self.per_client)
            owners = owner_of_block
        return ClientParts(assign_parts(torch.arange(n), owners), clients)

    @property
    def description(self) -> str:
        return f"blocks of consecutive examples, {self.per_client} a client"
