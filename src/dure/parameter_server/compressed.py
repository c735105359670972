"""Compressed pushes: the message of a codec in place of a gradient.

    worker    p = weight · g + e;   push C(p);   e <- p - decoded C(p)
    server    staleness 0   g = sum of the decoded pushes of a clock / sum of their weights
              s, None       g = a decoded push

e is the error feedback of a worker for a shard, 0 at first; codecs without memory have no e. A
weight is a fraction of a batch, so e is in the units of the server's sum, and the residual of a
large part is not magnified by a small part: gradients arrive late, but completely. With staleness 0
the fraction is the part's count by the loss over the expected count of the batch, which all workers
know (`dure.tasks.loss_shares`); the fractions of a clock add up to 1, unless only the loss can
determine the count.

A message is encoded once, and retries send the same bytes. So e does not depend on lost messages; e
is stored at the worker and is lost with the worker.

    bytes of a push     of the codec's message, for each shard (`dure.collectives.compression`)

A shard is a bucket of tensors. A tensor that spans two shards is cut: between rows of its first
dimension, which are the columns of 1-bit SGD, and within a row if needed.

Source: Karimireddy et al. 2019, "Error Feedback Fixes SignSGD and other Gradient Compression
Schemes"; Li et al. 2014, section 4.2, for compressed messages.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor, nn

from dure.collectives.compression import Codec, Compression, ErrorFeedback
from dure.collectives.compression.bucket import CompressionBucket
from dure.parameter_server.keys import KeyRange
from dure.randomness.seeds import derive
from dure.tensors.flat import by_dtype


class VectorShapes(NamedTuple):
    """Dtype and shapes of the tensors of a vector, in the order of their keys."""

    dtype: torch.dtype
    shapes: tuple[torch.Size, ...]


class PushCoding:
    """Encoder and decoder of gradients of key ranges.

    Args:
        compression: the codec's settings.
        parameters: parameters behind the keys.
        waits: as in `PushCompressor`.
    """

    def __init__(
        self, compression: Compression, parameters: Sequence[nn.Parameter], waits: bool = False
    ) -> None:
        self.compression = compression
        self.waits = waits
        self._layers = [
            VectorShapes(dtype, tuple(parameter.shape for parameter in vector))
            for dtype, vector in by_dtype(parameters).items()
        ]
        self._codecs: dict[KeyRange, Codec] = {}

    def codec(self, keys: KeyRange) -> Codec:
        """Return the codec of these keys. Raises ValueError if the compression has none."""
        found = self._codecs.get(keys)
        if found is None:
            found = self._codecs[keys] = self.compression.codec(self._bucket(keys))
        return found

    def _bucket(self, keys: KeyRange) -> CompressionBucket:
        layer = self._layers[keys.vector]
        shapes = pieces_of(layer.shapes, keys.start, keys.stop)
        # Uninitialised memory, only for shapes; freed at once.
        whole = torch.empty(len(keys), dtype=layer.dtype)
        pieces = torch.split(whole, [shape.numel() for shape in shapes])
        return CompressionBucket(
            [piece.view(shape) for piece, shape in zip(pieces, shapes, strict=True)]
        )

    def compressors(
        self, seed: int, worker: int, shards: Sequence[KeyRange]
    ) -> list[PushCompressor]:
        """Return the compressors of a worker's pushes, one for each shard.

        `seed` seeds random rounding, which differs by worker, shard and push.
        """
        return [
            PushCompressor(
                self.codec(keys),
                self.compression.remembers,
                seed,
                (worker, keys.vector, keys.start),
                self.waits,
            )
            for keys in shards
        ]

    def check(self, keys: KeyRange, message: Tensor) -> None:
        """Check that bytes are a message about these keys; raises ValueError if not."""
        codec = self.codec(keys)
        if message.dtype != torch.uint8 or message.shape != (codec.nbytes,):
            raise ValueError(
                f"a push to the keys {keys.start} to {keys.stop - 1} has to have {codec.nbytes} "
                f"bytes of {self.compression}, not {message.dtype} of shape {tuple(message.shape)}"
            )
        codec.check(message)

    @torch.no_grad()
    def sum_of(self, keys: KeyRange, messages: Sequence[Tensor], scale: float = 1.0) -> Tensor:
        """Return the sum of decoded messages, in their order, times `scale`: a gradient."""
        codec = self.codec(keys)
        total = codec.bucket.zeros()
        for message in messages:
            codec.add(message, total, 1)
        if scale != 1.0:
            total.mul_(scale)
        # Half-precision sums are rounded once, at the end.
        return total.to(codec.bucket.dtype)


class PushCompressor:
    """Compressor of a worker's pushes to a shard.

    Args:
        codec: codec of the shard's keys.
        remembers: whether to use error feedback.
        seed: seed of random rounding.
        place: numbers of the worker and the shard, in all random draws.
        waits: whether the residual is kept for a later push if a push has weight 0, since such a
            push
            makes no step.
    """

    def __init__(
        self,
        codec: Codec,
        remembers: bool,
        seed: int,
        place: tuple[int, ...],
        waits: bool = False,
    ) -> None:
        self.codec = codec
        self._waits = waits
        self._seed = seed
        self._place = place
        bucket = codec.bucket
        self._feedback = ErrorFeedback(bucket.n, bucket.work) if remembers else None

    @property
    def keys(self) -> int:
        """Number of keys in a message."""
        return self.codec.bucket.n

    @torch.no_grad()
    def encode(self, gradient: Tensor, weight: float, clock: int) -> Tensor:
        """Return the message of the worker's push number `clock`, uint8; updates the residual.

        Call this once for each push.
        """
        codec = self.codec
        if self._waits and not weight:
            return self._nothing(clock)
        vector = gradient.to(codec.bucket.work)
        if weight != 1.0:
            vector = vector * weight
        feedback = self._feedback
        corrected = vector if feedback is None else feedback.corrected(vector)
        message = torch.empty(codec.nbytes, dtype=torch.uint8)
        codec.encode(corrected, message, self._seed, (*self._place, clock))
        # A non-finite gradient is sent, but must not enter the residual.
        if feedback is not None and codec.is_finite(message):
            codec.add(message, corrected, -1)
            feedback.keep()
        return message

    def _nothing(self, clock: int) -> Tensor:
        """Return the message of a push without a step; the residual stays for the next push."""
        message = torch.empty(self.codec.nbytes, dtype=torch.uint8)
        zeros = self.codec.bucket.zeros()
        self.codec.encode(zeros, message, self._seed, (*self._place, clock))
        return message

    @torch.no_grad()
    def decode(self, message: Tensor) -> Tensor:
        """Return the server's decoded message: approximately weight · g."""
        total = self.codec.bucket.zeros()
        self.codec.add(message, total, 1)
        return total.to(self.codec.bucket.dtype)

    @property
    def unsent(self) -> Tensor | None:
        """Residual e, shape (keys,), in the working dtype; None without error feedback."""
        return None if self._feedback is None else self._feedback.error

    def take_unsent(self, error: Tensor) -> None:
        """Restore the residual. Raises ValueError for another number of keys."""
        assert self._feedback is not None
        if error.shape != self._feedback.error.shape:
            raise ValueError(
                f"a compression error has {len(error)} keys, but the shard has {self.keys}"
            )
        self._feedback.error.copy_(error)


def compressors_of(
    coding: PushCoding | None, seed: int, worker: int, shards: Sequence[KeyRange]
) -> list[PushCompressor]:
    """Return a worker's compressors, one for each shard; empty without compression."""
    if coding is None:
        return []
    return coding.compressors(derive(seed, "compression"), worker, shards)


def push_bytes(coding: PushCoding | None, shards: Sequence[KeyRange]) -> list[int] | None:
    """Return bytes of a compressed push, by shard; None without compression."""
    return None if coding is None else [coding.codec(keys).nbytes for keys in shards]


def pieces_of(shapes: Sequence[torch.Size], start: int, stop: int) -> list[torch.Size]:
    """Return the shapes of tensors and pieces at the keys start … stop-1 of consecutive tensors."""
    pieces: list[torch.Size] = []
    first = 0
    for shape in shapes:
        last = first + shape.numel()
        begin = max(first, start)
        end = min(last, stop)
        if begin < end:
            pieces += _piece(shape, begin - first, end - first)
        first = last
    return pieces


def _piece(shape: torch.Size, begin: int, end: int) -> list[torch.Size]:
    """Return shapes of elements begin … end-1 of a tensor.

    Whole rows, and the rest at both ends.
    """
    if end - begin == shape.numel():
        return [shape]
    row = shape[1:].numel()
    first = -(-begin // row)
    last = end // row
    if len(shape) < 2 or first > last:
        return [torch.Size([end - begin])]
    parts = [(first * row - begin,), (last - first, *shape[1:]), (end - last * row,)]
    return [torch.Size(part) for part in parts if part[0]]
