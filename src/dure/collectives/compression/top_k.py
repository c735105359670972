"""Top-k: the k numbers of largest magnitude travel, with their places; what stays is kept.

    p = g + e                     error feedback
    sent = the k largest |p|      e = p - sent, which is 0 at the places that were sent

k is the ratio of the bucket's n numbers, rounded up: of all its tensors together, not of each. Of
numbers that are equally large the first ones are sent. NaN counts as larger than infinity, so what
is not finite is sent first.

Cost: a rank sends k numbers and k places of 4 bytes to N-1 others: 8k(N-1) bytes in float32 (halves
travel as float32). The contraction ‖e‖² ≤ (1 - k/n) ‖p‖² is what makes it converge.

The largest are found without sorting: the threshold is guessed from a sample, what lies above the
guess is collected in one pass, and the k largest of those are exact, or the guess is repeated with
all numbers.

Sources: D. Alistarh et al., "The Convergence of Sparsified Gradient Methods", NeurIPS 2018; S.
Stich, J.-B. Cordonnier, M. Jaggi, "Sparsified SGD with Memory", NeurIPS 2018.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor

from dure.collectives.compression.bucket import Bucket
from dure.collectives.compression.compression import Compression
from dure.collectives.compression.gathered import Codec
from dure.collectives.compression.packing import numbers

SAMPLE = 1 << 14
"""Numbers that the threshold is guessed from; buckets shorter than 8 times as many are searched
whole."""


@dataclass(frozen=True)
class TopK(Compression):
    """The `ratio` of the numbers that is largest, with error feedback.

    Raises ValueError unless `ratio` is in (0, 1].
    """

    name: ClassVar[str] = "top-k"
    remembers: ClassVar[bool] = True
    ratio: float = 0.01

    def __post_init__(self) -> None:
        if not 0 < self.ratio <= 1:
            raise ValueError(f"top-k: the ratio is above 0 and at most 1, not {self.ratio}")

    def codec(self, bucket: Bucket) -> Codec:
        return TopKCodec(bucket, self.ratio)


class TopKCodec:
    """Payload: the k numbers in the work dtype, by place; then the places, int32, ascending."""

    def __init__(self, bucket: Bucket, ratio: float) -> None:
        if bucket.n >= 2**31:
            raise ValueError(
                f"top-k: places of 32 bits reach up to {2**31 - 1} numbers, not {bucket.n}: use "
                f"more buckets"
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
        """The places of the k largest numbers, ascending, int64."""
        # All of them: nothing to search.
        if self.k == self.bucket.n:
            return torch.arange(self.k, device=vector.device)
        if vector.device.type != "cpu":
            return vector.abs().topk(self.k, sorted=False).indices.sort().values
        magnitudes = self._bits(vector.numpy())
        places = self._candidates(magnitudes)
        return torch.from_numpy(places[first_largest(magnitudes[places], self.k)])

    def _bits(self, vector: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
        """The numbers' magnitudes as whole numbers, of the same order.

        Infinity and NaN come at the end.
        """
        # Without its sign bit an IEEE number is ordered as the whole number of the same bits. The
        # array is kept from call to call: a new one would be faulted in page by page.
        whole = np.dtype(f"i{vector.itemsize}")
        if len(self._magnitudes) != len(vector):
            self._magnitudes = np.empty(len(vector), dtype=whole)
        np.bitwise_and(vector.view(whole), np.iinfo(whole).max, out=self._magnitudes)
        return self._magnitudes

    def _candidates(self, magnitudes: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
        """Ascending places that hold the k largest and few others.

        Those are the ones above a guess, or else all.
        """
        n = len(magnitudes)
        k = self.k
        if n >= 8 * SAMPLE and 4 * k <= n:
            # The seed is n alone: which numbers are looked at changes the time, never the result.
            sample = magnitudes[np.random.Generator(np.random.PCG64(n)).integers(0, n, SAMPLE)]
            expected = k / n * SAMPLE
            # About `expected` numbers of the sample are among the k largest, give or take its root;
            # four deviations on the safe side, the guess is hardly ever too high.
            rank = SAMPLE - 1 - math.ceil(expected + 4 * math.sqrt(expected) + 4)
            places = np.flatnonzero(magnitudes >= np.partition(sample, rank)[rank])
            if len(places) >= k:
                return places
        return np.arange(n)

    def add(self, payload: Tensor, into: Tensor, sign: int) -> None:
        # Places are different ones, so the order of additions does not matter for the bits.
        values, places = self._parts(payload)
        into.index_add_(0, places, values, alpha=sign)

    def _parts(self, payload: Tensor) -> tuple[Tensor, Tensor]:
        return numbers(payload[: self.split], self.bucket.work), numbers(
            payload[self.split :], torch.int32
        )

    def is_finite(self, payload: Tensor) -> bool:
        return bool(self._parts(payload)[0].isfinite().all())

    def check(self, payload: Tensor) -> None:
        # Ascending places are different ones, so first and last tell the range of all.
        places = self._parts(payload)[1]
        if self.k and (
            int(places[0]) < 0
            or int(places[-1]) >= self.bucket.n
            or not bool((places.diff() > 0).all())
        ):
            raise ValueError(f"top-k: the places are not ascending within 0 … {self.bucket.n - 1}")


def first_largest(magnitudes: np.ndarray[Any, Any], k: int) -> np.ndarray[Any, Any]:
    """Which numbers are the k largest, the first ones where they are equal: bool."""
    # All above the k-th largest, and of those equal to it as many as are missing, from the front.
    least = np.partition(magnitudes, len(magnitudes) - k)[len(magnitudes) - k]
    chosen: np.ndarray[Any, Any] = magnitudes > least
    equal = np.flatnonzero(magnitudes == least)
    chosen[equal[: k - np.count_nonzero(chosen)]] = True
    return chosen
