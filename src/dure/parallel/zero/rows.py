"""The message of a block that is not one parameter alone.

Its gradients are copied into N rows, one for each rank. No other rank reads the row of the rank
itself: where a sum can be made of what lies anywhere, it is not copied.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from dure.parallel.zero.division import Block, Part


class Rows:
    """Where the gradients of a block go, in a message that may be filled again and again.

    tail: numbers after each row. own: the rank whose row need not be copied; None if all have to
    be.
    """

    def __init__(self, block: Block, tail: int, message: Tensor, own: int | None) -> None:
        # All views are made here, once: a step only copies into them.
        rows = message.view(block.ranks, -1)
        self._dtype = message.dtype
        filled = [
            _filled(block, row, parts) for row, parts in zip(rows, block.parts(tail), strict=True)
        ]
        self._own = filled.pop(own) if own is not None else []
        self._others = [place for row in filled for place in row]
        self._tails = rows[:, block.chunk :]

    def fill(self, gradients: Sequence[Tensor | None]) -> list[Tensor]:
        """Copies the gradients, which are strided; zeros where there is none, and after them.

        Returns what together is the row that was not copied, if there is one.
        """
        own = self._whole_row(gradients)
        into = []
        values = []
        # Where the own row can be read where it lies, its places in the message stay as they are:
        # nobody reads them.
        for place, part in self._others if own else [*self._own, *self._others]:
            gradient = gradients[part.number] if part is not None else None
            if part is None or gradient is None:
                place.zero_()
                continue
            into.append(place)
            values.append(_run(gradient, part))
        if into:
            # one call for all, which also converts dtypes
            torch._foreach_copy_(into, values)
        return own

    def _whole_row(self, gradients: Sequence[Tensor | None]) -> list[Tensor]:
        """The own row as it lies in the gradients.

        It is empty if some of it is missing, or has to be converted.
        """
        row = []
        for place, part in self._own:
            # padding has no gradient: zeros of the message stand for it
            gradient = gradients[part.number] if part is not None else place.zero_()
            if (
                gradient is None
                or gradient.dtype != self._dtype
                or not gradient.is_contiguous()
                or _is_lazy(gradient)
            ):
                return []
            row.append(_run(gradient, part) if part is not None else gradient)
        return row

    def say(self, numbers: Sequence[float]) -> None:
        """Writes the tail."""
        # in every row, since each rank receives one row alone
        self._tails[:] = torch.tensor(numbers, dtype=self._tails.dtype, device=self._tails.device)


def _filled(
    block: Block, row: Tensor, parts: Sequence[tuple[int, Part | None]]
) -> list[tuple[Tensor, Part | None]]:
    """The places of a row, with what is to be copied there.

    A whole parameter is copied as it is, in its shape.
    """
    places = row.split_with_sizes([length for length, _ in parts])
    return [
        (place.view(block.shapes[part.number]) if part is not None and part.whole else place, part)
        for place, (_, part) in zip(places, parts, strict=True)
    ]


def _is_lazy(gradient: Tensor) -> bool:
    """Whether its memory holds something else than its elements."""
    return gradient.is_neg() or gradient.is_conj()


def _run(gradient: Tensor, part: Part) -> Tensor:
    return gradient if part.whole else gradient.reshape(-1)[part.start : part.stop]
