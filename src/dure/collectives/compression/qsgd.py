"""QSGD: numbers are rounded at random to one of 2s+1 levels, without bias.

The expectation of the received vector is the sent vector. For a bucket v of numbers, with an
independent random choice for each number:

    Q(v)_i = ‖v‖ · sign(v_i) · l_i / s
    l_i = ⌊x⌋ + 1 with probability x - ⌊x⌋, else ⌊x⌋;  x = s |v_i| / ‖v‖

E[Q(v)] = v, E‖Q(v) - v‖² ≤ min(n/s², √n/s) ‖v‖² and at most s(s + √n) numbers of a bucket of n are
nonzero in expectation. A bucket of zeros is sent as zeros; a bucket with a number that is not
finite is sent as NaN. No state.

Cost: b = ⌈log2(2s+1)⌉ bits a number without gaps, and the norm of each bucket, 4 bytes (8 in
float64): ⌈n·b/8⌉ + 4⌈n/bucket⌉ bytes to each of N-1 others. (The paper's Elias code is shorter if
most levels are 0, and varies.) Random numbers are a function of (seed, call, rank).

Source: D. Alistarh et al., "QSGD: Communication-Efficient SGD via Gradient Quantization and
Encoding", NeurIPS 2017.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import ClassVar

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import pad

from dure.arguments import between
from dure.collectives.compression.bucket import CompressionBucket
from dure.collectives.compression.compression import Compression
from dure.collectives.compression.gathered import Codec
from dure.collectives.compression.packing import BLOCK, numbers, pack, packed_bytes, unpack
from dure.randomness.seeds import derive


@dataclass(frozen=True)
class QSGD(Compression):
    """Random rounding to `levels` on each side of 0, relative to the norm of each `bucket`.

    levels: 1 are 2 bits a number, 7 are 4 bits, 127 are 8 bits; at most 32767. bucket: a multiple
    of 8; short buckets are more exact. Raises ValueError for other values.
    """

    name: ClassVar[str] = "qsgd"
    levels: int = field(default=7, metadata=between(1, 32767))
    bucket: int = 512

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.bucket < 8 or self.bucket % 8:
            raise ValueError(
                f"qsgd: the bucket has to be a positive multiple of 8, not {self.bucket}"
            )

    @property
    def bits(self) -> int:
        """Bits a number: ⌈log2(2 · levels + 1)⌉."""
        return (2 * self.levels).bit_length()

    def codec(self, bucket: CompressionBucket) -> Codec:
        return QSGDCodec(bucket, self)


class QSGDCodec:
    """Codec with the payload: each bucket's norm in the work dtype; then levels plus s.

    Each level takes b bits.
    """

    def __init__(self, bucket: CompressionBucket, settings: QSGD) -> None:
        self.bucket = bucket
        self.levels = settings.levels
        self.bits = settings.bits
        self.length = settings.bucket
        self.code = torch.uint8 if self.bits <= 8 else torch.int32
        self.split = -(-bucket.n // self.length) * bucket.work.itemsize
        # Pieces of whole buckets that stay in the cache; on a GPU, one piece. Buckets are multiples
        # of 8 numbers, so that a piece begins at a whole byte.
        on_cpu = bucket.device.type == "cpu"
        self.step = max(BLOCK // self.length, 1) * self.length if on_cpu else max(bucket.n, 1)
        self.nbytes = self.split + packed_bytes(bucket.n, self.bits)

    def _blocks(self) -> Iterator[tuple[int, int, slice]]:
        """Yield (start, end, buckets) of the pieces: whole buckets, except at the end."""
        for start in range(0, self.bucket.n, self.step):
            end = min(start + self.step, self.bucket.n)
            yield start, end, slice(start // self.length, -(-end // self.length))

    def _rows(self, piece: Tensor) -> Tensor:
        """Return a piece with a bucket a row, the last row padded with zeros."""
        rest = -len(piece) % self.length
        return (pad(piece, (0, rest)) if rest else piece).view(-1, self.length)

    def encode(self, vector: Tensor, payload: Tensor, seed: int, position: Sequence[int]) -> None:
        norms = numbers(payload[: self.split], vector.dtype)
        levels = payload[self.split :]
        noise = RoundingNoise(derive(seed, "qsgd", *position), vector.dtype, vector.device)
        scratch = vector.new_empty(-(-min(self.step, len(vector)) // self.length), self.length)
        whole = len(vector) // self.length * self.length
        norms[: whole // self.length] = norms_of(vector[:whole].view(-1, self.length))
        if whole < len(vector):
            norms[-1:] = norms_of(vector[None, whole:])
        # Avoids 0/0 for a bucket of zeros: any nonzero unit gives zeros. NaN fails the comparison
        # too; its levels do not matter, since the norm is NaN at the receiver.
        units = torch.where(norms > 0, norms, 1) / self.levels
        for start, end, buckets in self._blocks():
            rows = self._rows(vector[start:end])
            exact = torch.div(rows, units[buckets, None], out=scratch[: len(rows)]).view(-1)[
                : end - start
            ]
            # x + u, with u in [0, 1), rounds down to the upper level with probability x - ⌊x⌋. The
            # noise is in [1, 2), so the shift to levels from 0 is by s - 1 instead of s.
            exact.add_(noise.from_1_to_2(end - start)).floor_().add_(self.levels - 1)
            codes = exact.to(torch.int32).clamp_(0, 2 * self.levels).to(self.code)
            pack(codes, self.bits, levels[start * self.bits // 8 : packed_bytes(end, self.bits)])

    def _codes(self, payload: Tensor, start: int, end: int) -> Tensor:
        """Return the levels plus s of the numbers from `start` to `end`."""
        levels = payload[self.split :]
        return unpack(
            levels[start * self.bits // 8 : packed_bytes(end, self.bits)], self.bits, end - start
        )

    def add(self, payload: Tensor, into: Tensor, sign: int) -> None:
        units = numbers(payload[: self.split], into.dtype) / self.levels
        for start, end, buckets in self._blocks():
            rows = self._rows(self._codes(payload, start, end).to(into.dtype).sub_(self.levels))
            into[start:end].add_(
                rows.mul_(units[buckets, None]).view(-1)[: end - start], alpha=sign
            )

    def is_finite(self, payload: Tensor) -> bool:
        return bool(numbers(payload[: self.split], self.bucket.work).isfinite().all())

    def check(self, payload: Tensor) -> None:
        if bool((numbers(payload[: self.split], self.bucket.work) < 0).any()):
            raise ValueError("qsgd: a norm is negative")
        for start, end, _ in self._blocks():
            if int(self._codes(payload, start, end).max()) > 2 * self.levels:
                raise ValueError(f"qsgd: a level is above {self.levels}")


def norms_of(rows: Tensor) -> Tensor:
    """Return the 2-norm of each row; NaN if not finite. Squares neither overflow nor underflow."""
    norms: Tensor = torch.linalg.vector_norm(rows, dim=1)
    # Between these bounds no significant square overflows or underflows. Other rows are divided by
    # their largest number first.
    safe = torch.finfo(rows.dtype).tiny ** 0.25
    unsafe = ~((norms > safe) & (norms < 1 / safe))
    if bool(unsafe.any()):
        some = rows[unsafe].abs_()
        if bool(some.sum(1).any()):  # otherwise they are zeros
            largest = some.amax(1)
            some /= torch.where(largest > 0, largest, 1)[:, None]
            norms[unsafe] = largest * torch.linalg.vector_norm(some, dim=1)
    return norms.masked_fill_(~norms.isfinite(), torch.nan)


class RoundingNoise:
    """Random numbers, uniform in [1, 2), that depend on the seed alone.

    The bits of the mantissa are drawn.
    """

    def __init__(self, seed: int, dtype: torch.dtype, device: torch.device) -> None:
        self.dtype = dtype
        self.device = device
        # A random mantissa under the exponent of 1 is uniform in [1, 2), without a division.
        mantissa, one = (23, 0x3F800000) if dtype == torch.float32 else (52, 0x3FF0000000000000)
        self.mask = (1 << mantissa) - 1
        self.one = one
        self.bits = torch.int32 if dtype == torch.float32 else torch.int64
        if device.type == "cpu":
            self.words = np.random.SFC64(seed)
        else:
            self.generator = torch.Generator(device).manual_seed(seed)

    def from_1_to_2(self, count: int) -> Tensor:
        """Return the next `count` numbers."""
        if self.device.type != "cpu":
            bits = torch.empty(count, dtype=self.bits, device=self.device).random_(
                generator=self.generator
            )
            return bits.bitwise_and_(self.mask).bitwise_or_(self.one).view(self.dtype)
        drawn = self.words.random_raw(-(-count * self.dtype.itemsize // 8)).view(
            f"i{self.dtype.itemsize}"
        )[:count]
        drawn &= self.mask
        drawn |= self.one
        return torch.from_numpy(drawn).view(self.dtype)
