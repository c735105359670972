"""Every client has a random sample of all examples.

A random permutation, cut into parts that are equal to within 1.

Source: H. B. McMahan et al., AISTATS 2017, section 3.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch

from dure.data.examples import Examples
from dure.data.partition.partition import ClientParts, Partition, assign_parts
from dure.randomness.seeds import generator


@dataclass(frozen=True)
class IID(Partition):
    """Every client has a random sample of all, of equal size to within 1."""

    name: ClassVar[str] = "iid"

    def _divide(self, clients: int, examples: Examples, seed: int) -> ClientParts:
        n = len(examples)
        return ClientParts(
            assign_parts(
                torch.randperm(n, generator=generator(seed, "partition")), torch.arange(clients)
            ),
            clients,
        )

    @property
    def description(self) -> str:
        return "IID, equal sizes"
