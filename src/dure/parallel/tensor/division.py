"""Slices of a parameter on the ranks, as data.

Along one dimension, a parameter of length n consists of blocks n_1 + … + n_k = n. Every block is
divided separately: rank r of N stores slice r of each block, one after another. A single block is
the usual case. A matrix with query, key and value next to each other has three blocks, so that a
rank's queries meet its keys and its values; with grouped queries the blocks have unequal lengths.
If N does not divide a block, the first n_i mod N slices have an additional element.
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
    """Division of a tensor.

    dim: the dimension that is divided. blocks: lengths, in the undivided tensor, of the blocks that
    are divided separately.
    """

    dim: int
    blocks: tuple[int, ...]

    @property
    def length(self) -> int:
        """Length of the undivided tensor along `dim`."""
        return sum(self.blocks)

    def lengths(self, size: int) -> list[int]:
        """Return the length of every rank's part along `dim`."""
        # like `tensor_split`: the first slices have an additional element
        of_blocks = [lengths_of(block, size) for block in self.blocks]
        return list(map(sum, zip(*of_blocks, strict=True)))

    def part(self, whole: Tensor, rank: int, size: int) -> Tensor:
        """Return a copy of a rank's part."""
        pieces = [
            block.tensor_split(size, self.dim)[rank]
            for block in whole.split_with_sizes(list(self.blocks), self.dim)
        ]
        return torch.cat(pieces, self.dim)

    def join(self, parts: Sequence[Tensor]) -> Tensor:
        """Return the undivided tensor from the ranks' parts."""
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
    """Return the number of ranks that share each unit, such as a head; 1 if each rank has a unit.

    Raises ValueError if neither of the numbers of units and ranks divides the other, or if the
    ranks of a unit do not divide its width.
    """
    units = outputs // unit
    # enough units, or an uneven number: then `check_even` decides and raises the error
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
    """Raise ValueError if the degree does not divide each block between units, such as heads."""
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
