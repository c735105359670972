"""What a partition is: a frozen dataclass that divides examples among clients.

It has a text form (`dure.settings`), such as `dirichlet:0.3`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from dure.arguments import Told
from dure.data.examples import Examples
from dure.data.partition.parts import Parts
from dure.settings import write


@dataclass(frozen=True)
class Partition(Told):
    """What all partitions have in common: a name, a text form, and `divide`."""

    name: ClassVar[str]
    clients_by_default: ClassVar[int | None] = 10
    """How many clients there are where nobody says it; None where the data say it."""

    def divide(self, clients: int | None, examples: Examples, seed: int = 0) -> Parts:
        """One sorted int64 tensor of indices into 0..n-1 for each client.

        clients: how many; None only where the data say it (`NaturalKey`).
        examples: n of them, of which a partition looks at labels, keys or inputs.

        Raises ValueError if the examples are too few, or have not the labels, keys or inputs that
        are needed.
        """
        n = len(examples)
        if clients is None:
            raise ValueError(f"how many clients? the partition {self} does not say it")
        if clients < 1:
            raise ValueError(f"the number of clients has to be at least 1, not {clients}")
        if clients > n:
            raise ValueError(f"{clients} clients cannot share {n} examples: each needs one")
        # A single client needs no labels or keys, and nothing is drawn for it.
        if clients == 1:
            return Parts(torch.zeros(n, dtype=torch.int64), 1)
        return self._divide(clients, examples, seed)

    def _divide(self, clients: int, examples: Examples, seed: int) -> Parts:
        """`divide` for at least two clients and as many examples."""
        raise NotImplementedError

    def divide_test(
        self, clients: int | None, keys: Sequence[Any] | None, test_keys: Sequence[Any] | None
    ) -> list[Tensor] | None:
        """The test examples of each client, as ascending indices; a client may have none.

        keys, test_keys: of the training and the test data. None where the partition does not say
        whose a test example is.
        """
        return None

    def names(self, clients: int | None, keys: Sequence[Any] | None) -> list[str] | None:
        """What the clients are called, in their order; None where they are numbers alone."""
        return None

    @property
    def description(self) -> str:
        """The partition in words, as reports show it."""
        raise NotImplementedError

    def __str__(self) -> str:
        """The text that `parse` reads: the name and the fields, less defaults at the end."""
        return write(self)


def needed(examples: Examples, partition: Partition) -> Tensor:
    """The labels. Raises ValueError where there are none."""
    labels = examples.labels()
    if labels is None:
        raise ValueError(
            f"the partition {partition} needs one class label an example, which these data have "
            f"not: take iid, quantity-skew, feature-skew, blocks or natural-key"
        )
    return labels
