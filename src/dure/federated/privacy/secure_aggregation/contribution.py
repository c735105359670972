"""Contribution of a client to a sum: its update as an integer vector, and the decoded sum.

    weight/most · Δ      of every trained weight, quantised          n_k·x inside the masked vector
    weight/most · (b - b_0)      of every floating-point buffer      b_0: the received buffer
    extras               additional tensors of the algorithm (SCAFFOLD's change of control),
        unweighted
    whole numbers        n_k; number of values cut off; samples; number of examples behind the loss,
                         and the loss times that number; rise of each counting buffer

No message outside of the sum reveals a client's number of examples or loss. The mean is (sum of
n_k·Δ) / (sum of n_k), in integers up to the division: it equals the mean of the quantised updates
to the bit, for any set of clients. Weights n_k are whole, from 1 to `most`: a client with more
examples has the weight `most`. A complex number becomes two real numbers.

A counting buffer (the number of batches that batch norm has seen) takes the mean rise, rounded up,
in place of the largest rise: a sum does not reveal the largest.

Cost: 4 bytes for each weight, and 8 to 12 bytes for each whole number.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from dure.federated.privacy.secure_aggregation.quantisation import Quantisation
from dure.federated.server.global_model import buffer_changes
from dure.protocol.messages import Assignment, Update

POINT = 1 << 10
"""Losses and counts are sums of multiples of 1 / POINT."""

MIDDLE = 1 << 45
"""Offset of numbers that may be negative, so that they travel as non-negative whole numbers."""

MOST = 1 << 46
"""Upper bound, exclusive, of the whole numbers in a vector."""

Key = Callable[[str, int], bytes]
"""Function (purpose, number) -> a fresh key of the client."""

WHOLES = 5
"""Number of whole numbers before those of counting buffers."""


class VectorShape(NamedTuple):
    """Numbers of values in each part of a vector.

    Args:
        deltas: real numbers in each tensor of weights.
        buffers: real numbers in each floating-point buffer.
        extras: real numbers in each extra tensor.
        counters: elements of each integer buffer.
    """

    deltas: tuple[int, ...]
    buffers: tuple[int, ...]
    extras: tuple[int, ...]
    counters: tuple[int, ...]

    @classmethod
    def of(cls, asked: Assignment, extras: Sequence[Tensor]) -> VectorShape:
        """Return the shape of answers to an assignment.

        `extras` are tensors of the extras' shapes.
        """
        return cls(
            tuple(map(_reals, asked.weights)),
            tuple(_reals(one) for one in asked.buffers if one.is_floating_point()),
            tuple(map(_reals, extras)),
            tuple(one.numel() for one in asked.buffers if _counts(one)),
        )

    @property
    def values(self) -> int:
        """Number of quantised values."""
        return sum(self.deltas) + sum(self.buffers) + sum(self.extras)

    @property
    def wholes(self) -> int:
        """Number of whole numbers."""
        return WHOLES + sum(self.counters)


class DecodedSum(NamedTuple):
    """Decoded sum.

    Args:
        clients: number of clients in the sum.
        weight: sum of n_k.
        cut: number of values beyond the range.
        samples: sum of processed samples.
        counted: number of examples behind the loss.
        loss: mean loss over `counted`; 0 without any.
        delta: weighted mean change of the trained weights.
        buffers: weighted mean change of the floating-point buffers.
        extra: plain mean of the extras.
        rises: rises of the counting buffers.
        clipped: sum of the clipped contributions with user-level privacy, in place of the tensors
            above; None otherwise.
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
    """Encoder of updates as integer vectors, and decoder of their sum; equal for all clients.

    Args:
        shape: numbers of values in a vector.
        quantisation: quantisation of the values.
        most: largest weight of a client.
    """

    shape: VectorShape
    quantisation: Quantisation
    most: int

    @property
    def length(self) -> int:
        """Number of 32-bit integers in a vector."""
        return self.shape.values + self.shape.wholes * self.quantisation.digits(MOST)

    def encode(self, update: Update, asked: Assignment, weight: float, key: Key) -> Tensor:
        """Return the int32 vector of an update.

        Args:
            update: the client's update.
            asked: assignment that the update answers.
            weight: n_k.
            key: draws keys for this vector alone.

        Raises ValueError for an update that is not finite, or for counters that decrease.
        """
        whole = min(max(1, round(weight)), self.most)
        moved = [*update.delta, *buffer_changes(update.buffers, asked.buffers)]
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
        """Check that `clients` vectors can have this sum; raises ValueError if not.

        An impossible sum shows that a client sent a wrong vector. Most wrong vectors make the sum
        impossible; the sum does not identify the client.
        """
        values, rest = total[: self.shape.values], total[self.shape.values :]
        self.quantisation.check(values, clients)
        weight, cut, *_ = self.quantisation.decode_whole(rest, MOST, clients)
        if not (clients <= weight <= clients * self.most and cut <= clients * self.shape.values):
            raise ValueError(f"this is not a sum of {clients} clients: its weight does not match")

    def decode(
        self, total: Tensor, clients: int, asked: Assignment, extras: Sequence[Tensor]
    ) -> DecodedSum:
        """Return the contents of the sum of `clients` vectors, with extras shaped like `extras`."""
        values, rest = total[: self.shape.values], total[self.shape.values :]
        numbers = self.quantisation.decode_whole(rest, MOST, clients)
        weight, cut, samples, count, loss, *rises = numbers
        shape = self.shape
        sizes = [*shape.deltas, *shape.buffers, *shape.extras]
        real = iter(torch.split(self.quantisation.decode(values, clients), sizes))
        # The mean is computed in float64: n_k times a weight has more digits than float32.
        mean = self.most / weight
        counted = count / POINT
        # The results have the shapes, dtypes and device of the sent tensors.
        like = asked.weights
        return DecodedSum(
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
    """Return all real numbers of the tensors as a flat tensor on the CPU."""
    real = [torch.view_as_real(one.resolve_conj()) if one.is_complex() else one for one in tensors]
    return torch.cat([one.reshape(-1).cpu() for one in real]) if real else torch.empty(0)


def _reals(tensor: Tensor) -> int:
    return tensor.numel() * (2 if tensor.is_complex() else 1)


def _like(real: Tensor, one: Tensor) -> Tensor:
    """Return real numbers as a tensor with the shape, dtype and device of `one`."""
    if one.is_complex():
        pairs = real.reshape(*one.shape, 2)
        return torch.view_as_complex(pairs).to(one.dtype).to(one.device)
    return real.reshape(one.shape).to(one.dtype).to(one.device)


def _counts(buffer: Tensor) -> bool:
    return not (buffer.is_floating_point() or buffer.is_complex())


def _rises(update: Update, asked: Assignment) -> list[int]:
    """Return the rise of each value of the counting buffers."""
    found: list[int] = []
    for new, old in zip(update.buffers, asked.buffers, strict=True):
        if _counts(old):
            found += (new.long() - old.long()).reshape(-1).tolist()
    return found


def _split_rises(rises: Sequence[int], clients: int, buffers: Sequence[Tensor]) -> list[Tensor]:
    """Return the mean rises, rounded up, in the shapes of the counting buffers."""
    at = 0
    found = []
    for one in buffers:
        if _counts(one):
            mean = [math.ceil(rise / clients) for rise in rises[at : at + one.numel()]]
            found.append(torch.tensor(mean, dtype=torch.int64).reshape(one.shape).to(one.device))
            at += one.numel()
    return found
