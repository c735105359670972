"""Compressions: settings, and the compressors that they make for a bucket of tensors.

A *compression* is a frozen dataclass of the paper's hyperparameters. For a bucket of tensors it
makes a *compressor*, which sums over the ranks of a group with fewer bytes, and keeps state from
call to call. Most have a *codec* too, which encodes tensors as bytes and decodes them; their
compressor all-gathers the ranks' bytes and adds the decoded vectors, in order of rank
(`dure.collectives.compression.gathered`).

As text: the name and the values, `top-k:0.01`, `power-sgd:2`, `none`; `parse` is the inverse of
`str`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Protocol

import torch
from torch import Tensor

from dure.arguments import NamedSettings
from dure.collectives.all_reduce import Algorithm
from dure.collectives.compression.bucket import CompressionBucket
from dure.collectives.compression.gathered import Codec, GatheredCompressor
from dure.collectives.group import Group
from dure.settings import write


class Compressor(Protocol):
    """Compression at work on a bucket of tensors, on a rank."""

    def all_reduce(
        self,
        tensors: Sequence[Tensor],
        group: Group | torch.distributed.ProcessGroup | None,
        algorithm: Algorithm = "one_shot",
    ) -> None:
        """Replace each tensor, in place, by an approximation of its sum over the ranks.

        The result has the same bits on all ranks.
        tensors: of the shapes and the dtype that the compressor was made for. All ranks call it
        together.
        group: as in `dure.collectives.all_reduce`.
        algorithm: algorithm of the transfer. A compression that gathers the ranks' bytes uses
        `ring` and `native` directly, and `native` for `auto` on a backend that is made for the
        device. For all other algorithms every rank sends directly to all ranks; the bytes are the
        same.

        A number that is not finite on any rank is not finite on all ranks afterwards, and error
        feedback then stays unchanged. Raises ValueError for tensors that do not match;
        PeerLostError if a rank is lost.
        """

    def state(self) -> dict[str, Any]:
        """Return the complete state: tensors, numbers, and lists of them.

        The values are copies; a restored compressor continues with the same bits.
        """

    def restore(self, state: Mapping[str, Any]) -> None:
        """Continue from a `state`. Raises ValueError for another bucket's state."""


@dataclass(frozen=True)
class Compression(NamedSettings):
    """Base of all compressions: a name, a text form, compressors, mostly a codec."""

    compresses: ClassVar[bool] = True
    """Whether anything other than the unchanged tensors travels."""
    remembers: ClassVar[bool] = False
    """Whether the unsent remainder is added to the next vector (error feedback)."""

    def __str__(self) -> str:
        """Return the text that `parse` reads: the name and the fields."""
        return write(self)

    def codec(self, bucket: CompressionBucket) -> Codec:
        """Return the codec of the bucket. Raises ValueError if only ranks together can compress."""
        raise NotImplementedError

    def compressor(self, like: Sequence[Tensor], seed: int) -> Compressor:
        """Return the compressor of a bucket.

        like: tensors with the shapes, the dtype and the device of the tensors to sum, all of the
        same floating-point dtype; shapes matter for `PowerSGD`, `OneBit` and `Sign`. seed: the same
        on all ranks, different for each bucket.
        """
        return GatheredCompressor(self.codec(CompressionBucket(like)), self.remembers, seed)

    def bytes_sent(
        self,
        like: Sequence[Tensor],
        size: int,
        rank: int = 0,
        algorithm: Algorithm = "one_shot",
        call: int | None = None,
    ) -> int:
        """Return the bytes that `rank` of `size` sends in an `all_reduce`.

        For gathered payloads that is N-1 times their length.

        Args:
            like: tensors of the bucket.
            size: number of ranks.
            rank: the sending rank.
            algorithm: as in `Compressor.all_reduce`.
            call: number of the call, from 0, for compressions whose first calls differ
                (`PowerSGD`); None
                for a later call.
        """
        return (size - 1) * self.codec(CompressionBucket(like)).nbytes

    def payload_bytes(self, like: Sequence[Tensor]) -> int:
        """Return the length of `encode`'s result for tensors of these shapes.

        Raises ValueError without a codec.
        """
        return self.codec(CompressionBucket(like)).nbytes

    @torch.no_grad()
    def encode(self, tensors: Sequence[Tensor], seed: int = 0, *position: int) -> Tensor:
        """Return the tensors as bytes, for a message: uint8 of shape (payload_bytes(tensors),).

        seed, position: arguments of the random numbers of `QSGD`; pass the round and the client. No
        state is kept: for error feedback there is `ErrorFeedback`.
        """
        codec = self.codec(CompressionBucket(tensors))
        payload = torch.empty(codec.nbytes, dtype=torch.uint8, device=codec.bucket.device)
        codec.encode(codec.bucket.vector(tensors), payload, seed, position)
        return payload

    @torch.no_grad()
    def decode(self, payload: Tensor, like: Sequence[Tensor]) -> list[Tensor]:
        """Return new tensors of the shapes and the dtype of `like`, decoded from `encode`'s result.

        Raises ValueError for bytes that `encode` cannot have written for these shapes.
        """
        codec = self.codec(CompressionBucket(like))
        if payload.dtype != torch.uint8 or payload.shape != (codec.nbytes,):
            raise ValueError(
                f"{self}: {codec.nbytes} bytes were expected for these shapes, not {payload.dtype} "
                f"of shape "
                f"{tuple(payload.shape)}; sender and receiver have to name the same compression "
                f"and shapes"
            )
        codec.check(payload)
        # Codecs only add, as in a sum over ranks: decoding is adding to zeros.
        vector = codec.bucket.zeros()
        codec.add(payload, vector, 1)
        return codec.bucket.tensors(vector)
