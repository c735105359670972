"""Which slice of a parameter which rank holds, as data.

Along one dimension a parameter of length n is made of blocks n_1 + … + n_k = n, and every block is
divided on its own: rank r of N holds slice r of each, one after another. One block is the usual
case. A matrix in which query, key and value lie next to each other has three, so that a rank's
queries meet its keys and its values; with grouped queries they are of unequal length. Where N does
not divide a block its first n_i mod N slices have one element more.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain

import torch
from torch import Tensor

from dure.collectives.arguments import lengths_of


@dataclass(frozen=True)
class Division:
    """How a tensor is divided.

    dim: the dimension that is divided. blocks: lengths, in the undivided tensor, of what is divided
    on its own.
    """

    dim: int
    blocks: tuple[int, ...]

    @property
    def length(self) -> int:
        """Of the undivided tensor."""
        return sum(self.blocks)

    def lengths(self, size: int) -> list[int]:
        """What every rank holds of it."""
        # as `tensor_split` cuts: the first slices are one longer
        of_blocks = [lengths_of(block, size) for block in self.blocks]
        return list(map(sum, zip(*of_blocks, strict=True)))

    def part(self, whole: Tensor, rank: int, size: int) -> Tensor:
        """What a rank holds, in memory of its own."""
        pieces = [
            block.tensor_split(size, self.dim)[rank]
            for block in whole.split_with_sizes(list(self.blocks), self.dim)
        ]
        return torch.cat(pieces, self.dim)

    def join(self, parts: Sequence[Tensor]) -> Tensor:
        """The undivided tensor of the ranks' parts."""
        size = len(parts)
        if len(self.blocks) == 1:
            return torch.cat(list(parts), self.dim)
        of_blocks = [lengths_of(block, size) for block in self.blocks]
        cut = []
        for part, lengths in zip(parts, zip(*of_blocks, strict=True), strict=True):
            cut.append(part.split_with_sizes(list(lengths), self.dim))
        # Block by block, each from all ranks in their order.
        pieces = chain.from_iterable(zip(*cut, strict=True))
        return torch.cat(list(pieces), self.dim)


def sharers(what: str, outputs: int, size: int, unit: int) -> int:
    """How many ranks share each unit, such as a head: 1, if there are enough units for all.

    Raises ValueError if units and ranks do not go into each other, or the ranks of a unit not into
    its width.
    """
    units = outputs // unit
    # enough units, or an uneven number: then `check_even` decides, and tells what is wrong
    if outputs % unit or units >= size or size % units:
        check_even(what, (outputs,), size, unit)
        return 1
    if unit % (size // units):
        raise ValueError(
            f"{what} has {units} units of {unit}, and {size // units} ranks cannot share {unit} "
            f"outputs evenly: choose a smaller degree than {size}"
        )
    return size // units


def check_even(what: str, blocks: Sequence[int], size: int, unit: int = 1) -> None:
    """Raises ValueError if the degree does not divide each block between units, such as heads."""
    for block in blocks:
        if block % unit:
            raise ValueError(
                f"{what} has a block of {block}, which is not a multiple of its unit of {unit}"
            )
        if (block // unit) % size:
            of = f" (units of {unit})" if unit > 1 else ""
            raise ValueError(
                f"{what} has {block // unit}{of} to divide, not a multiple of the degree {size}: "
                "choose a degree that divides it"
            )
