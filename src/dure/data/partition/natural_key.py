"""A client is a hospital, a speaking role, ..., in the order of their sorted names."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from dure.data.examples import Examples
from dure.data.keys import keys_of, name_of, owners_of
from dure.data.partition.partition import ClientParts, Partition


@dataclass(frozen=True)
class NaturalKey(Partition):
    """A client for each key; client k has the key `sorted(set(keys))[k]`.

    A single client has all the data.
    """

    name: ClassVar[str] = "natural-key"
    clients_by_default: ClassVar[int | None] = None

    def names(self, clients: int | None, keys: Sequence[Any] | None) -> list[str] | None:
        if keys is None:
            return None
        found = list(map(name_of, owners_of(keys_of(keys))))
        # A single client with the data of all owners has no owner's name.
        return found if clients in (None, len(found)) else None

    def divide_test(
        self, clients: int | None, keys: Sequence[Any] | None, test_keys: Sequence[Any] | None
    ) -> list[Tensor] | None:
        """Return each client's test examples by key, as `Partition.divide_test`.

        Test examples with a key of no client are left out (`unowned_keys`).
        """
        if keys is None or test_keys is None or self.names(clients, keys) is None:
            return None
        owners = owners_of(keys_of(keys))
        number = {key: client for client, key in enumerate(owners)}
        # Test examples of no client get the number 0, and are left out.
        whose = torch.tensor([number.get(key, -1) for key in keys_of(test_keys)]) + 1
        return ClientParts(whose, len(owners) + 1)[1:]

    def divide(self, clients: int | None, examples: Examples, seed: int = 0) -> ClientParts:
        """Divide by key, as `Partition.divide`; clients None means as many as there are keys."""
        if clients is None:
            clients = len(owners_of(_keys(examples)))
        return super().divide(clients, examples, seed)

    def _divide(self, clients: int, examples: Examples, seed: int) -> ClientParts:
        keys = _keys(examples)
        # By name and not by first appearance: every order of the examples gives the same clients.
        owners = owners_of(keys)
        if clients != len(owners):
            some = ", ".join(map(name_of, owners[:5])) + (", ..." if len(owners) > 5 else "")
            raise ValueError(
                f"the data have {len(owners)} natural clients ({some}), not {clients}: give "
                f"clients=None, one client per key (--clients None), or {len(owners)}"
            )
        number = {key: client for client, key in enumerate(owners)}
        return ClientParts(torch.tensor([number[key] for key in keys]), clients)

    @property
    def description(self) -> str:
        return "natural clients, by key"


def unowned_keys(keys: Sequence[Any], test_keys: Sequence[Any]) -> list[Any]:
    """Return the keys of test examples that no client has, in order.

    Raises ValueError for invalid test keys.
    """
    known = set(keys_of(keys))
    return [key for key in owners_of(keys_of(test_keys)) if key not in known]


def _keys(examples: Examples) -> list[Any]:
    if examples.keys is None:
        raise ValueError(
            "the partition natural-key needs a key for each example, which these data do not "
            "have: give dure.Examples(inputs, targets, keys=...)"
        )
    return keys_of(examples.keys)
