"""The result of a partition: the examples of each client, as values."""

from __future__ import annotations

from collections.abc import Sequence
from typing import overload

import torch
from torch import Tensor


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
