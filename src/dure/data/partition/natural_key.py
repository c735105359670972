"""A client is a hospital, a speaking role, ..., in the order of their sorted names."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from dure.data.examples import Examples
from dure.data.keys import keys_of, name_of, owners_of
from dure.data.partition.partition import Partition
from dure.data.partition.parts import Parts


@dataclass(frozen=True)
class NaturalKey(Partition):
    """One client for each key, client k that of `sorted(set(keys))[k]`.

    A single client has all the data.
    """

    name: ClassVar[str] = "natural-key"
    clients_by_default: ClassVar[int | None] = None

    def names(self, clients: int | None, keys: Sequence[Any] | None) -> list[str] | None:
        if keys is None:
            return None
        found = list(map(name_of, owners_of(keys_of(keys))))
        # A single client that has the data of all is none of them.
        return found if clients in (None, len(found)) else None

    def divide_test(
        self, clients: int | None, keys: Sequence[Any] | None, test_keys: Sequence[Any] | None
    ) -> list[Tensor] | None:
        """As `Partition.divide_test`: those that carry the client's key.

        Test examples with a key that no client has are nobody's (`strangers`).
        """
        if keys is None or test_keys is None or self.names(clients, keys) is None:
            return None
        owners = owners_of(keys_of(keys))
        number = {key: client for client, key in enumerate(owners)}
        # Those of nobody come first, and are left out.
        whose = torch.tensor([number.get(key, -1) for key in keys_of(test_keys)]) + 1
        return Parts(whose, len(owners) + 1)[1:]

    def divide(self, clients: int | None, examples: Examples, seed: int = 0) -> Parts:
        """As `Partition.divide`; clients None means as many as there are keys."""
        if clients is None:
            clients = len(owners_of(_keys(examples)))
        return super().divide(clients, examples, seed)

    def _divide(self, clients: int, examples: Examples, seed: int) -> Parts:
        keys = _keys(examples)
        # By name and not by first appearance: every order of the examples gives the same clients.
        owners = owners_of(keys)
        if clients != len(owners):
            some = ", ".join(map(name_of, owners[:5])) + (", ..." if len(owners) > 5 else "")
            raise ValueError(
                f"the data have {len(owners)} natural clients ({some}), not {clients}: "
                f"give clients=None, which is one a key (--clients None), or {len(owners)}"
            )
        number = {key: client for client, key in enumerate(owners)}
        return Parts(torch.tensor([number[key] for key in keys]), clients)

    @property
    def description(self) -> str:
        return "natural clients, by key"


def strangers(keys: Sequence[Any], test_keys: Sequence[Any]) -> list[Any]:
    """The keys of test examples that no client has, in order.

    Raises ValueError for test keys that name nobody, or are not alike.
    """
    known = set(keys_of(keys))
    return [key for key in owners_of(keys_of(test_keys)) if key not in known]


def _keys(examples: Examples) -> list[Any]:
    if examples.keys is None:
        raise ValueError(
            "the partition natural-key needs a key for each example, which these data have not: "
            "give dure.Examples(inputs, targets, keys=...)"
        )
    return keys_of(examples.keys)
