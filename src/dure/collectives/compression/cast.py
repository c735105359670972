"""Cast: numbers travel in half precision.

    bfloat16    float32's range with 8 bits of precision: relative error at most 2^-9
    float16     11 bits of precision, relative error at most 2^-12, between 6e-5 and 65504;
                smaller numbers lose bits, or are 0

The sum is an all-reduce in half precision, whose additions are made in float32
(`dure.collectives.operation`): `one_shot` rounds the sum once, a ring rounds each partial sum. In
float16 each part is divided by N before the cast, and the sum is multiplied by N at the end, so the
sum overflows only if the mean overflows; an overflow is infinite on all ranks.

Cost: the all-reduce's elements, 2 bytes each. No state.

Source: the half precision of mixed-precision training, P. Micikevicius et al., ICLR 2018; as a
hook, torch's `fp16_compress`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from dure.collectives.all_reduce import Algorithm, all_reduce
from dure.collectives.compression.bucket import CompressionBucket
from dure.collectives.compression.compression import Compression, Compressor
from dure.collectives.compression.gathered import Codec
from dure.collectives.compression.none import PlainCodec, elements_sent
from dure.collectives.group import Group
from dure.collectives.shared_memory.pool import empty_shared

HALVES = {"bfloat16": torch.bfloat16, "float16": torch.float16}


@dataclass(frozen=True)
class Cast(Compression):
    """Compression to half precision.

    dtype: `bfloat16` (any size, 8 bits) or `float16` (up to 65504, 11 bits). Raises ValueError for
    other dtypes.
    """

    name: ClassVar[str] = "cast"
    dtype: str = "bfloat16"

    def __post_init__(self) -> None:
        if self.dtype not in HALVES:
            raise ValueError(f"cast: the dtype has to be {' or '.join(HALVES)}, not {self.dtype!r}")

    def codec(self, bucket: CompressionBucket) -> Codec:
        return PlainCodec(bucket, HALVES[self.dtype])

    def compressor(self, like: Sequence[Tensor], seed: int) -> Compressor:
        return CastCompressor(CompressionBucket(like), HALVES[self.dtype])

    def bytes_sent(
        self,
        like: Sequence[Tensor],
        size: int,
        rank: int = 0,
        algorithm: Algorithm = "one_shot",
        call: int | None = None,
    ) -> int:
        return 2 * elements_sent(CompressionBucket(like).n, size, rank, algorithm)


class CastCompressor:
    """All-reduce of the bucket in half precision."""

    def __init__(self, bucket: CompressionBucket, half: torch.dtype) -> None:
        self.bucket = bucket
        self.half = half
        self.message: Tensor | None = None

    @torch.no_grad()
    def all_reduce(
        self,
        tensors: Sequence[Tensor],
        group: Group | torch.distributed.ProcessGroup | None,
        algorithm: Algorithm = "one_shot",
    ) -> None:
        self.bucket.check(tensors)
        group = Group.of(group)
        if self.message is None:
            self.message = self._memory(group)
        vector = self.bucket.vector(tensors)
        # float16 ends at 65504: division before the sum keeps the sum as small as the mean.
        # bfloat16 has the range of float32 and needs no division.
        divided = self.half == torch.float16
        self.message.copy_(vector.div_(group.size) if divided else vector)
        all_reduce(self.message, group, algorithm)
        vector.copy_(self.message)
        self.bucket.give_back(vector.mul_(group.size) if divided else vector, tensors)

    def _memory(self, group: Group) -> Tensor:
        """Return the buffer for all calls: shared memory, if the backend reduces there."""
        if self.bucket.device.type == "cpu" and group.backend(self.bucket.device) == "dure":
            return empty_shared(self.bucket.n, dtype=self.half)
        return torch.empty(self.bucket.n, dtype=self.half, device=self.bucket.device)

    def state(self) -> dict[str, Any]:
        return {}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Do nothing, since there is no state."""
