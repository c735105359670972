"""Plan of a vertical split learning run, before any node exists."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from dure.data.examples import Examples
from dure.data.keys import owners_of
from dure.randomness.seeds import generator
from dure.split.leakage import Defence, NoDefence
from dure.split.messages import SERVER
from dure.split.parties.messages import party
from dure.split.parties.model import Columns


@dataclass(frozen=True)
class VerticalPlan:
    """Settings of a run; the fields are those of `VerticalSplit`, with features as columns."""

    features: tuple[Columns, ...]
    parties: int | None
    batch_size: int | None
    label_party: int | None
    align: bool
    id_column: int | None
    missing: float
    defence: Defence = field(default_factory=NoDefence)
    measure_leaks: bool = False

    @property
    def holder(self) -> str:
        """Name of the holder of the labels."""
        return SERVER if self.label_party is None else party(self.label_party)

    def others(self, parties: int) -> list[int]:
        """Return the numbers of the parties without labels, out of `parties` parties."""
        return [number for number in range(parties) if number != self.label_party]

    def known(self, number: int, people: int, seed: int) -> Tensor:
        """Return the people whom a participant knows, as rows of the task's data in its own order.

        number: of a party, or the number of parties for the server.
        """
        lost = round(self.missing * people)
        order = torch.randperm(people, generator=generator(seed, "people", number))
        return order[lost:]

    def secret(self, number: int, seed: int) -> bytes:
        """Return the 32-byte alignment secret of a participant, derived from the run's seed."""
        drawn = torch.randint(256, (32,), generator=generator(seed, "secret", number))
        return bytes(drawn.tolist())


def ids_of(examples: Examples, id_column: int | None) -> Sequence[Any]:
    """Return the id of each person.

    Raises ValueError if there are no ids, or if two people have the same id.
    """
    if id_column is not None:
        column = _column(examples, id_column)
        if column.is_floating_point() and not bool((column == column.round()).all()):
            raise ValueError(f"column {id_column} has fractions: ids have to be integers")
        ids: Sequence[Any] = column.long().tolist()
        where = f"the numbers of column {id_column}"
    elif examples.keys is not None:
        ids = examples.keys
        where = "the keys of the task"
    else:
        raise ValueError(
            "alignment needs ids of people: give the task keys, one for each person, or set "
            "id_column to the column of the inputs with their ids"
        )
    people = len(owners_of(ids))
    if people < len(ids):
        raise ValueError(
            f"{where} name {people} people, but there are {len(ids)} examples: for alignment each "
            "example needs a unique id"
        )
    return ids


def _column(examples: Examples, number: int) -> Tensor:
    inputs, _ = examples.batch(torch.arange(len(examples)))
    if not isinstance(inputs, Tensor) or inputs.ndim != 2 or not 0 <= number < inputs.shape[1]:
        raise ValueError(
            f"id_column is {number}, but inputs are not a tensor of shape (n, columns) with this "
            "column"
        )
    return inputs[:, number]
