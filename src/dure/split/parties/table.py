"""The examples that somebody has, of the people whom all parties know, in the order for all."""

from __future__ import annotations

from typing import Any

from torch import Tensor
from torch.utils._pytree import tree_map

from dure.data.examples import Examples
from dure.randomness.seeds import seed_generators
from dure.split.parties.model import Columns, select
from dure.split.parties.party import Read


class Table:
    """Of one party, or of the holder of the labels.

    rows: the row in `examples` of each person that all know. seed: from which transforms of a
    dataset draw what they draw for one worker.
    """

    def __init__(self, examples: Examples, rows: Tensor, seed: int) -> None:
        self.examples = examples
        self.rows = rows
        self.seed = seed

    def reader(self, columns: Columns) -> Read:
        """Reads these columns of some people."""
        if type(self.examples) is Examples:
            # All that a party ever has.
            own = select(self.examples.inputs, columns)[self.rows]
            return lambda people, step: own.index_select(0, people)

        def read(people: Tensor, step: int) -> Tensor:
            inputs, _ = self._batch(self.rows[people], step)
            return select(inputs, columns).contiguous()

        return read

    def targets(self, people: Tensor, step: int) -> Any:
        """The targets of some people."""
        rows = self.rows[people]
        if type(self.examples) is Examples:
            return tree_map(lambda leaf: leaf.index_select(0, rows), self.examples.targets)
        return self._batch(rows, step)[1]

    def _batch(self, rows: Tensor, step: int) -> tuple[Any, Any]:
        seed_generators(self.seed, "step", step, 0, everything=True)
        return self.examples.batch(rows)
