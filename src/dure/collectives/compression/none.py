"""No compression: the tensors are all-reduced unchanged.

Cost: n elements of the tensors' own dtype, as in the all-reduce.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from dure.collectives.algorithms.table import ALL_REDUCES
from dure.collectives.all_reduce import Algorithm, all_reduce
from dure.collectives.compression.bucket import CompressionBucket, one_piece
from dure.collectives.compression.compression import Compression, Compressor
from dure.collectives.compression.gathered import Codec
from dure.collectives.compression.packing import in_blocks, numbers
from dure.collectives.group import Group


@dataclass(frozen=True)
class NoCompression(Compression):
    """No compression: the tensors travel unchanged."""

    name: ClassVar[str] = "none"
    compresses: ClassVar[bool] = False

    def codec(self, bucket: CompressionBucket) -> Codec:
        return PlainCodec(bucket, bucket.dtype)

    def compressor(self, like: Sequence[Tensor], seed: int) -> Compressor:
        return PlainCompressor(CompressionBucket(like))

    def bytes_sent(
        self,
        like: Sequence[Tensor],
        size: int,
        rank: int = 0,
        algorithm: Algorithm = "one_shot",
        call: int | None = None,
    ) -> int:
        bucket = CompressionBucket(like)
        return elements_sent(bucket.n, size, rank, algorithm) * bucket.dtype.itemsize


def elements_sent(n: int, size: int, rank: int, algorithm: Algorithm) -> int:
    """Return the elements that a rank sends in an all-reduce.

    Raises ValueError for `auto`, which may choose any other algorithm.
    """
    if algorithm not in ALL_REDUCES:
        raise ValueError(
            f"what {algorithm!r} sends depends on its choice; name one of {', '.join(ALL_REDUCES)}"
        )
    return ALL_REDUCES[algorithm].elements_sent(n, size, rank) if size > 1 else 0


class PlainCodec:
    """Codec that casts the numbers to a dtype."""

    def __init__(self, bucket: CompressionBucket, dtype: torch.dtype) -> None:
        self.bucket = bucket
        self.dtype = dtype
        self.nbytes = bucket.n * dtype.itemsize

    def encode(self, vector: Tensor, payload: Tensor, seed: int, position: Sequence[int]) -> None:
        payload.view(self.dtype).copy_(vector)

    def add(self, payload: Tensor, into: Tensor, sign: int) -> None:
        given = numbers(payload, self.dtype)
        # In blocks, so that a piece is converted and added while it is in the cache.
        for _, part in in_blocks(1, len(into), into.device):
            into[part].add_(given[part].to(into.dtype), alpha=sign)

    def is_finite(self, payload: Tensor) -> bool:
        return bool(numbers(payload, self.dtype).isfinite().all())

    def check(self, payload: Tensor) -> None:
        """Accept any bytes, since all are numbers."""


class PlainCompressor:
    """All-reduce of the bucket as a single message."""

    def __init__(self, bucket: CompressionBucket) -> None:
        self.bucket = bucket

    @torch.no_grad()
    def all_reduce(
        self,
        tensors: Sequence[Tensor],
        group: Group | torch.distributed.ProcessGroup | None,
        algorithm: Algorithm = "one_shot",
    ) -> None:
        self.bucket.check(tensors)
        whole = one_piece(tensors)
        vector = (
            whole
            if whole is not None
            else torch.cat([tensor.detach().reshape(-1) for tensor in tensors])
        )
        all_reduce(vector, group, algorithm)
        self.bucket.give_back(vector, tensors)

    def state(self) -> dict[str, Any]:
        return {}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Do nothing, since there is no state."""
