"""Tables: rows of embeddings, of which a step reads and changes only a few.

A server has a range of a table's rows, and memory for those that somebody has changed:

    index    where in the memory a row lies, 4 bytes for each row of the range
    memory   values, and what the optimizer remembers, for each row that was changed

A row that was not is what it was at first (`Table.first`), and is computed whenever it is read; so
reading changes nothing, and a table may be larger than a machine's memory. (The index is zeros,
which the system backs with memory where something else is written.)

    push(rows, g)    rows that are there twice are summed first
        SGD          w <- w - lr · g
        Adagrad      s <- s + g²;  w <- w - lr/(1 + (t - 1) · decay) · g / (sqrt(s) + eps)
        Adam         m <- m + (1 - b1)(g - m);  v <- v + (1 - b2)(g² - v)
                     w <- w - lr · sqrt(1 - b2^t)/(1 - b1^t) · m / (sqrt(v) + eps)

t counts the updates of the table, also those that change none of these rows. With SGD and Adagrad a
row without a gradient stays as it is, so a table equals the dense parameter. Adam is the lazy form
of `torch.optim.SparseAdam`: moments of rows without a gradient stay as they are. What moves rows
without a gradient (momentum, weight decay) is refused by name.

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
"""Rows that a range may have: an index is of 32 bits."""


class Rows(NamedTuple):
    """Rows of a table and what belongs to each.

    rows: int64, shape (n,). values: weights or gradients, shape (n, dim).
    """

    rows: Tensor
    values: Tensor


class Rule(Protocol):
    """How an optimizer changes rows. memories: what it remembers of an element, at first."""

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
        """Changes weights and memories of rows in place.

        All have shape (rows, dim). number: of the table's update, counted from 1. factor: of the
        learning rate.
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
    """Duchi, Hazan and Singer 2011, as in torch.optim.Adagrad. memories: the sum of squares."""

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
    """Kingma and Ba 2015, as in torch.optim.SparseAdam. memories: both moments."""

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


def rule_of(kind: type[Optimizer], settings: Mapping[str, Any], name: str) -> Rule:
    """The rule of an optimizer and the settings of a group, for the table of this name.

    Raises ValueError for one that rows cannot have each for itself.
    """
    number = next((key for key, value in settings.items() if isinstance(value, Tensor)), None)
    if number is not None:
        raise ValueError(f"{kind.__name__}({number}=...) has to be a number, not a tensor")
    for key in ("momentum", "weight_decay", "amsgrad", "maximize"):
        if settings.get(key):
            raise ValueError(
                f"{kind.__name__} has {key}={settings[key]}, which the table {name} cannot have: "
                f"leave it out for sparse embeddings, or take sparse=False"
            )
    if kind is torch.optim.SGD:
        return Sgd(settings["lr"])
    if kind is torch.optim.Adagrad:
        begin = float(settings["initial_accumulator_value"])
        return Adagrad(settings["lr"], settings["lr_decay"], settings["eps"], (begin,))
    if kind in (torch.optim.Adam, torch.optim.SparseAdam):
        return LazyAdam(settings["lr"], tuple(settings["betas"]), settings["eps"])
    raise ValueError(
        f"{kind.__name__} is no optimizer of rows that are read now and then, such as those of the "
        f"table {name}: choose SGD, Adagrad or Adam (as SparseAdam), or take sparse=False"
    )


@dataclass(frozen=True)
class Table:
    """What everybody knows of a table.

    name: of the embedding's weight in the model. rows, dim: its shape. first: the values of rows
    that nobody has changed, as a tensor of shape (n, dim) that is its own.
    """

    name: str
    rows: int
    dim: int
    dtype: torch.dtype
    rule: Rule
    first: Callable[[Tensor], Tensor]


class TableRows:
    """The rows start … stop-1 of a table."""

    def __init__(self, table: Table, start: int, stop: int) -> None:
        if stop - start > _MOST:
            raise ValueError(
                f"the table {table.name} has {stop - start} rows at one server, which can have "
                f"{_MOST}: take more servers"
            )
        self.table = table
        self.start = start
        self.stop = stop
        self.count = 0
        """Rows that were changed; each of them has a slot."""
        self.updates = 0
        # One more than the slot; 0 where there is none. Zeros of numpy cost no memory.
        self._index = torch.from_numpy(numpy.zeros(stop - start, dtype=numpy.int32))
        self._rows = torch.empty(0, dtype=torch.int64)
        self._values = torch.empty(0, table.dim, dtype=table.dtype)
        self._memories = [self._values.clone() for _ in table.rule.memories]

    # Reading and changing

    def check(self, rows: Tensor) -> None:
        """Raises ValueError for rows that are not all of this range."""
        if len(rows) and not (self.start <= int(rows.min()) and int(rows.max()) < self.stop):
            raise ValueError(
                f"the rows {int(rows.min())} to {int(rows.max())} are not all of "
                f"{self.table.name}'s rows {self.start} to {self.stop - 1}"
            )

    def pull(self, rows: Tensor) -> Tensor:
        """The values of rows, a copy of shape (n, dim)."""
        slots = self._slots(rows)
        new = (slots < 0).nonzero().squeeze(1)
        if not len(new):
            return self._values.index_select(0, slots)
        if len(new) == len(rows):
            return self.table.first(rows)
        # The first slot stands in for those that have none.
        found = self._values.index_select(0, slots.clamp(min=0))
        found[new] = self.table.first(rows[new])
        return found

    def push(self, rows: Tensor, gradient: Tensor, factor: float = 1.0) -> None:
        """One update of the table. rows: may be none. factor: of the learning rate."""
        self.updates += 1
        if not len(rows):
            return
        rows, gradient = summed(Rows(rows, gradient))
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
    def changed(self) -> Rows:
        """All rows that were changed, and their values; no copies."""
        return Rows(self._rows[: self.count], self._values[: self.count])

    def _slots(self, rows: Tensor) -> Tensor:
        """Where rows lie; -1 for those that have no slot."""
        return self._index.index_select(0, rows - self.start).sub_(1)

    def _make(self, rows: Tensor) -> None:
        """Gives slots to distinct rows that have none."""
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
        """Has memory for so many rows; by doubling, so that a row is moved once on average."""
        if count > len(self._rows):
            size = min(max(count, 2 * len(self._rows), 16), self.stop - self.start)
            self._rows = _longer(self._rows, size, self.count)
            self._values = _longer(self._values, size, self.count)
            self._memories = [_longer(memory, size, self.count) for memory in self._memories]

    # Copies

    def state(self) -> dict[str, Any]:
        """Everything that was changed, as copies."""
        return {
            "rows": self._rows[: self.count].clone(),
            "values": self._values[: self.count].clone(),
            "memories": [memory[: self.count].clone() for memory in self._memories],
            "updates": self.updates,
        }

    def take(self, rows: Rows) -> None:
        """These rows have these values, and are the first that were changed."""
        self._make(rows.rows)
        self._values[: self.count] = rows.values

    def restore(self, state: Mapping[str, Any]) -> None:
        """Takes what `state` gave, where nothing was changed before."""
        self.take(Rows(state["rows"], state["values"]))
        for memory, kept in zip(self._memories, state["memories"], strict=True):
            memory[: self.count] = kept
        self.updates = state["updates"]


def copied(value: Tensor | Rows) -> Tensor | Rows:
    """The same in memory of its own."""
    if isinstance(value, Rows):
        return Rows(value.rows.clone(), value.values.clone())
    return value.clone()


def apart(values: Sequence[Tensor | Rows]) -> tuple[list[Tensor], list[Rows]]:
    """Those of keys, and those of tables."""
    dense = [value for value in values if not isinstance(value, Rows)]
    return dense, [value for value in values if isinstance(value, Rows)]


def summed(given: Rows) -> Rows:
    """The same with each row once, in ascending order: what it had several times is added up."""
    rows, values = given
    if len(rows) < 2 or bool((rows[1:] > rows[:-1]).all()):
        return given
    size = (int(rows.max()) + 1, values.shape[1])
    sparse = torch.sparse_coo_tensor(rows[None], values, size, check_invariants=False).coalesce()
    return Rows(sparse.indices()[0], sparse.values())


def joined(parts: Sequence[Rows], shares: Sequence[float]) -> Rows:
    """The sum of share · values over the parts, folded in their order, with each row once."""
    if len(parts) == 1:
        return parts[0]
    rows = distinct(torch.cat([part.rows for part in parts]))
    values = parts[0].values.new_zeros(len(rows), parts[0].values.shape[1])
    for part, share in zip(parts, shares, strict=True):
        each = summed(part)
        # Every row is there once, so that none is added over another.
        places = torch.searchsorted(rows, each.rows)
        values[places] += each.values * share
    return Rows(rows, values)


def distinct(rows: Tensor) -> Tensor:
    """Rows in ascending order, each once."""
    found: Tensor = torch.unique(rows)
    return found


def _longer(tensor: Tensor, size: int, used: int) -> Tensor:
    """The first `used` rows of a tensor in one that has `size`."""
    found = tensor.new_empty(size, *tensor.shape[1:])
    found[:used] = tensor[:used]
    return found
