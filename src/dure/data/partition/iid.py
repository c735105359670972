"""Every client has a random sample of all examples.

It is a random permutation, cut into parts that are equal to within one.

Source: H. B. McMahan et al., AISTATS 2017, section 3.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from dure.data.partition.partition import Partition
from dure.data.partition.parts import Parts, dealt
from dure.randomness.seeds import generator


@dataclass(frozen=True)
class IID(Partition):
    """Every client has a random sample of all, of equal size to within one."""

    name: ClassVar[str] = "iid"

    def _divide(
        self, clients: int, n: int, labels: Tensor | None, keys: Sequence[Any] | None, seed: int
    ) -> Parts:
        return Parts(
            dealt(torch.randperm(n, generator=generator(seed, "partition")), torch.arange(clients)),
            clients,
        )

    @property
    def description(self) -> str:
        return "IID, equal sizes"
