"""The message of a block that is not one parameter alone: its gradients, copied into N rows, one a rank.

The row of the rank itself nobody else reads: where it becomes part of a sum in place, it is copied there at once.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from dure.parallel.zero.division import Block, Part


class Rows:
    """Where the gradients of a block go, in a message that may be filled again and again.

    tail: numbers behind each row. own: where the row of `rank` goes, if not into the message.
    """

    def __init__(self, block: Block, tail: int, message: Tensor, rank: int, own: Tensor | None) -> None:
        places: list[tuple[Tensor, Part | None]] = []  # of a whole parameter in its shape: it is copied as it is
        for number, (row, parts) in enumerate(zip(message.view(block.ranks, -1), block.parts(tail), strict=True)):
            target = own if own is not None and number == rank else row
            lengths = [length for length, _ in parts]
            for place, (_, part) in zip(target.split_with_sizes(lengths), parts, strict=True):
                places.append((place.view(block.shapes[part.number]) if part and part.whole else place, part))
        self._parts = [part for _, part in places if part is not None]
        self._into = [place for place, part in places if part is not None]
        self._empty = [place for place, part in places if part is None]
        self._tails = message.view(block.ranks, -1)[:, block.chunk :]

    def fill(self, gradients: Sequence[Tensor | None]) -> None:
        """Copies the gradients, which are strided; zeros where there is none, and behind them."""
        into, values = [], []
        for place, part in zip(self._into, self._parts, strict=True):
            gradient = gradients[part.number]
            if gradient is None:
                place.zero_()
                continue
            into.append(place)
            values.append(gradient if part.whole else gradient.reshape(-1)[part.start : part.stop])
        if into:
            torch._foreach_copy_(into, values)
        for place in self._empty:
            place.zero_()

    def say(self, numbers: Sequence[float]) -> None:
        """Writes the tail."""
        self._tails[:] = torch.tensor(numbers, dtype=self._tails.dtype, device=self._tails.device)
