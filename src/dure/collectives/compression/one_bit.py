"""1-bit SGD: signs travel, with the means of a column's positive and negative numbers.

    p = g + e                                  error feedback
    sent_ij = mean of the p_ij ≥ 0 in column j, where p_ij ≥ 0;  mean of the others, elsewhere
    e = p - sent

A column belongs to a unit of a layer: a row of a weight of torch, (out, in, …), whose first
dimension counts the units. A tensor of one dimension, such as a bias, is a single column. The two
means minimise ‖e‖ for these signs. A column with a number that is not finite is not finite at the
receiver.

Cost: a column of L numbers is ⌈L/8⌉ bytes of signs and two means of 4 bytes (8 in float64), to each
of N-1 others.

Source: F. Seide, H. Fu, J. Droppo, G. Li, D. Yu, "1-Bit Stochastic Gradient Descent and its
Application to Data-Parallel Distributed Training of Speech DNNs", Interspeech 2014.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from dure.collectives.compression.bucket import CompressionBucket
from dure.collectives.compression.compression import Compression
from dure.collectives.compression.gathered import Codec
from dure.collectives.compression.packing import (
    bits_table,
    in_columns,
    numbers,
    pack_signs,
    sign_bytes,
    unpack_signs,
)


@dataclass(frozen=True)
class OneBit(Compression):
    """1 bit a number and two means a column, with error feedback."""

    name: ClassVar[str] = "one-bit"
    remembers: ClassVar[bool] = True

    def codec(self, bucket: CompressionBucket) -> Codec:
        return OneBitCodec(bucket)


def columns_of(shape: torch.Size) -> tuple[int, int]:
    """Return (number of columns, length of each) of a tensor of this shape."""
    if len(shape) < 2 or shape.numel() == 0:
        return (1, shape.numel()) if shape.numel() else (0, 0)
    return shape[0], shape.numel() // shape[0]


class OneBitCodec:
    """Codec with the payload: columns' means of numbers ≥ 0; means of the others; signs."""

    def __init__(self, bucket: CompressionBucket) -> None:
        self.bucket = bucket
        self.columns = [columns_of(shape) for shape in bucket.shapes]
        self.count = sum(columns for columns, _ in self.columns)
        self.split = 2 * self.count * bucket.work.itemsize
        self.nbytes = self.split + sign_bytes(self.columns)

    def _means(self, payload: Tensor) -> tuple[Tensor, Tensor]:
        """Return views of the means in a payload: of the numbers ≥ 0, and of the others."""
        upper, lower = numbers(payload[: self.split], self.bucket.work).view(2, self.count)
        return upper, lower

    def encode(self, vector: Tensor, payload: Tensor, seed: int, position: Sequence[int]) -> None:
        upper, lower = self._means(payload)
        upper.zero_()
        lower.zero_()
        above = torch.zeros(self.count, dtype=torch.int64, device=vector.device)
        below = torch.zeros_like(above)
        for which, matrix, signs in in_columns(self.columns, vector, payload[self.split :]):
            bits, counts = pack_signs(matrix)
            signs.copy_(bits)
            above[which] += counts
            below[which] += matrix.shape[1] - counts
            # NaN stays NaN in `clamp`, so a column that is not finite has a mean that is not.
            upper[which] += matrix.clamp(min=0).sum(1)
            lower[which] += matrix.clamp(max=0).sum(1)
        # Where no number has a sign its sum is 0, and so is its mean.
        upper.div_(above.clamp_(min=1))
        lower.div_(below.clamp_(min=1))

    def add(self, payload: Tensor, into: Tensor, sign: int) -> None:
        upper, lower = self._means(payload)
        # 1 if the number is at least 0: it selects the upper mean, and its complement the lower.
        table = bits_table(0.0, 1.0, into.dtype, into.device)
        for which, matrix, signs in in_columns(self.columns, into, payload[self.split :]):
            ones = unpack_signs(signs, matrix.shape[1], table)
            matrix.addcmul_(ones, upper[which, None], value=sign)
            matrix.addcmul_(1 - ones, lower[which, None], value=sign)

    def is_finite(self, payload: Tensor) -> bool:
        return bool(numbers(payload[: self.split], self.bucket.work).isfinite().all())

    def check(self, payload: Tensor) -> None:
        """Accept any bytes, since all are signs."""
