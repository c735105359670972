"""Top-k: the k numbers of largest magnitude travel, with their places; the rest is kept.

    p = g + e                     error feedback
    sent = the k largest |p|      e = p - sent, which is 0 at the places that were sent

k is the ratio of the bucket's n numbers, rounded up: of all its tensors together, not of each. Of
equally large numbers the first are sent. NaN counts as larger than infinity, so numbers that are
not finite are sent first.

Cost: a rank sends k numbers and k places of 4 bytes to N-1 others: 8k(N-1) bytes in float32
(half-precision numbers travel as float32). Convergence follows from the contraction ‖e‖² ≤ (1 -
k/n) ‖p‖².

The largest numbers are found without sorting: a sample gives an estimate of the threshold, a single
pass collects the numbers above the estimate, and the k largest of them are exact. If fewer than k
are above, all numbers are searched.

Sources: D. Alistarh et al., "The Convergence of Sparsified Gradient Methods", NeurIPS 2018; S.
Stich, J.-B. Cordonnier, M. Jaggi, "Sparsified SGD with Memory", NeurIPS 2018.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor

from dure.arguments import between
from dure.collectives.compression.bucket import CompressionBucket
from dure.collectives.compression.compression import Compression
from dure.collectives.compression.gathered import Codec
from dure.collectives.compression.packing import numbers

SAMPLE = 1 << 14
"""Size of the sample for the threshold; buckets below 8 times this size are searched completely."""


@dataclass(frozen=True)
class TopK(Compression):
    """The `ratio` of the numbers that is largest, with error feedback.

    Raises ValueError unless `ratio` is in (0, 1].
    """

    name: ClassVar[str] = "top-k"
    remembers: ClassVar[bool] = True
    ratio: float = field(default=0.01, metadata=between(0, 1, "(]"))

    def codec(self, bucket: CompressionBucket) -> Codec:
        return TopKCodec(bucket, self.ratio)


class TopKCodec:
    """Codec with the payload: the k numbers in the work dtype, by place; then the places.

    Places are int32 and ascending.
    """

    def __init__(self, bucket: CompressionBucket, ratio: float) -> None:
        if bucket.n >= 2**31:
            raise ValueError(
                f"top-k: indices of 32 bits allow {2**31 - 1} numbers, not {bucket.n}: use more "
                "buckets"
            )
        self.bucket = bucket
        self.k = min(bucket.n, math.ceil(ratio * bucket.n))
        self.split = self.k * bucket.work.itemsize
        self.nbytes = self.split + 4 * self.k
        self._magnitudes = np.empty(0)

    def encode(self, vector: Tensor, payload: Tensor, seed: int, position: Sequence[int]) -> None:
        places = self._largest(vector)
        numbers(payload[: self.split], vector.dtype).copy_(vector[places])
        numbers(payload[self.split :], torch.int32).copy_(places)

    def _largest(self, vector: Tensor) -> Tensor:
        """Return the places of the k largest numbers, ascending, int64."""
        # All of them: nothing to search.
        if self.k == self.bucket.n:
            return torch.arange(self.k, device=vector.device)
        if vector.device.type != "cpu":
            return vector.abs().topk(self.k, sorted=False).indices.sort().values
        magnitudes = self._bits(vector.numpy())
        places = self._candidates(magnitudes)
        return torch.from_numpy(places[first_largest(magnitudes[places], self.k)])

    def _bits(self, vector: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
        """Return the numbers' magnitudes as integers of the same order.

        Infinity and NaN come last.
        """
        # Without its sign bit an IEEE number is ordered as the whole number of the same bits. The
        # array is kept from call to call: a new one would be faulted in page by page.
        whole = np.dtype(f"i{vector.itemsize}")
        if len(self._magnitudes) != len(vector):
            self._magnitudes = np.empty(len(vector), dtype=whole)
        np.bitwise_and(vector.view(whole), np.iinfo(whole).max, out=self._magnitudes)
        return self._magnitudes

    def _candidates(self, magnitudes: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
        """Return ascending places that contain the k largest numbers and few others.

        These are the places above the estimated threshold, or all places.
        """
        n = len(magnitudes)
        k = self.k
        if n >= 8 * SAMPLE and 4 * k <= n:
            # The seed is n alone: the choice of the sample changes the time, never the result.
            sample = magnitudes[np.random.Generator(np.random.PCG64(n)).integers(0, n, SAMPLE)]
            expected = k / n * SAMPLE
            # About `expected` numbers of the sample are among the k largest, with a deviation of
            # its root; with a margin of four deviations the estimate is almost never too high.
            rank = SAMPLE - 1 - math.ceil(expected + 4 * math.sqrt(expected) + 4)
            places = np.flatnonzero(magnitudes >= np.partition(sample, rank)[rank])
            if len(places) >= k:
                return places
        return np.arange(n)

    def add(self, payload: Tensor, into: Tensor, sign: int) -> None:
        # The places are distinct, so the order of additions does not change the bits.
        values, places = self._parts(payload)
        into.index_add_(0, places, values, alpha=sign)

    def _parts(self, payload: Tensor) -> tuple[Tensor, Tensor]:
        return numbers(payload[: self.split], self.bucket.work), numbers(
            payload[self.split :], torch.int32
        )

    def is_finite(self, payload: Tensor) -> bool:
        return bool(self._parts(payload)[0].isfinite().all())

    def check(self, payload: Tensor) -> None:
        # The places have to be ascending, so the first and the last bound all of them.
        places = self._parts(payload)[1]
        if self.k and (
            int(places[0]) < 0
            or int(places[-1]) >= self.bucket.n
            or not bool((places.diff() > 0).all())
        ):
            raise ValueError(f"top-k: the places are not ascending within 0 … {self.bucket.n - 1}")


def first_largest(magnitudes: np.ndarray[Any, Any], k: int) -> np.ndarray[Any, Any]:
    """Return a bool mask of the k largest numbers, the first of equal numbers."""
    # All above the k-th largest, and of those equal to it as many as are missing, from the front.
    least = np.partition(magnitudes, len(magnitudes) - k)[len(magnitudes) - k]
    chosen: np.ndarray[Any, Any] = magnitudes > least
    equal = np.flatnonzero(magnitudes == least)
    chosen[equal[: k - np.count_nonzero(chosen)]] = True
    return chosen
