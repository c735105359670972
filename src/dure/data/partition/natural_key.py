"""A client is a hospital, a speaking role, ..., in the order of their sorted names."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from dure.data.partition.partition import Partition
from dure.data.partition.parts import Parts


@dataclass(frozen=True)
class NaturalKey(Partition):
    """One client for each key, client k that of `sorted(set(keys))[k]`.

    A single client has all the data.
    """

    name: ClassVar[str] = "natural-key"

    def divide(
        self,
        clients: int | None,
        n: int,
        labels: Tensor | None = None,
        keys: Sequence[str] | None = None,
        seed: int = 0,
    ) -> Parts:
        """As `Partition.divide`; clients None means as many as there are keys."""
        if clients is None:
            clients = len(set(_keys(keys, n)))
        return super().divide(clients, n, labels=labels, keys=keys, seed=seed)

    def _divide(
        self, clients: int, n: int, labels: Tensor | None, keys: Sequence[str] | None, seed: int
    ) -> Parts:
        keys = _keys(keys, n)
        # By name and not by first appearance: every order of the examples gives the same clients.
        names = sorted(set(keys))
        if clients != len(names):
            some = ", ".join(names[:5]) + (", ..." if len(names) > 5 else "")
            raise ValueError(
                f"the data have {len(names)} natural clients ({some}), not {clients}: "
                f"leave the number of clients out, or give {len(names)}"
            )
        number = {name: client for client, name in enumerate(names)}
        return Parts(torch.tensor([number[key] for key in keys]), clients)

    @property
    def description(self) -> str:
        return "natural clients, by key"


def _keys(keys: Sequence[str] | None, n: int) -> Sequence[str]:
    if keys is None:
        raise ValueError(
            "the partition natural-key needs a key for each example, which these data have not"
        )
    if len(keys) != n:
        raise ValueError(f"there are {len(keys)} keys for {n} examples")
    return keys
