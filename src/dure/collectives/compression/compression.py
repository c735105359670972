"""What a compression is: settings, and what they make for a bucket of tensors.

A *compression* is a frozen dataclass of the paper's hyperparameters. For a bucket of tensors it
makes a *compressor*, which sums over the ranks of a group while fewer bytes travel, and keeps what
has to be remembered from call to call. Most have a *codec* too, which makes bytes of tensors and
tensors of bytes; their compressor all-gathers the ranks' bytes and adds what they decode to, in
order of rank (`dure.collectives.compression.gathered`).

As text: the name and the values, `top-k:0.01`, `power-sgd:2`, `none`; `parse` reads what `str`
writes.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Protocol

import torch
from torch import Tensor

from dure.arguments import Told
from dure.collectives.all_reduce import Algorithm
from dure.collectives.compression.bucket import Bucket
from dure.collectives.compression.gathered import Codec, GatheredCompressor
from dure.collectives.group import Group
from dure.settings import write


class Compressor(Protocol):
    """A compression at work on one bucket of tensors, on one rank."""

    def all_reduce(
        self,
        tensors: Sequence[Tensor],
        group: Group | torch.distributed.ProcessGroup | None,
        algorithm: Algorithm = "one_shot",
    ) -> None:
        """Replaces each tensor, in place, by an approximation of its sum over the ranks.

        It has the same bits on all ranks.

        tensors: of the shapes and the dtype that the compressor was made for. All ranks call it
        together.

        algorithm: what carries the bytes. A compression whose ranks' bytes are gathered takes
        `ring` and `native` as they are, and `auto` as `native` on a backend that is made for the
        device. For all others every rank sends directly to everybody; the bytes are the same.

        A number that is not finite on any rank arrives as one on all ranks, and error feedback is
        then left as it was. Raises ValueError for other tensors than expected; PeerLostError if a
        rank is lost.
        """

    def state(self) -> dict[str, Any]:
        """All that it needs to go on with the same bits: tensors, numbers, and lists of them.

        They are copies.
        """

    def restore(self, state: Mapping[str, Any]) -> None:
        """Goes on from a `state`. Raises ValueError if it is another bucket's."""


@dataclass(frozen=True)
class Compression(Told):
    """What all compressions have in common: a name, a text form, compressors, mostly a codec."""

    name: ClassVar[str]
    compresses: ClassVar[bool] = True
    """Whether anything else travels than the tensors as they are."""
    remembers: ClassVar[bool] = False
    """Whether what was not sent is added to what comes next (error feedback)."""

    def __str__(self) -> str:
        """The text that `parse` reads: the name and the fields."""
        return write(self)

    def codec(self, bucket: Bucket) -> Codec:
        """What encodes the bucket. Raises ValueError where only ranks together can compress."""
        raise NotImplementedError

    def compressor(self, like: Sequence[Tensor], seed: int) -> Compressor:
        """The compressor of a bucket.

        like: tensors with the shapes, the dtype and the device of those that will be summed, of one
        floating-point dtype; shapes matter for `PowerSGD`, `OneBit` and `Sign`. seed: the same on
        all ranks, another for each bucket.
        """
        return GatheredCompressor(self.codec(Bucket(like)), self.remembers, seed)

    def bytes_sent(
        self,
        like: Sequence[Tensor],
        size: int,
        rank: int = 0,
        algorithm: Algorithm = "one_shot",
        call: int | None = None,
    ) -> int:
        """Bytes that `rank` of `size` sends in an `all_reduce`.

        For gathered payloads that is N-1 times their length.

        call: the number of the call, from 0, for those whose first calls differ (`PowerSGD`); None:
        a later one.
        """
        return (size - 1) * self.codec(Bucket(like)).nbytes

    def payload_bytes(self, like: Sequence[Tensor]) -> int:
        """Length of what `encode` makes of tensors of these shapes.

        Raises ValueError where there is no codec.
        """
        return self.codec(Bucket(like)).nbytes

    @torch.no_grad()
    def encode(self, tensors: Sequence[Tensor], seed: int = 0, *position: int) -> Tensor:
        """The tensors as bytes, for a message: uint8 of shape (payload_bytes(tensors),).

        seed, position: what the random numbers of `QSGD` are a function of; give the round and the
        client. Nothing is remembered: for error feedback there is `ErrorFeedback`.
        """
        codec = self.codec(Bucket(tensors))
        payload = torch.empty(codec.nbytes, dtype=torch.uint8, device=codec.bucket.device)
        codec.encode(codec.bucket.vector(tensors), payload, seed, position)
        return payload

    @torch.no_grad()
    def decode(self, payload: Tensor, like: Sequence[Tensor]) -> list[Tensor]:
        """New tensors of the shapes and the dtype of `like`, from what `encode` returned.

        Raises ValueError for bytes that `encode` cannot have written for these shapes.
        """
        codec = self.codec(Bucket(like))
        if payload.dtype != torch.uint8 or payload.shape != (codec.nbytes,):
            raise ValueError(
                f"{self}: {codec.nbytes} bytes were expected for these shapes, not {payload.dtype} "
                f"of shape "
                f"{tuple(payload.shape)}; sender and receiver have to name the same compression "
                f"and shapes"
            )
        codec.check(payload)
        # Codecs only add, as in a sum over ranks: to decode is to add to zeros.
        vector = codec.bucket.zeros()
        codec.add(payload, vector, 1)
        return codec.bucket.tensors(vector)
