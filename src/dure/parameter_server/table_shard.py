"""Shard of a table: rows in place of keys, otherwise an ordinary shard (`shard`).

A push covers all rows of the shard, and has the gradients of the touched rows, which may be none:
so clocks advance, and staleness, acknowledgements and copies work as in other shards.

    pull of n rows     8 n bytes there, dim · itemsize · n back
    push of n rows     (8 + dim · itemsize) n there
    for a list of rows that was sent before, 8 bytes replace its 8 n
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import msgspec
import torch
from torch import Tensor

from dure.parameter_server.digests import KnownRowLists
from dure.parameter_server.keys import KeyRange
from dure.parameter_server.messages import Pull, Push, ShardStep
from dure.parameter_server.shard import Asks, Shard, Terms, shares_of
from dure.parameter_server.tables import SparseRows, TableRows, joined


class TableShard(Shard):
    """Shard with the rows `keys`, whose `vector` is the number of the table in `terms.tables`."""

    def __init__(self, number: int, keys: KeyRange, terms: Terms) -> None:
        self._begin(number, keys, terms)
        self.table = TableRows(terms.tables[keys.vector], keys.start, keys.stop)
        self.lists = KnownRowLists()

    def full(self, message: Asks) -> Asks | None:
        if message.digest is None:
            if message.rows is not None:
                self.lists.keep(message.worker, message.rows)
            return message
        rows = self.lists.find(message.worker, message.digest)
        return None if rows is None else msgspec.structs.replace(message, rows=rows, digest=None)

    def _check_push(self, push: Push) -> None:
        self._check(push.start, self.keys.stop)
        if push.rows is None or push.gradient.shape != (len(push.rows), self.table.table.dim):
            raise ValueError(
                f"a push to shard {self.number} has to have rows of the table "
                f"{self.table.table.name} and a gradient of {self.table.table.dim} elements for "
                "each"
            )
        self.table.check(push.rows)

    def _joint(self, pushes: Sequence[Push]) -> tuple[Tensor, Tensor | None]:
        rows, gradient = joined([_rows(push) for push in pushes], shares_of(pushes))
        return gradient, rows

    def _move(self, step: ShardStep) -> int:
        assert step.rows is not None
        if step.moves:
            with torch.no_grad():
                self.table.push(step.rows, step.gradient, step.factor)
        return self.keys.stop

    def _read(self, pull: Pull) -> tuple[Tensor, Tensor | None]:
        if pull.rows is None:
            rows, values = self.table.changed
            return values.clone(), rows.clone()
        self.table.check(pull.rows)
        return self.table.pull(pull.rows), None

    def state(self) -> dict[str, Any]:
        return {
            "table": self.table.state(),
            "lists": self.lists.state(),
            "keys": [self.keys.vector, self.keys.start, self.keys.stop],
            "version": self.version,
            "clock": self.clock.state(),
        }

    @classmethod
    def of(cls, number: int, state: Mapping[str, Any], terms: Terms) -> TableShard:
        shard = cls(number, KeyRange(*state["keys"]), terms)
        shard.version = state["version"]
        shard.made = shard.version
        shard.clock.restore(state["clock"])
        shard.table.restore(state["table"])
        shard.lists.restore(state["lists"])
        return shard


def shard_of(number: int, state: Mapping[str, Any], terms: Terms) -> Shard:
    """Return a shard of keys or of a table from its `state`."""
    kind = TableShard if "table" in state else Shard
    return kind.of(number, state, terms)


def _rows(push: Push) -> SparseRows:
    assert push.rows is not None
    return SparseRows(push.rows, push.gradient)
