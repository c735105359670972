"""Buckets: groups of gradients that share a message, and their order; a step's plan as data.

Backward finishes gradients in turn, the last layer's first. Each message has a fixed
cost, so small gradients share a message, a *bucket*; but a bucket is sent only when its last
gradient is complete. A plan follows the order in which gradients finish: a bucket is closed as soon
as it has `limit` bytes (`fill_buckets`).

Plans are equal on all ranks, and buckets are sent in the order of the plan, whatever the order in
which a rank computes.

Source: Li et al. 2020, "PyTorch Distributed: Experiences on Accelerating Data Parallel Training".
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

LIMIT = 1 << 20
"""Default bytes of a bucket. Twice or half this size hides the same share of the exchange."""

LONG = 4 << 20
"""Bytes from which on a gradient may have its own bucket and stay in place, without a copy."""

LINE = 64
"""Bytes of a cache line."""

NO_BYTE_LIMIT = 1 << 62
"""Limit above any possible number of bytes."""

CARRIERS = (torch.float32, torch.float64)
"""Dtypes of buckets that can carry the trailer; half precision would round its numbers."""


class GradientSpec(NamedTuple):
    """Size, dtype and device of a gradient, from which plans are computed."""

    numel: int
    dtype: torch.dtype
    device: torch.device

    @classmethod
    def of(cls, parameter: Tensor) -> GradientSpec:
        """Return the kind of a parameter's gradient."""
        return cls(parameter.numel(), parameter.dtype, parameter.device)

    @property
    def nbytes(self) -> int:
        return self.numel * self.dtype.itemsize


class AllReduceTransfer(NamedTuple):
    """Completed all-reduce.

    number: the message's number in the plan. start, end: in seconds of `time.perf_counter`. If
    several transfers overlap, a transfer starts when the previous one has ended.
    """

    number: int
    start: float
    end: float


@dataclass(frozen=True)
class Bucket:
    """Gradients that share a message.

    members: their indices, in memory order. alone: whether the bucket is a single long gradient,
    which stays in autograd's memory; otherwise the gradients are in a flat buffer.
    """

    members: tuple[int, ...]
    alone: bool = False

    @classmethod
    def of(cls, kinds: Sequence[GradientSpec], members: Iterable[int]) -> Bucket:
        """Return a bucket whose gradients begin on cache lines, as far as possible.

        The bucket is a flat buffer. Gradients whose bytes are a multiple of a cache line come
        first, so that the next gradient begins on a line too.
        """
        # A stable sort preserves the order of finishing within both kinds.
        return cls(tuple(sorted(members, key=lambda member: kinds[member].nbytes % LINE != 0)))


@dataclass(frozen=True)
class BucketPlan:
    """Buckets in the order in which they are sent. Every gradient is in exactly one bucket.

    carries: whether the trailer is in the last bucket, after its gradients; otherwise the trailer,
    if there is one, is a separate last message.
    """

    buckets: tuple[Bucket, ...]
    carries: bool

    def messages(self, tail: bool = True) -> int:
        """Return the number of all-reduces of a step. tail: whether there is a trailer."""
        return len(self.buckets) + (tail and not self.carries)

    def lengths(self, kinds: Sequence[GradientSpec], tail: int = 0) -> list[int]:
        """Return the elements of each message, in order. tail: numbers after the gradients."""
        lengths = []
        for bucket in self.buckets:
            lengths.append(sum(kinds[member].numel for member in bucket.members))
        if self.carries:
            lengths[-1] += tail
        elif tail:
            lengths.append(tail)
        return lengths

    def order(self) -> list[int]:
        """Return the indices of all gradients in the order in which they are sent."""
        return [member for bucket in self.buckets for member in bucket.members]


def fill_buckets(
    kinds: Sequence[GradientSpec], order: Iterable[int], limit: int = LIMIT, long: int = LONG
) -> BucketPlan:
    """Return a plan of buckets of one dtype and device that are closed at `limit` bytes.

    kinds: of all gradients. order: their indices, as they finish. long: bytes from which on a
    gradient has its own bucket. Incomplete buckets at the end are sent last, and among them a
    bucket that can carry the trailer after all others.
    """
    started: dict[tuple[torch.dtype, torch.device], list[int]] = {}
    size: dict[tuple[torch.dtype, torch.device], int] = {}  # bytes of open buckets
    buckets: list[Bucket] = []
    for index in order:
        kind = kinds[index]
        if kind.nbytes >= long:
            # Buckets of small gradients stay open: they are not full.
            buckets.append(Bucket((index,), alone=True))
            continue
        sort = kind.dtype, kind.device
        started.setdefault(sort, []).append(index)
        size[sort] = size.get(sort, 0) + kind.nbytes
        # closed only when it is full: a bucket may exceed the limit by most of a gradient
        if size[sort] >= limit:
            buckets.append(Bucket.of(kinds, started.pop(sort)))
            size[sort] = 0
    left = [Bucket.of(kinds, members) for members in started.values()]
    # a stable sort gives all ranks the same order; the last bucket may carry the trailer
    left.sort(key=lambda bucket: _can_carry(kinds, bucket))
    buckets += left
    return BucketPlan(tuple(buckets), carries=bool(buckets) and _can_carry(kinds, buckets[-1]))


def _can_carry(kinds: Sequence[GradientSpec], bucket: Bucket) -> bool:
    return not bucket.alone and kinds[bucket.members[0]].dtype in CARRIERS
