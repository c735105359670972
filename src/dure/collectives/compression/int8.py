"""Int8: numbers are rounded to whole multiples of a unit, in 8 bits, with error feedback.

    p = g + e                                       error feedback
    unit = max |p_i| / 127 over a row;  sent_i = unit · round(p_i / unit)
    e = p - sent,  at most unit / 2 in size

A row belongs to a unit of a layer, or to an example: an index of a tensor's first dimension. A
tensor of one dimension, such as a bias, is a single row. A row of zeros is sent as zeros; a row
with a number that is not finite is sent as NaN. No random numbers are used; `QSGD` rounds without
bias instead.

Cost: a row of L numbers is L bytes and its unit, 4 bytes (8 in float64), to each of N-1 others.

Sources: T. Dettmers, "8-Bit Approximations for Parallelism in Deep Learning", ICLR 2016, for 8 bits
of gradients and activations; Karimireddy et al., ICML 2019, for error feedback.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from dure.collectives.compression.bucket import CompressionBucket
from dure.collectives.compression.compression import Compression
from dure.collectives.compression.gathered import Codec
from dure.collectives.compression.one_bit import columns_of
from dure.collectives.compression.packing import in_blocks, numbers

LEVELS = 127
"""Number of levels on each side of 0."""


@dataclass(frozen=True)
class Int8(Compression):
    """8 bits a number and a unit a row, with error feedback."""

    name: ClassVar[str] = "int8"
    remembers: ClassVar[bool] = True

    def codec(self, bucket: CompressionBucket) -> Codec:
        return Int8Codec(bucket)


class Int8Codec:
    """Codec with the payload: the unit of each row in the work dtype; then the levels, int8."""

    def __init__(self, bucket: CompressionBucket) -> None:
        self.bucket = bucket
        self.rows = [columns_of(shape) for shape in bucket.shapes]
        self.split = sum(count for count, _ in self.rows) * bucket.work.itemsize
        self.nbytes = self.split + bucket.n

    def _units(self, payload: Tensor) -> Tensor:
        return numbers(payload[: self.split], self.bucket.work)

    def _pieces(self, vector: Tensor, payload: Tensor) -> Iterator[tuple[slice, Tensor, Tensor]]:
        """Yield (slice of rows, their numbers, their levels), as views, in pieces."""
        levels = payload[self.split :].view(torch.int8)
        start = 0
        first = 0
        for count, length in self.rows:
            part = slice(start, start + count * length)
            for rows, columns in in_blocks(count, length, vector.device):
                which = slice(first + rows.start, first + rows.stop)
                yield (
                    which,
                    vector[part].view(count, length)[rows, columns],
                    levels[part].view(count, length)[rows, columns],
                )
            start = part.stop
            first = first + count

    def encode(self, vector: Tensor, payload: Tensor, seed: int, position: Sequence[int]) -> None:
        units = self._units(payload).zero_()
        for which, piece, _ in self._pieces(vector, payload):
            # Both operations propagate NaN.
            units[which] = torch.maximum(units[which], piece.abs().amax(1))
        units.div_(LEVELS).masked_fill_(~units.isfinite(), torch.nan)
        whole = bool(units.isfinite().all())
        # Avoids 0/0 for a row of zeros: any nonzero unit gives zeros.
        steps = torch.where(units > 0, units, 1)
        for which, piece, levels in self._pieces(vector, payload):
            exact = (piece / steps[which, None]).round_().clamp_(-LEVELS, LEVELS)
            # The level of NaN does not matter, because the unit of its row is NaN.
            levels.copy_(exact if whole else exact.nan_to_num_(0))

    def add(self, payload: Tensor, into: Tensor, sign: int) -> None:
        units = self._units(payload)
        for which, piece, levels in self._pieces(into, payload):
            piece.addcmul_(levels.to(into.dtype), units[which, None], value=sign)

    def is_finite(self, payload: Tensor) -> bool:
        return bool(self._units(payload).isfinite().all())

    def check(self, payload: Tensor) -> None:
        if bool((self._units(payload) < 0).any()):
            raise ValueError("int8: a unit is negative")
        if bool((payload[self.split :].view(torch.int8) < -LEVELS).any()):
            raise ValueError(f"int8: a level is below -{LEVELS}")
