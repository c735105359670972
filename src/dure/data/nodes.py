"""Data that lie with the ranks: each reads, and holds, only its own.

    Task(train=function)      function(rank, world) gives the training examples of one rank

A rank calls it for itself alone. All tell one another how many they have, once; from then on every
example has an index, rank after rank, and N ranks with n_r examples each train on n = n_0 + … +
n_{N-1}.

A joint batch has of every rank's examples in proportion: each rank goes through its own in an order
of its own (`dure.data.arrangement`), and the ranks take turns evenly over the epoch
(`interleaved`). So a batch of B has B·n_r/n of rank r's, but for rounding, where ranks have unequal
shares too; each example comes once an epoch, and the mean is the one over all. Every rank works out
the turns of all, so that nothing of that travels. One worker with all examples in that order walks
the same path.

Cost: on every rank 16 bytes of memory for each of the n examples, for the order of an epoch.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cached_property, partial
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor

from dure.data.arrangement import Arrangement, Order, interleaved
from dure.data.datasets import DatasetExamples
from dure.data.examples import Examples
from dure.data.taken import as_examples
from dure.errors import DataError, DureError, described

OwnData = Callable[[int, int], Any]
"""function(rank, world): the examples of a rank, as a task takes them."""


class DataOfRanks(Examples):
    """What a task has before its ranks are there: the function that gives each its own."""

    def __init__(self, function: OwnData, keeps_labels: bool = False) -> None:
        self.function = function
        self.keeps_labels = keeps_labels
        self.keys = None
        self.classes = None
        self.draws = False
        self._made: tuple[int, int, Examples] | None = None

    def of(self, rank: int, world: int) -> Examples:
        """The examples of a rank; those that were asked for last are kept until `forget`.

        Raises ValueError for what cannot be trained on, and DataError where the function fails.
        """
        if self._made is None or self._made[:2] != (rank, world):
            self._made = None
            self._made = (rank, world, self._called(rank, world))
        return self._made[2]

    def _called(self, rank: int, world: int) -> Examples:
        where = f"Task.train(rank={rank}, world={world})"
        try:
            found = self.function(rank, world)
        except DureError:
            raise
        except Exception as error:
            raise DataError(f"{where} failed: {described(error)}") from error
        try:
            examples = as_examples(found)
        except ValueError as error:
            raise ValueError(f"{where}: {error}") from error
        said = examples.sampling
        if said.asks or said.batch_size is not None:
            raise ValueError(
                f"{where} gave a DataLoader, whose batches nobody asks for: ranks that have data "
                f"of their own take turns; give the dataset itself"
            )
        if self.keeps_labels and isinstance(examples, DatasetExamples):
            return examples.with_labels()
        return examples

    def with_labels(self) -> DataOfRanks:
        """The same, whose inputs keep the labels where items are dicts."""
        return DataOfRanks(self.function, keeps_labels=True)

    def forget(self) -> None:
        """What was asked for last need not stay in this process."""
        self._made = None

    def __reduce__(self) -> tuple[Any, ...]:
        # To its ranks the function travels, and nobody's examples.
        return DataOfRanks, (self.function, self.keeps_labels)

    def __len__(self) -> int:
        raise DataError(
            "Task.train is a function of (rank, world): how many examples there are is known when "
            "the ranks have theirs"
        )

    def batch(self, indices: Tensor) -> tuple[Any, Any]:
        raise DataError("Task.train is a function of (rank, world): only its ranks have examples")

    def labels(self) -> Tensor | None:
        return None

    def to(self, dtype: torch.dtype) -> Examples:
        return self


class OwnExamples(Examples):
    """All examples, of which those of one rank are here.

    own: the rank's. arrangements: of every rank's. counted: whether these are known; while a run is
    prepared the other ranks' are taken to be like this one's.
    """

    def __init__(
        self,
        own: Examples,
        arrangements: Sequence[Arrangement],
        rank: int,
        counted: bool = True,
    ) -> None:
        self.own = own
        self.rank = rank
        self.counted = counted
        self.draws = own.draws
        self.classes = own.classes
        self.keys = None
        self._arrangements = arrangements
        self.lies = tuple(one.examples for one in arrangements)
        self._starts = [0, *accumulate(self.lies)]
        self.first = self._starts[rank]

    def __len__(self) -> int:
        return self._starts[-1]

    def parts(self) -> Sequence[Tensor] | None:
        return list(torch.split(torch.arange(len(self)), list(self.lies or ())))

    def batch(self, indices: Tensor) -> tuple[Any, Any]:
        places = indices - self.first
        if len(places) and not 0 <= int(places.min()) <= int(places.max()) < len(self.own):
            raise DataError(
                f"rank {self.rank} has the examples {self.first} to "
                f"{self._starts[self.rank + 1] - 1}, and was asked for one that lies elsewhere"
            )
        return self.own.batch(places)

    def arrangement(self) -> Arrangement:
        return self.own.arrangement()

    def order(self, part: Tensor | None = None) -> Order:
        if part is None:
            return self._joint_order
        # What a rank trains on alone is all of its own.
        return self.own.order()

    def _joint_order(self, seed: int, epoch: int, client: int) -> Tensor:
        """The examples of all ranks, as these take turns."""
        orders = [
            self._order_of(rank)(seed, epoch, rank) + self._starts[rank]
            for rank in range(len(self._arrangements))
        ]
        return torch.cat(orders)[self._turns]

    def _order_of(self, rank: int) -> Order:
        # The own examples hear what they will be asked for, and may read ahead.
        return self.own.order() if rank == self.rank else partial(_order, self._arrangements[rank])

    @cached_property
    def _turns(self) -> Tensor:
        assert self.lies is not None
        return interleaved(self.lies)

    def part(self, indices: Tensor, rank: int, ranks: int) -> Tensor:
        """Those of a joint batch that lie with a rank."""
        return indices[(indices >= self._starts[rank]) & (indices < self._starts[rank + 1])]

    def parts_of_batches(self, batch_size: int) -> set[int]:
        """How many examples ranks have in the batches of an epoch; the same in every epoch."""
        assert self.lies is not None
        owners = torch.repeat_interleave(torch.arange(len(self.lies)), torch.tensor(self.lies))
        taken = torch.split(owners[self._turns], batch_size)
        counts = {count for some in taken for count in torch.bincount(some, minlength=1).tolist()}
        return counts - {0}

    def labels(self) -> Tensor | None:
        return None

    def to(self, dtype: torch.dtype) -> Examples:
        own = self.own.to(dtype)
        if own is self.own:
            return self
        return OwnExamples(own, self._arrangements, self.rank, self.counted)


def _order(arrangement: Arrangement, seed: int, epoch: int, client: int) -> Tensor:
    return arrangement.visit(seed, epoch, client).order
