"""PowerSGD: a gradient travels as a matrix of low rank, found by a step of a power iteration.

All ranks make that step together. For each weight, as a matrix M_w (n, m) of n = its first
dimension on rank w, with the same Q (m, r) on all ranks:

    M_w = g_w + e_w                        error feedback
    P = Σ_w M_w Q, orthonormalised         all-reduced
    Q' = Σ_w M_wᵀ P                        all-reduced, the next call's Q (warm start)
    sum = P Q'ᵀ                            on every rank, from the same P and Q'
    e_w = M_w - P Q'ᵀ / N

M_w Q and M_wᵀ P are linear in M_w, so sums of factors are the factors of the sum, and an all-reduce
computes them. The first Q is normal, a function of the seed. Each Q is orthonormalised before use,
so that gradients of a rank lower than r, and later gradients of full rank, span the whole space.
With r = min(n, m) the sum is exact.

Weights of at least two dimensions with r(n+m)·min_compression < n·m are compressed; the rest
travels uncompressed with the factors P. With `start_after`, so many first calls are not compressed
(the authors' library waits for 100). A number that is not finite makes its matrix NaN at the
receivers. P and Q' have the same bits on all ranks. The sums do too if the ranks' processors and
libraries are equal, because each rank orthonormalises and multiplies by itself.

Cost: two all-reduces, of Σ r·n + the rest, and of Σ r·m elements; half-precision numbers travel as
float32.

Source: T. Vogels, S. P. Karimireddy, M. Jaggi, "PowerSGD: Practical Low-Rank Gradient Compression
for Distributed Optimization", NeurIPS 2019, and the authors' library.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor

from dure.arguments import at_least
from dure.collectives.all_reduce import Algorithm, all_reduce
from dure.collectives.compression.bucket import CompressionBucket
from dure.collectives.compression.compression import Compression, Compressor
from dure.collectives.compression.error_feedback import ErrorFeedback
from dure.collectives.compression.gathered import Codec
from dure.collectives.compression.none import elements_sent
from dure.collectives.group import Group
from dure.randomness.seeds import generator


@dataclass(frozen=True)
class PowerSGD(Compression):
    """Low rank, with error feedback.

    rank: rank of the approximation. min_compression: minimum ratio of sizes for a matrix to be
    compressed; 0 compresses all. start_after: calls before the first compressed call. Raises
    ValueError for negative values and for rank 0.
    """

    name: ClassVar[str] = "power-sgd"
    remembers: ClassVar[bool] = True
    rank: int = field(default=2, metadata=at_least(1))
    min_compression: float = field(default=2.0, metadata=at_least(0))
    start_after: int = field(default=0, metadata=at_least(0))

    def codec(self, bucket: CompressionBucket) -> Codec:
        raise ValueError(
            "power-sgd: all ranks compute its factors together; for sends to one receiver use "
            "another compression"
        )

    def compressor(self, like: Sequence[Tensor], seed: int) -> Compressor:
        return PowerSGDCompressor(CompressionBucket(like), self, seed)

    def bytes_sent(
        self,
        like: Sequence[Tensor],
        size: int,
        rank: int = 0,
        algorithm: Algorithm = "one_shot",
        call: int | None = None,
    ) -> int:
        bucket = CompressionBucket(like)
        first, second = message_lengths(bucket, matrices_of(bucket, self, call))
        elements = [elements_sent(length, size, rank, algorithm) for length in (first, second)]
        return bucket.work.itemsize * sum(elements)


class LowRankMatrix(NamedTuple):
    """Compressed tensor: its index, its start in the vector, rows, columns, rank."""

    tensor: int
    start: int
    n: int
    m: int
    r: int

    def of(self, vector: Tensor) -> Tensor:
        return vector[self.start : self.start + self.n * self.m].view(self.n, self.m)


def matrices_of(
    bucket: CompressionBucket, settings: PowerSGD, call: int | None
) -> list[LowRankMatrix]:
    """Return the matrices compressed in this call; None is a later call."""
    if call is not None and call < settings.start_after:
        return []
    matrices = []
    start = 0
    for number, (shape, length) in enumerate(zip(bucket.shapes, bucket.lengths, strict=True)):
        if len(shape) > 1 and length:
            n = shape[0]
            m = length // shape[0]
            r = min(settings.rank, n, m)
            # Two factors have r·(n + m) elements, the matrix n·m.
            if r * (n + m) * settings.min_compression < n * m:
                matrices.append(LowRankMatrix(number, start, n, m, r))
        start += length
    return matrices


def message_lengths(
    bucket: CompressionBucket, matrices: Sequence[LowRankMatrix]
) -> tuple[int, int]:
    """Return the elements of the two messages."""
    rest = bucket.n - sum(matrix.n * matrix.m for matrix in matrices)
    return rest + sum(matrix.r * matrix.n for matrix in matrices), sum(
        matrix.r * matrix.m for matrix in matrices
    )


def rest_of(bucket: CompressionBucket, matrices: Sequence[LowRankMatrix]) -> list[slice]:
    """Return the parts of the vector between the matrices."""
    ends = [0, *(matrix.start + matrix.n * matrix.m for matrix in matrices)]
    starts = [*(matrix.start for matrix in matrices), bucket.n]
    return [slice(end, start) for end, start in zip(ends, starts, strict=True) if end < start]


def orthonormal(factor: Tensor) -> Tensor:
    """Return as many orthonormal rows, whose span contains the span of the factor's rows.

    factor: (r, n), r ≤ n, of any rank.
    """
    # QR by Householder reflections: Q is orthonormal even where columns depend on each other.
    rows: Tensor = torch.linalg.qr(factor.t()).Q.t().contiguous()
    return rows


def factors_in(message: Tensor, shapes: Sequence[tuple[int, int]]) -> list[Tensor]:
    """Return the beginning of a message as matrices of these shapes."""
    lengths = [rows * columns for rows, columns in shapes]
    pieces = torch.split(message[: sum(lengths)], lengths)
    return [piece.view(shape) for piece, shape in zip(pieces, shapes, strict=True)]


class PowerSGDCompressor:
    """Factors of a bucket's matrices, and their errors.

    Factors are stored and sent transposed, (r, n) and (r, m): BLAS is up to 25 times faster with
    few long rows than with few long columns.
    """

    def __init__(self, bucket: CompressionBucket, settings: PowerSGD, seed: int) -> None:
        self.bucket = bucket
        self.settings = settings
        self.matrices = matrices_of(bucket, settings, None)
        self.rest = rest_of(bucket, self.matrices)
        self.feedback = ErrorFeedback(bucket.n, bucket.work, bucket.device)
        self.calls = 0
        self.factors: list[Tensor] = []
        for matrix in self.matrices:
            # Drawn on the CPU, then moved: the same numbers on every device.
            random = generator(seed, "power-sgd", matrix.tensor)
            factor = torch.randn(matrix.r, matrix.m, generator=random, dtype=bucket.work)
            self.factors.append(factor.to(bucket.device))

    @torch.no_grad()
    def all_reduce(
        self,
        tensors: Sequence[Tensor],
        group: Group | torch.distributed.ProcessGroup | None,
        algorithm: Algorithm = "one_shot",
    ) -> None:
        self.bucket.check(tensors)
        group = Group.of(group)
        vector = self.bucket.vector(tensors)
        self.calls += 1
        if self.calls <= self.settings.start_after or not self.matrices:
            all_reduce(vector, group, algorithm)
        else:
            self._all_reduce_factors(vector, group, algorithm)
        self.bucket.give_back(vector, tensors)

    def _all_reduce_factors(self, vector: Tensor, group: Group, algorithm: Algorithm) -> None:
        """Replace the vector by the approximation of its sum."""
        # The first message: the factors P, and after them all that is not compressed. `lefts`,
        # `rest` and `rights` are views of the messages, so an all-reduce fills them.
        corrected = self.feedback.corrected(vector)
        first, second = map(vector.new_empty, message_lengths(self.bucket, self.matrices))
        lefts = factors_in(first, [(matrix.r, matrix.n) for matrix in self.matrices])
        rights = factors_in(second, [(matrix.r, matrix.m) for matrix in self.matrices])
        rest = torch.split(
            first, [*map(Tensor.numel, lefts), *(part.stop - part.start for part in self.rest)]
        )
        rest = rest[len(lefts) :]

        for matrix, factor, left in zip(self.matrices, self.factors, lefts, strict=True):
            torch.mm(orthonormal(factor), matrix.of(corrected).t(), out=left)
        # Uncompressed parts have no error, so no correction is added.
        for part, piece in zip(self.rest, rest, strict=True):
            piece.copy_(vector[part])
        all_reduce(first, group, algorithm)

        # Of the summed P, which all ranks have with the same bits.
        bases = list(map(orthonormal, lefts))
        for matrix, basis, right in zip(self.matrices, bases, rights, strict=True):
            torch.mm(basis, matrix.of(corrected), out=right)
        all_reduce(second, group, algorithm)

        for matrix, basis, right in zip(self.matrices, bases, rights, strict=True):
            # The sum replaces the gradient. An N-th of the sum counts as sent by this rank, and the
            # remainder of `corrected` is the error.
            torch.mm(basis.t(), right, out=matrix.of(vector))
            matrix.of(corrected).sub_(matrix.of(vector), alpha=1 / group.size)
        for part, piece in zip(self.rest, rest, strict=True):
            vector[part].copy_(piece)
            corrected[part].zero_()
        # The same decision on all ranks: an overflow must not spoil factors and errors of later
        # calls.
        if bool(second.isfinite().all()):
            self.factors = [right.clone() for right in rights]
            self.feedback.keep()

    def state(self) -> dict[str, Any]:
        return {
            "calls": self.calls,
            "error": self.feedback.error.clone(),
            "factors": [factor.clone() for factor in self.factors],
        }

    @torch.no_grad()
    def restore(self, state: Mapping[str, Any]) -> None:
        """Continue from a `state`. Raises ValueError if its shapes differ."""
        error = state.get("error")
        factors = state.get("factors", [])
        known = [factor.shape for factor in self.factors]
        if (
            error is None
            or error.shape != self.feedback.error.shape
            or [f.shape for f in factors] != known
        ):
            raise ValueError(
                f"this state does not belong to a compressor of {self.bucket.n} numbers with this "
                "rank"
            )
        self.feedback.error.copy_(error)
        for mine, given in zip(self.factors, factors, strict=True):
            mine.copy_(given)
        self.calls = int(state["calls"])
