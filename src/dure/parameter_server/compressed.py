"""Pushes in fewer bytes: the message of a codec in the place of a gradient.

    worker    p = weight · g + e;   push C(p);   e <- p - what C(p) decodes to
    server    staleness 0   g = sum of what the pushes of a clock decode to / sum of their weights
              s, None       g = what a push decodes to

e is the error feedback of one worker and one shard, 0 at first; codecs that remember nothing have
none. A weight is a share of a batch, so e is in the units of what the server adds up, and what was
left out of a large part is not blown up by a small one: nothing is lost, only late. With staleness
0 the share is what the loss has counted in the part, over what all know beforehand of the batch
(`dure.tasks.loss_shares`); the shares of a clock add up to 1, but where only the loss can tell what
counts.

A message is encoded once, and the same bytes are sent again. So e does not depend on what gets
lost; it is kept where the worker is, and dies with it.

    bytes of a push     of the codec's message, for each shard (`dure.collectives.compression`)

A shard is a bucket of tensors. A tensor that lies in two shards is cut: between rows of its first
dimension, which are the columns of 1-bit SGD, and within a row if need be.

Source: Karimireddy et al. 2019, "Error Feedback Fixes SignSGD and other Gradient Compression
Schemes"; Li et al. 2014, section 4.2, for compressed messages.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor, nn

from dure.collectives.compression import Codec, Compression, ErrorFeedback
from dure.collectives.compression.bucket import Bucket
from dure.parameter_server.keys import Range
from dure.randomness.seeds import derive
from dure.tensors.flat import by_dtype


class Layer(NamedTuple):
    """The tensors of a vector, in the order of their keys."""

    dtype: torch.dtype
    shapes: tuple[torch.Size, ...]


class Coding:
    """How gradients of keys become messages, and messages gradients.

    parameters: those that the keys are of. waits: as in `PushCompressor`.
    """

    def __init__(
        self, compression: Compression, parameters: Sequence[nn.Parameter], waits: bool = False
    ) -> None:
        self.compression = compression
        self.waits = waits
        self._layers = [
            Layer(dtype, tuple(parameter.shape for parameter in vector))
            for dtype, vector in by_dtype(parameters).items()
        ]
        self._codecs: dict[Range, Codec] = {}

    def codec(self, keys: Range) -> Codec:
        """What encodes gradients of these keys. Raises ValueError where nothing can."""
        found = self._codecs.get(keys)
        if found is None:
            found = self._codecs[keys] = self.compression.codec(self._bucket(keys))
        return found

    def _bucket(self, keys: Range) -> Bucket:
        layer = self._layers[keys.vector]
        shapes = pieces_of(layer.shapes, keys.start, keys.stop)
        # Memory that nothing is written to, and that is let go of at once.
        whole = torch.empty(len(keys), dtype=layer.dtype)
        pieces = torch.split(whole, [shape.numel() for shape in shapes])
        return Bucket([piece.view(shape) for piece, shape in zip(pieces, shapes, strict=True)])

    def compressors(self, seed: int, worker: int, shards: Sequence[Range]) -> list[PushCompressor]:
        """What encodes the pushes of a worker to these shards.

        seed: of random rounding, which is another for each worker, shard and push.
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

    def check(self, keys: Range, message: Tensor) -> None:
        """Raises ValueError for bytes that are no message about these keys."""
        codec = self.codec(keys)
        if message.dtype != torch.uint8 or message.shape != (codec.nbytes,):
            raise ValueError(
                f"a push to the keys {keys.start} to {keys.stop - 1} has {codec.nbytes} bytes of "
                f"{self.compression}, and not {message.dtype} of shape {tuple(message.shape)}"
            )
        codec.check(message)

    @torch.no_grad()
    def sum_of(self, keys: Range, messages: Sequence[Tensor], scale: float = 1.0) -> Tensor:
        """What messages decode to, added up in their order, times `scale`: a gradient."""
        codec = self.codec(keys)
        total = codec.bucket.zeros()
        for message in messages:
            codec.add(message, total, 1)
        if scale != 1.0:
            total.mul_(scale)
        # Halves are rounded once, at the end.
        return total.to(codec.bucket.dtype)


class PushCompressor:
    """What encodes the pushes of a worker to one shard.

    remembers: whether with error feedback. place: of the worker and the shard in all random draws.
    waits: whether what was left out waits where a push counts nothing, since it makes no step.
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
        """How many a message is about."""
        return self.codec.bucket.n

    @torch.no_grad()
    def encode(self, gradient: Tensor, weight: float, clock: int) -> Tensor:
        """The message of the worker's `clock`-th push, uint8, which is to be called for once."""
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
        # A gradient that is not finite is sent as it is, and leaves no trace in the error.
        if feedback is not None and codec.is_finite(message):
            codec.add(message, corrected, -1)
            feedback.keep()
        return message

    def _nothing(self, clock: int) -> Tensor:
        """The message of a push that makes no step: what was left out stays for the next."""
        message = torch.empty(self.codec.nbytes, dtype=torch.uint8)
        zeros = self.codec.bucket.zeros()
        self.codec.encode(zeros, message, self._seed, (*self._place, clock))
        return message

    @torch.no_grad()
    def decode(self, message: Tensor) -> Tensor:
        """What a server makes of one of its messages: weight · g, nearly."""
        total = self.codec.bucket.zeros()
        self.codec.add(message, total, 1)
        return total.to(self.codec.bucket.dtype)

    @property
    def unsent(self) -> Tensor | None:
        """The error e, shape (keys,), in the dtype that is computed with; None without feedback."""
        return None if self._feedback is None else self._feedback.error

    def take_unsent(self, error: Tensor) -> None:
        """Goes on with the error of before. Raises ValueError for that of other keys."""
        assert self._feedback is not None
        if error.shape != self._feedback.error.shape:
            raise ValueError(
                f"an error of {len(error)} keys is none of a shard that has {self.keys}"
            )
        self._feedback.error.copy_(error)


def compressors_of(
    coding: Coding | None, seed: int, worker: int, shards: Sequence[Range]
) -> list[PushCompressor]:
    """What encodes the pushes of a worker to these shards; none where they are not compressed."""
    if coding is None:
        return []
    return coding.compressors(derive(seed, "compression"), worker, shards)


def push_bytes(coding: Coding | None, shards: Sequence[Range]) -> list[int] | None:
    """Bytes of a compressed push, by shard; None where pushes are gradients as they are."""
    return None if coding is None else [coding.codec(keys).nbytes for keys in shards]


def pieces_of(shapes: Sequence[torch.Size], start: int, stop: int) -> list[torch.Size]:
    """What lies at the keys start … stop-1 of tensors one after another: tensors and pieces."""
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
    """The elements begin … end-1 of a tensor: whole rows, and what is left before and after."""
    if end - begin == shape.numel():
        return [shape]
    row = shape[1:].numel()
    first = -(-begin // row)
    last = end // row
    if len(shape) < 2 or first > last:
        return [torch.Size([end - begin])]
    parts = [(first * row - begin,), (last - first, *shape[1:]), (end - last * row,)]
    return [torch.Size(part) for part in parts if part[0]]
