"""Which gradients travel together, in what order: the plan of a step's all-reduces, as data.

Backward finishes gradients one after another, the last layer's first. Each message has a price of its own, so small
gradients share one, a *bucket*; but a bucket leaves only when its last gradient is there. Two rules make a plan of the
order in which gradients finish:

    filled    a bucket is closed as soon as it has `limit` bytes
    merged    the cut that ends earliest on a link that carries one message after another and takes alpha + beta·n
              seconds for n bytes. With r_j the time at which gradient j is ready and S_j the bytes up to it,
              f(0) = 0,   f(j) = min over i < j of  max(f(i), r_j) + alpha + beta·(S_j - S_i)
              is the earliest end of the first j gradients, and f of all is what is sought

Plans are the same on all ranks, and buckets leave in the order of the plan, whatever the order on a rank.

Sources: Li et al. 2020, "PyTorch Distributed" (buckets); Shi, Chu, Li 2019, "MG-WFBP: Efficient Data Communication for
Distributed Synchronous SGD Algorithms" (merging by the cost of messages).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

LIMIT = 1 << 20
"""Bytes of a bucket where nothing better is known."""

LONG = 4 << 20
"""Bytes from which on a gradient may have a bucket to itself and stay where it is: to copy it would take a while."""

LINE = 64

ALL = 1 << 62
"""More bytes than there are."""

CARRIERS = (torch.float32, torch.float64)
"""Dtypes of buckets that can carry the numbers behind the gradients, the tail."""


class Kind(NamedTuple):
    """What a plan has to know of a gradient."""

    numel: int
    dtype: torch.dtype
    device: torch.device

    @classmethod
    def of(cls, parameter: Tensor) -> Kind:
        return cls(parameter.numel(), parameter.dtype, parameter.device)

    @property
    def nbytes(self) -> int:
        return self.numel * self.dtype.itemsize


@dataclass(frozen=True)
class Bucket:
    """Gradients that travel in one message. members: their indices, in the order in which they lie.

    alone: it is one long gradient, which stays where autograd has put it; otherwise they lie in a flat buffer.
    """

    members: tuple[int, ...]
    alone: bool = False

    @classmethod
    def of(cls, kinds: Sequence[Kind], members: Iterable[int]) -> Bucket:
        """Gradients in a flat buffer, in which as many as possible begin on a cache line."""
        return cls(tuple(sorted(members, key=lambda member: kinds[member].nbytes % LINE != 0)))


@dataclass(frozen=True)
class Plan:
    """The buckets in the order in which they leave. Every gradient is in one of them.

    carries: whether the tail rides in the last of them, behind its gradients; otherwise it is a message of its own,
    the last one, if there is a tail.
    """

    buckets: tuple[Bucket, ...]
    carries: bool

    def messages(self, tail: bool = True) -> int:
        """All-reduces of a step. tail: whether there is one."""
        return len(self.buckets) + (tail and not self.carries)

    def lengths(self, kinds: Sequence[Kind], tail: int = 0) -> list[int]:
        """Elements of each message, in the order of leaving. tail: numbers behind the gradients."""
        lengths = [sum(kinds[member].numel for member in bucket.members) for bucket in self.buckets]
        if self.carries:
            lengths[-1] += tail
        elif tail:
            lengths.append(tail)
        return lengths

    def order(self) -> list[int]:
        """All gradients, as they leave."""
        return [member for bucket in self.buckets for member in bucket.members]


def filled(kinds: Sequence[Kind], order: Iterable[int], limit: int = LIMIT, long: int = LONG) -> Plan:
    """Buckets of one dtype and device that are closed as soon as they have `limit` bytes.

    kinds: of all gradients. order: their indices, as they finish. long: bytes from which on one has a bucket to itself.
    What is left over at the end leaves last, and behind all the bucket that can carry the tail.
    """
    started: dict[tuple[torch.dtype, torch.device], list[int]] = {}
    buckets: list[Bucket] = []
    for index in order:
        kind = kinds[index]
        if kind.nbytes >= long:
            buckets.append(Bucket((index,), alone=True))
            continue
        members = started.setdefault((kind.dtype, kind.device), [])
        members.append(index)
        if sum(kinds[member].nbytes for member in members) >= limit:
            buckets.append(Bucket.of(kinds, started.pop((kind.dtype, kind.device))))
    left = [Bucket.of(kinds, members) for members in started.values()]
    left.sort(key=lambda bucket: _can_carry(kinds, bucket))
    buckets += left
    return Plan(tuple(buckets), carries=bool(buckets) and _can_carry(kinds, buckets[-1]))


def _can_carry(kinds: Sequence[Kind], bucket: Bucket) -> bool:
    return not bucket.alone and kinds[bucket.members[0]].dtype in CARRIERS


def merged(kinds: Sequence[Kind], order: Sequence[int], ready: Sequence[float], alpha: float, beta: float) -> list[int]:
    """How many gradients each bucket has if their all-reduces are to end earliest: for `cut`.

    order: the indices of all gradients, as they finish. ready: when each of `order` is there, in seconds, never
    falling. alpha, beta: seconds of a message and of a byte. Of cuts that end within a hundredth of alpha of each other
    the one with the longer bucket is taken.
    """
    sent = np.concatenate([[0.0], np.cumsum([float(kinds[index].nbytes) for index in order])])
    ends, cuts = np.zeros(len(order) + 1), np.zeros(len(order) + 1, dtype=int)
    for j in range(1, len(order) + 1):
        candidates = np.maximum(ends[:j], ready[j - 1]) + alpha + beta * (sent[j] - sent[:j])
        cuts[j] = int(np.argmax(candidates <= candidates.min() + 0.01 * alpha))  # the first is the longest bucket
        ends[j] = candidates[cuts[j]]
    counts: list[int] = []
    end = len(order)
    while end:
        counts.append(end - int(cuts[end]))
        end = int(cuts[end])
    return counts[::-1]


def cut(kinds: Sequence[Kind], order: Sequence[int], counts: Iterable[int], long: int = LONG) -> Plan:
    """The plan whose buckets have so many gradients each, of one dtype and device. The last one carries the tail.

    long: bytes from which on a gradient with a bucket to itself stays where it is.
    """
    buckets: list[Bucket] = []
    start = 0
    for count in counts:
        members = order[start : start + count]
        start += count
        last = start == len(order)  # copied, however long it is, so that the tail needs no message of its own
        if count == 1 and kinds[members[0]].nbytes >= long and not last:
            buckets.append(Bucket(tuple(members), alone=True))
        else:
            buckets.append(Bucket.of(kinds, members))
    return Plan(tuple(buckets), carries=bool(buckets) and _can_carry(kinds, buckets[-1]))


def cost_of_messages(samples: Iterable[tuple[float, float]]) -> tuple[float, float]:
    """(alpha, beta) that explain the samples (bytes, seconds) best: least squares, neither of them below zero.

    With samples of one size all is beta. Raises ValueError without samples.
    """
    nbytes, seconds = np.array(list(samples), dtype=float).reshape(-1, 2).T
    if not len(nbytes):
        raise ValueError("there is nothing to fit: give measured messages")
    middle, mean = nbytes.mean(), seconds.mean()
    spread = float(((nbytes - middle) ** 2).sum())
    slope = float(((nbytes - middle) * (seconds - mean)).sum()) / spread if spread else mean / middle
    beta = min(max(0.0, slope), float(mean / middle))
    return max(0.0, float(mean - beta * middle)), beta
