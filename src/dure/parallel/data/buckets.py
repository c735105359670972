"""Which gradients travel together, in what order: the plan of a step's all-reduces, as data.

Backward finishes gradients one after another, the last layer's first. Each message has a price of
its own, so small gradients share one, a *bucket*; but a bucket leaves only when its last gradient
is there. A plan is made of the order in which gradients finish: a bucket is closed as soon as it
has `limit` bytes (`filled`).

When a step's gradients have arrived follows from when they are ready and what messages cost
(`end_of`). On a link that carries one message after another, each alpha + beta·n seconds for n
bytes, with r_k the time at which the last gradient of message k is ready where nothing is sent, and
gamma the seconds that a message takes from the cores that compute,

    end_k = max(end_(k-1), r_k + gamma·k) + alpha + beta·n_k        k = 0, 1, …

Plans are the same on all ranks, and buckets leave in the order of the plan, whatever the order on a
rank.

Sources: Li et al. 2020, "PyTorch Distributed" (buckets); Shi, Chu, Li 2019, "MG-WFBP: Efficient
Data Communication for Distributed Synchronous SGD Algorithms" (merging by the cost of messages).
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
"""Bytes from which on a gradient may have a bucket to itself and stay where it is: to copy it would
take a while."""

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

    alone: it is one long gradient, which stays where autograd has put it; otherwise they lie in a
    flat buffer.
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

    carries: whether the tail rides in the last of them, behind its gradients; otherwise it is a
    message of its own, the last one, if there is a tail.
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


def filled(
    kinds: Sequence[Kind], order: Iterable[int], limit: int = LIMIT, long: int = LONG
) -> Plan:
    """Buckets of one dtype and device that are closed as soon as they have `limit` bytes.

    kinds: of all gradients. order: their indices, as they finish. long: bytes from which on one has
    a bucket to itself. What is left over at the end leaves last, and behind all the bucket that can
    carry the tail.
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


class Cost(NamedTuple):
    """What messages cost, in seconds. alpha: each of them, and beta: each byte, on the link; gamma:
    each, the cores."""

    alpha: float
    beta: float
    gamma: float = 0.0


def end_of(plan: Plan, kinds: Sequence[Kind], ready: Sequence[float], cost: Cost) -> float:
    """When the last message has arrived, in seconds. ready: when each of `kinds` is ready where
    nothing is sent."""
    end = 0.0
    for number, bucket in enumerate(plan.buckets):
        nbytes = sum(kinds[member].nbytes for member in bucket.members)
        begin = max(ready[member] for member in bucket.members) + cost.gamma * number
        end = max(end, begin) + cost.alpha + cost.beta * nbytes
    return end if plan.carries else end + cost.alpha


def cost_of_messages(samples: Iterable[tuple[float, float]]) -> tuple[float, float]:
    """(alpha, beta) that explain the samples (bytes, seconds) best: least squares, neither of them
    below zero.

    With samples of one size all is beta. Raises ValueError without samples.
    """
    nbytes, seconds = np.array(list(samples), dtype=float).reshape(-1, 2).T
    if not len(nbytes):
        raise ValueError("there is nothing to fit: give measured messages")
    middle, mean = nbytes.mean(), seconds.mean()
    spread = float(((nbytes - middle) ** 2).sum())
    slope = (
        float(((nbytes - middle) * (seconds - mean)).sum()) / spread if spread else mean / middle
    )
    beta = min(max(0.0, slope), float(mean / middle))
    return max(0.0, float(mean - beta * middle)), beta
