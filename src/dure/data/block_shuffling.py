"""Orders of an epoch over examples in blocks: each example once, near examples together.

Reading examples at random places of a disk takes far longer than reading consecutive examples. The
unit of reading is therefore a *block*, consecutive examples of a file, and the unit of shuffling is
a *window*, as many blocks as memory has room for:

    blocks     in random order, drawn from all of the data
    windows    cut from that order: each in memory in turn
    examples   in random order within their window

So the examples of a batch come from blocks of all of the data, and the disk is read in pieces of
block size. The order is a function of (seed, epoch, client). A window with room for all examples
gives a single order of all, the same as for examples in memory (`dure.randomness.seeds.shuffled`).
Cost: an epoch's order is n numbers.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate
from typing import NamedTuple

import torch
from torch import Tensor

from dure.randomness.seeds import generator, shuffled

Order = Callable[[int, int, int], Tensor]
"""order(seed, epoch, client): the indices of the examples, in the order of their visits."""


class EpochOrder(NamedTuple):
    """The order of an epoch.

    order: indices of examples, int64 of shape (n,). windows: the blocks of each window, in order.
    """

    order: Tensor
    windows: list[Tensor]


@dataclass(frozen=True)
class BlockLayout:
    """Lengths of consecutive blocks of examples. window: number of examples shuffled together.

    A window has at least 1 block.
    """

    blocks: tuple[int, ...]
    window: int

    @classmethod
    def whole(cls, examples: int) -> BlockLayout:
        """Return the arrangement of examples in memory: a single block."""
        return cls((examples,), examples)

    @property
    def examples(self) -> int:
        return self._ends[-1]

    @cached_property
    def _ends(self) -> list[int]:
        return list(accumulate(self.blocks))

    @cached_property
    def ends(self) -> Tensor:
        """End of each block, int64."""
        return torch.tensor(self._ends)

    def block_of(self, places: Tensor) -> Tensor:
        """Return the block of each index."""
        return torch.searchsorted(self.ends, places, right=True)

    def visit(self, seed: int, epoch: int, client: int, part: Tensor | None = None) -> EpochOrder:
        """Return the order of all examples, or of a part, with indices relative to the part."""
        count = self.examples if part is None else len(part)
        if self.examples <= self.window:
            return EpochOrder(
                shuffled(count, seed, epoch, client), [torch.arange(len(self.blocks))]
            )
        drawn = generator(seed, "blocks", epoch, client)
        turns = torch.randperm(len(self.blocks), generator=drawn)
        counts, places = self._in_turn(turns, part)
        # Blocks without an example of the part are not read.
        turns = turns[counts > 0]
        windows = self._windows(turns)
        lengths = torch.tensor([len(window) for window in windows])
        sizes = _sums(counts[counts > 0], lengths)
        mixed = [
            some[torch.randperm(len(some), generator=drawn)]
            for some in torch.split(places, sizes.tolist())
        ]
        return EpochOrder(torch.cat(mixed), windows)

    def _in_turn(self, turns: Tensor, part: Tensor | None) -> tuple[Tensor, Tensor]:
        """Return the number of examples of each block, and their indices, block by block."""
        if part is None:
            counts = torch.tensor(self.blocks)[turns]
            first = self.ends[turns] - counts
            # A range of indices for each block: its beginning, and consecutive numbers.
            before = counts.cumsum(0) - counts
            return counts, torch.repeat_interleave(first - before, counts) + torch.arange(
                self.examples
            )
        block = self.block_of(part)
        turn = torch.empty_like(turns)
        turn[turns] = torch.arange(len(turns))
        counts = torch.bincount(block, minlength=len(self.blocks))[turns]
        return counts, torch.argsort(turn[block], stable=True)

    def _windows(self, turns: Tensor) -> list[Tensor]:
        """Group the blocks into windows, as many at a time as a window has room for."""
        windows: list[list[int]] = []
        room = 0
        for block in turns.tolist():
            length = self.blocks[block]
            if not windows or length > room:
                windows.append([])
                room = self.window
            windows[-1].append(block)
            room -= length
        return [torch.tensor(window) for window in windows]


def interleaved(sizes: Sequence[int]) -> Tensor:
    """Return the order in which owners with so many examples each take turns, shape (n,).

    Every owner's turns are spread evenly over the whole, so that any stretch has examples of each
    owner in proportion, and all owners finish together: the j-th of n_r examples is at (j +
    1/2)/n_r of the way. The result indexes the concatenation of all owners' examples.
    """
    way = [(torch.arange(size, dtype=torch.float64) + 0.5) / size for size in sizes]
    return torch.argsort(torch.cat(way), stable=True)


def _sums(numbers: Tensor, lengths: Tensor) -> Tensor:
    """Return the sums of consecutive groups of numbers. lengths: of the groups."""
    ends = torch.cat([torch.zeros(1, dtype=torch.int64), numbers.cumsum(0)])[
        torch.cat([torch.zeros(1, dtype=torch.int64), lengths.cumsum(0)])
    ]
    return ends.diff()
