"""Base class of partitions: a frozen dataclass that divides examples among clients.

A partition has a text form (`dure.settings`), such as `dirichlet:0.3`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, overload

import torch
from torch import Tensor

from dure.arguments import NamedSettings
from dure.data.examples import Examples
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


class ClientParts(Sequence[Tensor]):
    """The examples of each client, as a tensor of indices and the start of each client.

    A million clients are two tensors and a list. owners: the client of each example, int64 of shape
    (n,). The examples of a client are in ascending order.
    """

    def __init__(self, owners: Tensor, clients: int) -> None:
        self.owners = owners
        self.sizes = torch.bincount(owners, minlength=clients)
        # Stable, so that each client's examples are in ascending order.
        self._indices = owners.sort(stable=True).indices
        self._starts: list[int] = [0, *self.sizes.cumsum(0).tolist()]

    @classmethod
    def of(cls, parts: Sequence[Tensor]) -> ClientParts:
        """Return the parts for the examples of each client, which together are all of 0..n-1."""
        everything = torch.cat(list(parts))
        owners = torch.empty_like(everything)
        owners[everything] = torch.repeat_interleave(torch.tensor([len(part) for part in parts]))
        return cls(owners, len(parts))

    def __len__(self) -> int:
        return len(self._starts) - 1

    @overload
    def __getitem__(self, client: int) -> Tensor: ...

    @overload
    def __getitem__(self, client: slice) -> list[Tensor]: ...

    def __getitem__(self, client: int | slice) -> Tensor | list[Tensor]:
        if isinstance(client, slice):
            return [self[one] for one in range(*client.indices(len(self)))]
        starts = self._starts
        count = len(starts) - 1
        if not -count <= client < count:
            raise IndexError(f"there is no client {client}: there are {count} clients")
        client %= count
        return self._indices[starts[client] : starts[client + 1]]


def assign_parts(order: Tensor, owners: Tensor) -> Tensor:
    """Return the owner of each example.

    `order` is cut into parts that are equal to within 1; the k-th part belongs to `owners[k]`.
    """
    n = len(order)
    count = len(owners)
    sizes = torch.full((count,), n // count)
    sizes[: n % count] += 1
    dealt = torch.empty_like(order)
    dealt[order] = owners.repeat_interleave(sizes)
    return dealt
