"""What a client adds to a sum: its update as one vector of integers, and back from the sum.

    weight/most · Δ      of every trained weight, quantised          n_k·x inside the masked vector
    weight/most · (b - b_0)      of every floating-point buffer      b_0: as it was received
    extras               what the algorithm sends besides (SCAFFOLD's change of control), unweighted
    whole numbers        n_k; how many values were cut off; the samples; what the loss has counted
                         in them, and the loss times that; by how much each counting buffer rose

So nothing of a client's travels outside of the sum: no number of examples and no loss. The mean is
(sum of n_k·Δ) / (sum of n_k), by integers until then: it is to the bit the mean of the quantised
updates, whoever is in it. Weights n_k are whole, from 1 to `most`: a client with more examples
counts as one with so many. A complex number is two real ones.

A counting buffer (the batches that a batch norm has seen) takes its mean rise, rounded up, in place
of the largest: the largest cannot be told from a sum.

Cost: 4 bytes a weight, and 8 to 12 for each whole number.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from dure.federated.privacy.secure_aggregation.quantisation import Quantisation
from dure.federated.server.global_model import changes
from dure.protocol.messages import Assignment, Update

POINT = 1 << 10
"""Losses and counts are sums of multiples of 1 / POINT."""

MIDDLE = 1 << 45
"""Added to what may be negative, so that it travels as a whole number that is not."""

MOST = 1 << 46
"""More than any whole number that travels."""

Key = Callable[[str, int], bytes]
"""(purpose, number) -> a key of a client's own, drawn once."""

WHOLES = 5
"""Whole numbers that are always there, before those of counting buffers."""


class Shape(NamedTuple):
    """What a vector is made of: the numbers of values in each part.

    deltas, buffers, extras: of floating-point tensors, each as real numbers. counters: of integer
    ones.
    """

    deltas: tuple[int, ...]
    buffers: tuple[int, ...]
    extras: tuple[int, ...]
    counters: tuple[int, ...]

    @classmethod
    def of(cls, asked: Assignment, extras: Sequence[Tensor]) -> Shape:
        """The shape of what answers an assignment. extras: what its extras look like."""
        return cls(
            tuple(map(_reals, asked.weights)),
            tuple(_reals(one) for one in asked.buffers if one.is_floating_point()),
            tuple(map(_reals, extras)),
            tuple(one.numel() for one in asked.buffers if _counts(one)),
        )

    @property
    def values(self) -> int:
        """Values that are quantised."""
        return sum(self.deltas) + sum(self.buffers) + sum(self.extras)

    @property
    def wholes(self) -> int:
        """Whole numbers."""
        return WHOLES + sum(self.counters)


class Total(NamedTuple):
    """What a sum says of the clients in it.

    clients: how many; weight: the sum of n_k; cut: values that were beyond the range. loss: mean
    over what was counted, `counted`. delta, buffers: the weighted means, of trained weights and of
    the changes of floating-point buffers. extra: the plain mean. rises: of counting buffers.
    clipped: with differential privacy of clients, the sum of what they have clipped, in place of
    all these.
    """

    clients: int
    weight: int
    cut: int
    samples: int
    counted: float
    loss: float
    delta: list[Tensor]
    buffers: list[Tensor]
    extra: list[Tensor]
    rises: list[Tensor]
    clipped: list[Tensor] | None = None


@dataclass(frozen=True)
class Contribution:
    """How updates become vectors, the same for all clients of a sum.

    shape: of a vector. quantisation: of its values. most: the largest weight.
    """

    shape: Shape
    quantisation: Quantisation
    most: int

    @property
    def length(self) -> int:
        """Integers of 32 bits in a vector."""
        return self.shape.values + self.shape.wholes * self.quantisation.digits(MOST)

    def encode(self, update: Update, asked: Assignment, weight: float, key: Key) -> Tensor:
        """The vector of an update, int32.

        weight: n_k. key: for this vector alone. Raises ValueError for an update that is not finite,
        or counters that fall.
        """
        whole = min(max(1, round(weight)), self.most)
        moved = [*update.delta, *changes(update.buffers, asked.buffers)]
        how = self.quantisation
        values, cut = how.encode(_joined(moved), key("rounding", 0), whole / self.most)
        extras, more = how.encode(_joined(update.extra), key("rounding", 1))
        cut += more
        count = max(0, round(update.count * POINT))
        loss = round(update.loss * update.count * POINT) + MIDDLE
        numbers = [whole, cut, update.samples, count, loss, *_rises(update, asked)]
        if not all(0 <= number < MOST for number in numbers):
            raise ValueError("its counts are too large for a sum, or fall")
        return torch.cat([values, extras, how.encode_whole(numbers, MOST)])

    def check(self, total: Tensor, clients: int) -> None:
        """Raises ValueError for a sum that no vectors of so many clients have: then one of them has
        sent something else. Most such sums show it; who it was, none does."""
        values, rest = total[: self.shape.values], total[self.shape.values :]
        self.quantisation.check(values, clients)
        weight, cut, *_ = self.quantisation.decode_whole(rest, MOST, clients)
        if not (clients <= weight <= clients * self.most and cut <= clients * self.shape.values):
            raise ValueError(f"this is no sum of {clients} clients: its weight is not theirs")

    def decode(
        self, total: Tensor, clients: int, asked: Assignment, extras: Sequence[Tensor]
    ) -> Total:
        """What the sum of the vectors of so many clients says. extras: what they look like."""
        values, rest = total[: self.shape.values], total[self.shape.values :]
        numbers = self.quantisation.decode_whole(rest, MOST, clients)
        weight, cut, samples, count, loss, *rises = numbers
        shape = self.shape
        sizes = [*shape.deltas, *shape.buffers, *shape.extras]
        real = iter(torch.split(self.quantisation.decode(values, clients), sizes))
        # In float64 until the mean is there: n_k times a weight has more digits than float32.
        mean = self.most / weight
        counted = count / POINT
        # As the clients' own tensors: of their shapes, dtypes and device.
        like = asked.weights
        return Total(
            clients=clients,
            weight=weight,
            cut=cut,
            samples=samples,
            counted=counted,
            loss=(loss - clients * MIDDLE) / POINT / counted if count else 0.0,
            delta=[_like(next(real) * mean, one) for one in like],
            buffers=[
                _like(next(real) * mean, one) for one in asked.buffers if one.is_floating_point()
            ],
            extra=[_like(next(real) / clients, one) for one in extras],
            rises=_split_rises(rises, clients, asked.buffers),
        )


def _joined(tensors: Sequence[Tensor]) -> Tensor:
    """All their real numbers in a row, on the CPU."""
    real = [torch.view_as_real(one.resolve_conj()) if one.is_complex() else one for one in tensors]
    return torch.cat([one.reshape(-1).cpu() for one in real]) if real else torch.empty(0)


def _reals(tensor: Tensor) -> int:
    return tensor.numel() * (2 if tensor.is_complex() else 1)


def _like(real: Tensor, one: Tensor) -> Tensor:
    """Real numbers as a tensor like this one."""
    if one.is_complex():
        pairs = real.reshape(*one.shape, 2)
        return torch.view_as_complex(pairs).to(one.dtype).to(one.device)
    return real.reshape(one.shape).to(one.dtype).to(one.device)


def _counts(buffer: Tensor) -> bool:
    return not (buffer.is_floating_point() or buffer.is_complex())


def _rises(update: Update, asked: Assignment) -> list[int]:
    """By how much counting buffers rose, value by value."""
    found: list[int] = []
    for new, old in zip(update.buffers, asked.buffers, strict=True):
        if _counts(old):
            found += (new.long() - old.long()).reshape(-1).tolist()
    return found


def _split_rises(rises: Sequence[int], clients: int, buffers: Sequence[Tensor]) -> list[Tensor]:
    """The mean rises, rounded up, as the counting buffers are shaped."""
    at = 0
    found = []
    for one in buffers:
        if _counts(one):
            mean = [math.ceil(rise / clients) for rise in rises[at : at + one.numel()]]
            found.append(torch.tensor(mean, dtype=torch.int64).reshape(one.shape).to(one.device))
            at += one.numel()
    return found
