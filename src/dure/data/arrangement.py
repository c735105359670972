"""In which order an epoch visits examples that lie in blocks: each once, and near ones together.

To read examples one by one, each at a random place of a disk, takes far longer than to read them in
a row. So what is read at once is a *block*, consecutive examples of one file, and what is mixed at
once is a *window*, as many blocks as memory has room for:

    blocks     in random order, drawn from all of the data
    windows    cut from that order: one after another is in memory
    examples   in random order within their window

So the examples of a batch come from blocks of all of the data, and the disk is read in pieces as
long as a block. All is a function of (seed, epoch, client). A window that has room for all examples
is one order of all, the same as of examples in memory (`dure.randomness.seeds.shuffled`).

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
"""order(seed, epoch, client): the places of the examples, in the order of their visits."""


class Visit(NamedTuple):
    """An epoch's way.

    order: places of examples, int64 of shape (n,). windows: the blocks of each, in order.
    """

    order: Tensor
    windows: list[Tensor]


@dataclass(frozen=True)
class Arrangement:
    """Examples in blocks of these lengths, one after another. window: how many are mixed at once.

    A window has one block at the least.
    """

    blocks: tuple[int, ...]
    window: int

    @classmethod
    def whole(cls, examples: int) -> Arrangement:
        """That of examples in memory."""
        return cls((examples,), examples)

    @property
    def examples(self) -> int:
        return self._ends[-1]

    @cached_property
    def _ends(self) -> list[int]:
        return list(accumulate(self.blocks))

    @cached_property
    def ends(self) -> Tensor:
        """Where each block ends, int64."""
        return torch.tensor(self._ends)

    def block_of(self, places: Tensor) -> Tensor:
        """The block of each place."""
        return torch.searchsorted(self.ends, places, right=True)

    def visit(self, seed: int, epoch: int, client: int, part: Tensor | None = None) -> Visit:
        """The way through all examples, or through a part of them: then as places in the part."""
        count = self.examples if part is None else len(part)
        if self.examples <= self.window:
            return Visit(shuffled(count, seed, epoch, client), [torch.arange(len(self.blocks))])
        drawn = generator(seed, "blocks", epoch, client)
        turns = torch.randperm(len(self.blocks), generator=drawn)
        counts, places = self._in_turn(turns, part)
        # What has nothing of the part is not read.
        turns = turns[counts > 0]
        windows = self._windows(turns)
        lengths = torch.tensor([len(window) for window in windows])
        sizes = _sums(counts[counts > 0], lengths)
        mixed = [
            some[torch.randperm(len(some), generator=drawn)]
            for some in torch.split(places, sizes.tolist())
        ]
        return Visit(torch.cat(mixed), windows)

    def _in_turn(self, turns: Tensor, part: Tensor | None) -> tuple[Tensor, Tensor]:
        """How many examples each block has, and their places, block after block."""
        if part is None:
            counts = torch.tensor(self.blocks)[turns]
            first = self.ends[turns] - counts
            # A run of places for each block: where it begins, and on.
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
        """The blocks, as many at a time as a window has room for."""
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
    """The turns of some who have so many examples each: places in the row of all, shape (n,).

    Each has its turns evenly over the whole, so that any stretch has of each in proportion, and all
    end together: of those who have n_r, the j-th comes at (j + 1/2)/n_r of the way.
    """
    way = [(torch.arange(size, dtype=torch.float64) + 0.5) / size for size in sizes]
    return torch.argsort(torch.cat(way), stable=True)


def _sums(numbers: Tensor, lengths: Tensor) -> Tensor:
    """The sums of so many numbers each, one after another."""
    ends = torch.cat([torch.zeros(1, dtype=torch.int64), numbers.cumsum(0)])[
        torch.cat([torch.zeros(1, dtype=torch.int64), lengths.cumsum(0)])
    ]
    return ends.diff()
