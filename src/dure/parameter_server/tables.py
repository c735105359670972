"""Tables: rows of embeddings, of which a step reads and changes only a few.

A server has a range of a table's rows, and memory for the changed rows:

    index    position of a row in the memory, 4 bytes for each row of the range
    memory   values and optimizer state, for each changed row

An unchanged row has its initial values (`EmbeddingTable.first`), which are computed at each read;
so reading changes nothing, and a table may be larger than a machine's memory. (The index is zeros,
for which the operating system allocates memory only at writes.)

    push(rows, g)    gradients of repeated rows are summed first
        SGD          w <- w - lr · g
        Adagrad      s <- s + g²;  w <- w - lr/(1 + (t - 1) · decay) · g / (sqrt(s) + eps)
        Adam         m <- m + (1 - b1)(g - m);  v <- v + (1 - b2)(g² - v)
                     w <- w - lr · sqrt(1 - b2^t)/(1 - b1^t) · m / (sqrt(v) + eps)

t counts the updates of the table, including those without these rows. With SGD and Adagrad a row
without a gradient stays unchanged, so a table equals the dense parameter. Adam is the lazy form of
`torch.optim.SparseAdam`: moments of rows without a gradient stay unchanged. Settings that move rows
without a gradient (momentum, weight decay) raise an error.

Source: Li et al. 2014, "Scaling Distributed Machine Learning with the Parameter Server".
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import numpy
import torch
from torch import Tensor
from torch.optim import Optimizer

_MOST = 2**31 - 2
"""Largest number of rows in a range: the index has 32 bits."""


class SparseRows(NamedTuple):
    """Rows of a table with their values.

    Args:
        rows: row numbers, int64 of shape (n,).
        values: weights or gradients, of shape (n, dim).
    """

    rows: Tensor
    values: Tensor


class RowRule(Protocol):
    """Update rule of rows. `memories` are the initial values of an element's optimizer state."""

    @property
    def memories(self) -> tuple[float, ...]: ...

    def step(
        self,
        weights: Tensor,
        gradient: Tensor,
        memories: Sequence[Tensor],
        number: int,
        factor: float,
    ) -> None:
        """Change weights and memories of rows in place.

        All have shape (rows, dim). `number` is that of the table's update, from 1. `factor`
        multiplies the learning rate.
        """


@dataclass(frozen=True)
class Sgd:
    """Plain stochastic gradient descent."""

    lr: float
    memories: tuple[float, ...] = ()

    def step(
        self,
        weights: Tensor,
        gradient: Tensor,
        memories: Sequence[Tensor],
        number: int,
        factor: float,
    ) -> None:
        weights.add_(gradient, alpha=-self.lr * factor)


@dataclass(frozen=True)
class Adagrad:
    """Adagrad of Duchi, Hazan and Singer 2011, as in torch.optim.Adagrad.

    The memory of an element is the sum of its squared gradients.
    """

    lr: float
    lr_decay: float
    eps: float
    memories: tuple[float, ...]

    def step(
        self,
        weights: Tensor,
        gradient: Tensor,
        memories: Sequence[Tensor],
        number: int,
        factor: float,
    ) -> None:
        (squares,) = memories
        squares.addcmul_(gradient, gradient)
        rate = self.lr * factor / (1 + (number - 1) * self.lr_decay)
        weights.addcdiv_(gradient, squares.sqrt().add_(self.eps), value=-rate)


@dataclass(frozen=True)
class LazyAdam:
    """Adam of Kingma and Ba 2015, as in torch.optim.SparseAdam. The memories are both moments."""

    lr: float
    betas: tuple[float, float]
    eps: float
    memories: tuple[float, ...] = (0.0, 0.0)

    def step(
        self,
        weights: Tensor,
        gradient: Tensor,
        memories: Sequence[Tensor],
        number: int,
        factor: float,
    ) -> None:
        mean, square = memories
        first, second = self.betas
        mean.add_((gradient - mean).mul_(1 - first))
        square.add_(gradient.square().sub_(square).mul_(1 - second))
        rate = self.lr * factor * (1 - second**number) ** 0.5 / (1 - first**number)
        weights.add_((mean / square.sqrt().add_(self.eps)).mul_(-rate))


def rule_of(kind: type[Optimizer], settings: Mapping[str, Any], name: str) -> RowRule:
    """Return the update rule of an optimizer with a group's settings, for the table `name`.

    Raises ValueError for an optimizer that cannot update rows separately.
    """
    number = next((key for key, value in settings.items() if isinstance(value, Tensor)), None)
    if number is not None:
        raise ValueError(f"{kind.__name__}({number}=...) has to be a number, not a tensor")
    for key in ("momentum", "weight_decay", "amsgrad", "maximize"):
        if settings.get(key):
            raise ValueError(
                f"{kind.__name__} has {key}={settings[key]}, which the table {name} does not "
                "support: leave it out for sparse embeddings, or use sparse=False"
            )
    if kind is torch.optim.SGD:
        return Sgd(settings["lr"])
    if kind is torch.optim.Adagrad:
        begin = float(settings["initial_accumulator_value"])
        return Adagrad(settings["lr"], settings["lr_decay"], settings["eps"], (begin,))
    if kind in (torch.optim.Adam, torch.optim.SparseAdam):
        return LazyAdam(settings["lr"], tuple(settings["betas"]), settings["eps"])
    raise ValueError(
        f"{kind.__name__} does not support sparse rows, such as those of the table {name}: choose "
        "SGD, Adagrad or Adam (as SparseAdam), or use sparse=False"
    )


@dataclass(frozen=True)
class EmbeddingTable:
    """Description of a table.

    Args:
        name: name of the embedding's weight in the model.
        rows: number of rows.
        dim: length of a row.
        dtype: dtype of the weights.
        rule: update rule.
        first: function from row numbers to initial values, a new tensor of shape (n, dim).
    """

    name: str
    rows: int
    dim: int
    dtype: torch.dtype
    rule: RowRule
    first: Callable[[Tensor], Tensor]


class TableRows:
    """Rows start … stop-1 of a table."""

    def __init__(self, table: EmbeddingTable, start: int, stop: int) -> None:
        if stop - start > _MOST:
            raise ValueError(
                f"the table {table.name} has {stop - start} rows at one server, which can have "
                f"{_MOST}: use more servers"
            )
        self.table = table
        self.start = start
        self.stop = stop
        self.count = 0
        """Number of changed rows; each has a slot."""
        self.updates = 0
        # The slot + 1; 0 without a slot. The operating system allocates numpy's zeros lazily.
        self._index = torch.from_numpy(numpy.zeros(stop - start, dtype=numpy.int32))
        self._rows = torch.empty(0, dtype=torch.int64)
        self._values = torch.empty(0, table.dim, dtype=table.dtype)
        self._memories = [self._values.clone() for _ in table.rule.memories]

    # Reading and changing

    def check(self, rows: Tensor) -> None:
        """Check that the rows are within this range; raises ValueError if not."""
        if len(rows) and not (self.start <= int(rows.min()) and int(rows.max()) < self.stop):
            raise ValueError(
                f"the rows {int(rows.min())} to {int(rows.max())} are not all of "
                f"{self.table.name}'s rows {self.start} to {self.stop - 1}"
            )

    def pull(self, rows: Tensor) -> Tensor:
        """Return the values of rows, a copy of shape (n, dim)."""
        slots = self._slots(rows)
        new = (slots < 0).nonzero().squeeze(1)
        if not len(new):
            return self._values.index_select(0, slots)
        if len(new) == len(rows):
            return self.table.first(rows)
        # Rows without a slot read the first slot, and are overwritten below.
        found = self._values.index_select(0, slots.clamp(min=0))
        found[new] = self.table.first(rows[new])
        return found

    def push(self, rows: Tensor, gradient: Tensor, factor: float = 1.0) -> None:
        """Make an update of the table. `rows` may be empty.

        `factor` multiplies the learning rate.
        """
        self.updates += 1
        if not len(rows):
            return
        rows, gradient = summed(SparseRows(rows, gradient))
        slots = self._slots(rows)
        new = slots < 0
        if bool(new.any()):
            self._make(rows[new])
            slots = self._slots(rows)
        weights = self._values.index_select(0, slots)
        memories = [memory.index_select(0, slots) for memory in self._memories]
        self.table.rule.step(weights, gradient, memories, self.updates, factor)
        places = slots.long()
        for kept, changed in zip(
            [self._values, *self._memories], [weights, *memories], strict=True
        ):
            kept.index_copy_(0, places, changed)

    @property
    def changed(self) -> SparseRows:
        """All changed rows and their values, without copies."""
        return SparseRows(self._rows[: self.count], self._values[: self.count])

    def _slots(self, rows: Tensor) -> Tensor:
        """Return the slots of rows; -1 for rows without a slot."""
        return self._index.index_select(0, rows - self.start).sub_(1)

    def _make(self, rows: Tensor) -> None:
        """Assign slots to distinct rows that have none."""
        stop = self.count + len(rows)
        self._grow(stop)
        self._rows[self.count : stop] = rows
        self._values[self.count : stop] = self.table.first(rows)
        for memory, begin in zip(self._memories, self.table.rule.memories, strict=True):
            memory[self.count : stop] = begin
        places = torch.arange(self.count + 1, stop + 1, dtype=torch.int32)
        self._index[rows - self.start] = places
        self.count = stop

    def _grow(self, count: int) -> None:
        """Allocate memory for `count` rows, by doubling: a row is moved O(1) times on average."""
        if count > len(self._rows):
            size = min(max(count, 2 * len(self._rows), 16), self.stop - self.start)
            self._rows = _longer(self._rows, size, self.count)
            self._values = _longer(self._values, size, self.count)
            self._memories = [_longer(memory, size, self.count) for memory in self._memories]

    # Copies

    def state(self) -> dict[str, Any]:
        """Return copies of all changed rows and their optimizer state."""
        return {
            "rows": self._rows[: self.count].clone(),
            "values": self._values[: self.count].clone(),
            "memories": [memory[: self.count].clone() for memory in self._memories],
            "updates": self.updates,
        }

    def take(self, rows: SparseRows) -> None:
        """Set the values of the first changed rows, in an unchanged table."""
        self._make(rows.rows)
        self._values[: self.count] = rows.values

    def restore(self, state: Mapping[str, Any]) -> None:
        """Restore `state` in an unchanged table."""
        self.take(SparseRows(state["rows"], state["values"]))
        for memory, kept in zip(self._memories, state["memories"], strict=True):
            memory[: self.count] = kept
        self.updates = state["updates"]


def copied(value: Tensor | SparseRows) -> Tensor | SparseRows:
    """Return a copy in memory of its own."""
    if isinstance(value, SparseRows):
        return SparseRows(value.rows.clone(), value.values.clone())
    return value.clone()


def split_rows(values: Sequence[Tensor | SparseRows]) -> tuple[list[Tensor], list[SparseRows]]:
    """Return the values of keys, and the values of tables."""
    dense = [value for value in values if not isinstance(value, SparseRows)]
    return dense, [value for value in values if isinstance(value, SparseRows)]


def summed(given: SparseRows) -> SparseRows:
    """Return the rows ascending without duplicates; values of repeated rows are summed."""
    rows, values = given
    if len(rows) < 2 or bool((rows[1:] > rows[:-1]).all()):
        return given
    size = (int(rows.max()) + 1, values.shape[1])
    sparse = torch.sparse_coo_tensor(rows[None], values, size, check_invariants=False).coalesce()
    return SparseRows(sparse.indices()[0], sparse.values())


def joined(parts: Sequence[SparseRows], shares: Sequence[float]) -> SparseRows:
    """Return the sum of share · values over the parts, in order, with each row once."""
    if len(parts) == 1:
        return parts[0]
    rows = distinct(torch.cat([part.rows for part in parts]))
    values = parts[0].values.new_zeros(len(rows), parts[0].values.shape[1])
    for part, share in zip(parts, shares, strict=True):
        each = summed(part)
        # Rows of a part must be distinct, since `+=` with repeated indices adds only one of them.
        places = torch.searchsorted(rows, each.rows)
        values[places] += each.values * share
    return SparseRows(rows, values)


def distinct(rows: Tensor) -> Tensor:
    """Return the rows ascending without duplicates."""
    found: Tensor = torch.unique(rows)
    return found


def _longer(tensor: Tensor, size: int, used: int) -> Tensor:
    """Return a tensor of `size` rows that begins with the first `used` rows of another."""
    found = tensor.new_empty(size, *tensor.shape[1:])
    found[:used] = tensor[:used]
    return found
