"""Sorted by label, cut into s * clients shards that are equal to within 1, s a client.

Source: H. B. McMahan et al., AISTATS 2017, section 3 (MNIST: 200 shards of 300, two a client).
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import ClassVar

import torch

from dure.arguments import at_least
from dure.data.examples import Examples
from dure.data.partition.partition import ClientParts, Partition, assign_parts, required_labels
from dure.randomness.seeds import generator


@dataclass(frozen=True)
class LabelShards(Partition):
    """Sorted by label and cut into equal shards, of which each client draws `per_client`.

    With two shards a client most clients have examples of two classes only.
    """

    name: ClassVar[str] = "label-shards"
    per_client: int = field(default=2, metadata=at_least(1))

    def _divide(self, clients: int, examples: Examples, seed: int) -> ClientParts:
        n = len(examples)
        count = self.per_client * clients
        if count > n:
            raise ValueError(
                f"{n} examples cannot be cut into {count} shards ({self.per_client} per client): "
                "use fewer clients or fewer shards per client"
            )
        by_label = required_labels(examples, self).sort(stable=True).indices
        drawn = torch.randperm(count, generator=generator(seed, "partition"))
        # The first `per_client` drawn shards are client 0's, and so on.
        owner_of_shard = torch.empty_like(drawn)
        owner_of_shard[drawn] = torch.arange(clients).repeat_interleave(self.per_client)
        return ClientParts(assign_parts(by_label, owner_of_shard), clients)

    @property
    def description(self) -> str:
        return f"label shards, {self.per_client} a client"
