"""Which gradients travel together, in what order: the plan of a step's all-reduces, as data.

Backward finishes gradients one after another, the last layer's first. Each message has a price of
its own, so small gradients share one, a *bucket*; but a bucket leaves only when its last gradient
is there. A plan is made of the order in which gradients finish: a bucket is closed as soon as it
has `limit` bytes (`filled`).

Plans are the same on all ranks, and buckets leave in the order of the plan, whatever the order in
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
"""Bytes of a bucket unless others are asked for. Twice or half as many hide the same share of the
exchange."""

LONG = 4 << 20
"""Bytes from which on a gradient may have a bucket to itself and stay where it is: copying it would
take a while."""

LINE = 64
"""Bytes of a cache line."""

ALL = 1 << 62
"""More bytes than there are."""

CARRIERS = (torch.float32, torch.float64)
"""Dtypes of buckets that can carry the tail: in half precision its numbers lose their value."""


class Kind(NamedTuple):
    """What a plan has to know of a gradient."""

    numel: int
    dtype: torch.dtype
    device: torch.device

    @classmethod
    def of(cls, parameter: Tensor) -> Kind:
        """That of a parameter's gradient, which has its dtype, device and number of elements."""
        return cls(parameter.numel(), parameter.dtype, parameter.device)

    @property
    def nbytes(self) -> int:
        return self.numel * self.dtype.itemsize


class Transfer(NamedTuple):
    """An all-reduce that has ended.

    number: the message's in the plan. start, end: in seconds of `time.perf_counter`. Where several
    were under way at once, it starts when the one before has ended.
    """

    number: int
    start: float
    end: float


@dataclass(frozen=True)
class Bucket:
    """Gradients that travel in one message.

    members: their indices, in the order in which they lie in memory. alone: whether it is one long
    gradient, which stays where autograd has put it; otherwise they lie in a flat buffer.
    """

    members: tuple[int, ...]
    alone: bool = False

    @classmethod
    def of(cls, kinds: Sequence[Kind], members: Iterable[int]) -> Bucket:
        """Gradients in a flat buffer, in which as many as possible begin on a cache line.

        Those whose bytes are a multiple of a line come first, so that the next one begins on a line
        too.
        """
        # A sort that is stable keeps the order of finishing within both kinds.
        return cls(tuple(sorted(members, key=lambda member: kinds[member].nbytes % LINE != 0)))


@dataclass(frozen=True)
class Plan:
    """The buckets in the order in which they leave. Every gradient is in one of them.

    carries: whether the tail rides in the last bucket, after its gradients; otherwise it is a
    message of its own, the last one, if there is a tail.
    """

    buckets: tuple[Bucket, ...]
    carries: bool

    def messages(self, tail: bool = True) -> int:
        """All-reduces of a step. tail: whether there is one."""
        return len(self.buckets) + (tail and not self.carries)

    def lengths(self, kinds: Sequence[Kind], tail: int = 0) -> list[int]:
        """Elements of each message, in the order of leaving. tail: numbers after the gradients."""
        lengths = []
        for bucket in self.buckets:
            lengths.append(sum(kinds[member].numel for member in bucket.members))
        if self.carries:
            lengths[-1] += tail
        elif tail:
            lengths.append(tail)
        return lengths

    def order(self) -> list[int]:
        """All gradients, as they leave."""
        return [member for bucket in self.buckets for member in bucket.members]


def filled(
    kinds: Sequence[Kind], order: Iterable[int], limit: int = LIMIT, long: int = LONG
) -> Plan:
    """Buckets of one dtype and device that are closed as soon as they have `limit` bytes.

    kinds: of all gradients. order: their indices, as they finish. long: bytes from which on a
    gradient has a bucket to itself. What is left over at the end leaves last, and of that a bucket
    that can carry the tail after all others.
    """
    started: dict[tuple[torch.dtype, torch.device], list[int]] = {}
    size: dict[tuple[torch.dtype, torch.device], int] = {}  # bytes of what is started
    buckets: list[Bucket] = []
    for index in order:
        kind = kinds[index]
        if kind.nbytes >= long:
            # Buckets of small gradients stay open meanwhile: they are not full.
            buckets.append(Bucket((index,), alone=True))
            continue
        sort = kind.dtype, kind.device
        started.setdefault(sort, []).append(index)
        size[sort] = size.get(sort, 0) + kind.nbytes
        # closed when it is full and not before: it may exceed the limit by most of a gradient
        if size[sort] >= limit:
            buckets.append(Bucket.of(kinds, started.pop(sort)))
            size[sort] = 0
    left = [Bucket.of(kinds, members) for members in started.values()]
    # stable, so that all ranks have the same order; the last one may carry the tail
    left.sort(key=lambda bucket: _can_carry(kinds, bucket))
    buckets += left
    return Plan(tuple(buckets), carries=bool(buckets) and _can_carry(kinds, buckets[-1]))


def _can_carry(kinds: Sequence[Kind], bucket: Bucket) -> bool:
    return not bucket.alone and kinds[bucket.members[0]].dtype in CARRIERS
