"""Signs with error feedback: only signs travel, with the mean magnitude of each tensor.

    p = g + e;  sent = ‖p‖₁/d · sgn(p) for a tensor of d numbers, sgn(0) = 1;  e = p - sent

Contraction: ‖sent - p‖² = (1 - ‖p‖₁² / (d ‖p‖²)) ‖p‖² for each tensor. The sign alone, without
error feedback, is known not to converge. A tensor with a number that is not finite is not finite at
the receiver.

Cost: ⌈d/8⌉ + 4 bytes a tensor (+ 8 in float64), to each of N-1 others.

Source: S. Karimireddy, Q. Rebjock, S. Stich, M. Jaggi, "Error Feedback Fixes SignSGD and other
Gradient Compression Schemes", ICML 2019.
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
class Sign(Compression):
    """1 bit a number and a mean magnitude a tensor, with error feedback."""

    name: ClassVar[str] = "sign"
    remembers: ClassVar[bool] = True

    def codec(self, bucket: CompressionBucket) -> Codec:
        return SignCodec(bucket)


class SignCodec:
    """Codec with the payload: the mean magnitude of each tensor; then the signs of each."""

    def __init__(self, bucket: CompressionBucket) -> None:
        self.bucket = bucket
        self.columns = [(1, length) for length in bucket.lengths]
        self.split = len(self.columns) * bucket.work.itemsize
        self.nbytes = self.split + sign_bytes(self.columns)

    def _scales(self, payload: Tensor) -> Tensor:
        return numbers(payload[: self.split], self.bucket.work)

    def encode(self, vector: Tensor, payload: Tensor, seed: int, position: Sequence[int]) -> None:
        scales = self._scales(payload).zero_()
        for which, piece, signs in in_columns(self.columns, vector, payload[self.split :]):
            signs.copy_(pack_signs(piece)[0])
            scales[which] += piece.abs().sum(1)
        # A tensor without elements has the scale 0, not 0/0.
        scales.div_(torch.tensor(self.bucket.lengths, device=scales.device).clamp_(min=1))

    def add(self, payload: Tensor, into: Tensor, sign: int) -> None:
        scales = self._scales(payload)
        table = bits_table(-1.0, 1.0, into.dtype, into.device)
        for which, piece, signs in in_columns(self.columns, into, payload[self.split :]):
            piece.addcmul_(
                unpack_signs(signs, piece.shape[1], table), scales[which, None], value=sign
            )

    def is_finite(self, payload: Tensor) -> bool:
        return bool(self._scales(payload).isfinite().all())

    def check(self, payload: Tensor) -> None:
        if bool((self._scales(payload) < 0).any()):
            raise ValueError("sign: a mean magnitude is negative")
