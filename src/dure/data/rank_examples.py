"""Data on the ranks: each rank reads, and stores, only its own examples.

    Task(train=function)      function(rank, world) returns the training examples of a rank

Each rank calls the function for itself. All ranks exchange the number of their examples, once;
then every example has an index, rank by rank, and N ranks with n_r examples each train on
n = n_0 + … + n_{N-1}.

A joint batch has every rank's examples in proportion: each rank visits its own examples in an order
of its own (`dure.data.block_shuffling`), and the ranks take turns evenly over the epoch
(`interleaved`). So a batch of B has B·n_r/n examples of rank r, up to rounding, for unequal shares
too; each example occurs once an epoch, and the mean is that over all. Every rank computes the turns
of all ranks, so that none of that travels. A single worker with all examples in that order follows
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

from dure.data.block_shuffling import BlockLayout, Order, interleaved
from dure.data.conversion import as_examples
from dure.data.datasets import DatasetExamples
from dure.data.examples import Examples
from dure.errors import DataError, DureError, described

RankDataFunction = Callable[[int, int], Any]
"""function(rank, world): returns the examples of a rank, in any form that a task accepts."""


class RankDataFactory(Examples):
    """Placeholder before the ranks exist: the function that gives each rank its examples."""

    def __init__(self, function: RankDataFunction, keeps_labels: bool = False) -> None:
        self.function = function
        self.keeps_labels = keeps_labels
        self.keys = None
        self.classes = None
        self.draws = False
        self._made: tuple[int, int, Examples] | None = None

    def of(self, rank: int, world: int) -> Examples:
        """Return the examples of a rank; the last result is cached until `forget`.

        Raises ValueError for data that cannot be trained on, and DataError if the function fails.
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
                f"{where} returned a DataLoader, whose batches would be ignored: ranks with their "
                "own data take turns; return the dataset itself"
            )
        if self.keeps_labels and isinstance(examples, DatasetExamples):
            return examples.with_labels()
        return examples

    def with_labels(self) -> RankDataFactory:
        """Return a copy whose inputs keep the labels, if items are dicts."""
        return RankDataFactory(self.function, keeps_labels=True)

    def forget(self) -> None:
        """Release the cached examples."""
        self._made = None

    def __reduce__(self) -> tuple[Any, ...]:
        # Only the function travels to the ranks, without any examples.
        return RankDataFactory, (self.function, self.keeps_labels)

    def __len__(self) -> int:
        raise DataError(
            "Task.train is a function of (rank, world): the number of examples is known only "
            "after every rank has its own"
        )

    def batch(self, indices: Tensor) -> tuple[Any, Any]:
        raise DataError("Task.train is a function of (rank, world): only its ranks have examples")

    def labels(self) -> Tensor | None:
        return None

    def to(self, dtype: torch.dtype) -> Examples:
        return self


class RankExamples(Examples):
    """All examples, of which this process has those of its own rank.

    own: this rank's examples. arrangements: of every rank's examples. counted: whether these are
    known; while a run is prepared, the other ranks are assumed to be like this rank.
    """

    def __init__(
        self,
        own: Examples,
        arrangements: Sequence[BlockLayout],
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
        self.rank_counts = tuple(one.examples for one in arrangements)
        self._starts = [0, *accumulate(self.rank_counts)]
        self.first = self._starts[rank]

    def __len__(self) -> int:
        return self._starts[-1]

    def parts(self) -> Sequence[Tensor] | None:
        return list(torch.split(torch.arange(len(self)), list(self.rank_counts or ())))

    def batch(self, indices: Tensor) -> tuple[Any, Any]:
        places = indices - self.first
        if len(places) and not 0 <= int(places.min()) <= int(places.max()) < len(self.own):
            raise DataError(
                f"rank {self.rank} has the examples {self.first} to "
                f"{self._starts[self.rank + 1] - 1}, but was asked for an example of another rank"
            )
        return self.own.batch(places)

    def arrangement(self) -> BlockLayout:
        return self.own.arrangement()

    def order(self, part: Tensor | None = None) -> Order:
        if part is None:
            return self._joint_order
        # A rank that trains on a part of its own visits all of its own examples.
        return self.own.order()

    def _joint_order(self, seed: int, epoch: int, client: int) -> Tensor:
        """Return the order of all ranks' examples, with the ranks taking turns."""
        orders = [
            self._order_of(rank)(seed, epoch, rank) + self._starts[rank]
            for rank in range(len(self._arrangements))
        ]
        return torch.cat(orders)[self._turns]

    def _order_of(self, rank: int) -> Order:
        # The rank's own examples are asked for the order, so that they can read ahead.
        return self.own.order() if rank == self.rank else partial(_order, self._arrangements[rank])

    @cached_property
    def _turns(self) -> Tensor:
        assert self.rank_counts is not None
        return interleaved(self.rank_counts)

    def part(self, indices: Tensor, rank: int, ranks: int) -> Tensor:
        """Return the examples of a joint batch that are on a rank."""
        return indices[(indices >= self._starts[rank]) & (indices < self._starts[rank + 1])]

    def parts_of_batches(self, batch_size: int) -> set[int]:
        """Return the sizes of ranks' shares of the batches of an epoch; the same in every epoch."""
        assert self.rank_counts is not None
        owners = torch.repeat_interleave(
            torch.arange(len(self.rank_counts)), torch.tensor(self.rank_counts)
        )
        taken = torch.split(owners[self._turns], batch_size)
        counts = {count for some in taken for count in torch.bincount(some, minlength=1).tolist()}
        return counts - {0}

    def labels(self) -> Tensor | None:
        return None

    def to(self, dtype: torch.dtype) -> Examples:
        own = self.own.to(dtype)
        if own is self.own:
            return self
        return RankExamples(own, self._arrangements, self.rank, self.counted)


def _order(arrangement: BlockLayout, seed: int, epoch: int, client: int) -> Tensor:
    return arrangement.visit(seed, epoch, client).order
