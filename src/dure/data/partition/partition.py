"""The base class of partitions: a frozen dataclass that divides examples among clients.

It has a text form (`dure.settings`), such as `dirichlet:0.3`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from dure.arguments import NamedSettings
from dure.data.examples import Examples
from dure.data.partition.parts import ClientParts
from dure.settings import write


@dataclass(frozen=True)
class Partition(NamedSettings):
    """Base of all partitions: a name, a text form, and `divide`."""

    clients_by_default: ClassVar[int | None] = 10
    """Default number of clients; None if the data determine it."""

    def divide(self, clients: int | None, examples: Examples, seed: int = 0) -> ClientParts:
        """Return a sorted int64 tensor of indices into 0..n-1 for each client.

        clients: number of clients; None only if the data determine it (`NaturalKey`). examples: n
        examples, of which a partition uses labels, keys or inputs.

        Raises ValueError if the examples are too few, or lack the needed labels, keys or inputs.
        """
        n = len(examples)
        if clients is None:
            raise ValueError(f"give the number of clients: the partition {self} does not define it")
        if clients < 1:
            raise ValueError(f"the number of clients has to be at least 1, not {clients}")
        if clients > n:
            raise ValueError(
                f"{clients} clients cannot share {n} examples: each needs at least one"
            )
        # A single client needs no labels or keys, and no random draws.
        if clients == 1:
            return ClientParts(torch.zeros(n, dtype=torch.int64), 1)
        return self._divide(clients, examples, seed)

    def _divide(self, clients: int, examples: Examples, seed: int) -> ClientParts:
        """Implement `divide` for at least two clients and as many examples."""
        raise NotImplementedError

    def divide_test(
        self, clients: int | None, keys: Sequence[Any] | None, test_keys: Sequence[Any] | None
    ) -> list[Tensor] | None:
        """Return each client's test examples, as ascending indices; a client may have none.

        keys, test_keys: of the training and the test data. None if the partition does not assign
        test examples.
        """
        return None

    def names(self, clients: int | None, keys: Sequence[Any] | None) -> list[str] | None:
        """Return the clients' names, in their order; None if the clients are only numbered."""
        return None

    @property
    def description(self) -> str:
        """The partition in words, for reports."""
        raise NotImplementedError

    def __str__(self) -> str:
        """Return the text for `parse`: the name and the fields, without defaults at the end."""
        return write(self)


def required_labels(examples: Examples, partition: Partition) -> Tensor:
    """Return the labels. Raises ValueError without labels."""
    labels = examples.labels()
    if labels is None:
        raise ValueError(
            f"the partition {partition} needs one class label per example, which these data do "
            "not have: use iid, quantity-skew, feature-skew, blocks or natural-key"
        )
    return labels
