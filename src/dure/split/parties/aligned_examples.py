"""Examples of a participant, for the people whom all parties know, in the common order."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_map

from dure.data.examples import Examples
from dure.machine.devices import CPU, is_cpu, to_device
from dure.randomness.seeds import seed_generators
from dure.split.parties.model import Columns, select
from dure.split.parties.party import Read


class AlignedExamples:
    """Examples of a party, or of the holder of the labels.

    rows: the row in `examples` of each person whom all know. seed: seed of the transforms of a
    dataset. device: on which batches are read.
    """

    def __init__(
        self, examples: Examples, rows: Tensor, seed: int, device: torch.device = CPU
    ) -> None:
        self.examples = examples
        self.rows = rows
        self.seed = seed
        self.device = device

    def reader(self, columns: Columns) -> Read:
        """Return a function that reads these columns of given people."""
        if type(self.examples) is Examples:
            # Select once: the party needs no other columns or rows.
            own = select(self.examples.inputs, columns)[self.rows]
            return lambda people, step: own.index_select(0, people).to(self.device)

        def read(people: Tensor, step: int) -> Tensor:
            inputs, _ = self._batch(self.rows[people], step)
            return select(inputs, columns).contiguous().to(self.device)

        return read

    def targets(self, people: Tensor, step: int) -> Any:
        """Return the targets of these people."""
        found = self._targets(self.rows[people], step)
        return found if is_cpu(self.device) else to_device(found, self.device)

    def _targets(self, rows: Tensor, step: int) -> Any:
        if type(self.examples) is Examples:
            return tree_map(lambda leaf: leaf.index_select(0, rows), self.examples.targets)
        return self._batch(rows, step)[1]

    def _batch(self, rows: Tensor, step: int) -> tuple[Any, Any]:
        seed_generators(self.seed, "step", step, 0, everything=True)
        return self.examples.batch(rows)
