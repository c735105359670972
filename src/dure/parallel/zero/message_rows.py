"""Message of a block with several parameters, or with padding.

The block's gradients are copied into N rows, a row for each rank. No other rank reads the rank's
own row: if a sum can read from several tensors, that row is not copied.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from dure.parallel.zero.partition_layout import MessagePart, ParameterBlock


class MessageRows:
    """Places of a block's gradients in a message that is filled repeatedly.

    tail: numbers after each row. own: the rank whose row need not be copied; None to copy all rows.
    """

    def __init__(self, block: ParameterBlock, tail: int, message: Tensor, own: int | None) -> None:
        # All views are created here, once: a step only copies into them.
        rows = message.view(block.ranks, -1)
        self._dtype = message.dtype
        filled = [
            _filled(block, row, parts) for row, parts in zip(rows, block.parts(tail), strict=True)
        ]
        self._own = filled.pop(own) if own is not None else []
        self._others = [place for row in filled for place in row]
        self._tails = rows[:, block.chunk :]

    def fill(self, gradients: Sequence[Tensor | None]) -> list[Tensor]:
        """Copy strided gradients to the message, and zeros for missing gradients and padding.

        Returns the tensors that together are the row that was not copied; empty if all were copied.
        """
        own = self._whole_row(gradients)
        into = []
        values = []
        # If the own row can be read from the gradients, its places in the message are not filled:
        # no rank reads them.
        for place, part in self._others if own else [*self._own, *self._others]:
            gradient = gradients[part.number] if part is not None else None
            if part is None or gradient is None:
                place.zero_()
                continue
            into.append(place)
            values.append(_run(gradient, part))
        if into:
            # a single call for all copies, which also converts dtypes
            torch._foreach_copy_(into, values)
        return own

    def _whole_row(self, gradients: Sequence[Tensor | None]) -> list[Tensor]:
        """Return the own row as views of the gradients.

        Returns an empty list if a gradient is missing, or has to be converted.
        """
        row = []
        for place, part in self._own:
            # padding has no gradient: zeros in the message are used instead
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
        """Write the numbers of the trailer."""
        # in every row, since each rank receives one row alone
        self._tails[:] = torch.tensor(numbers, dtype=self._tails.dtype, device=self._tails.device)


def _filled(
    block: ParameterBlock, row: Tensor, parts: Sequence[tuple[int, MessagePart | None]]
) -> list[tuple[Tensor, MessagePart | None]]:
    """Return the places of a row, each with its run of a parameter.

    A whole parameter has its shape.
    """
    places = row.split_with_sizes([length for length, _ in parts])
    return [
        (place.view(block.shapes[part.number]) if part is not None and part.whole else place, part)
        for place, (_, part) in zip(places, parts, strict=True)
    ]


def _is_lazy(gradient: Tensor) -> bool:
    """Return whether a negation or conjugation of the tensor is lazy, so not in its memory."""
    return gradient.is_neg() or gradient.is_conj()


def _run(gradient: Tensor, part: MessagePart) -> Tensor:
    return gradient if part.whole else gradient.reshape(-1)[part.start : part.stop]
