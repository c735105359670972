"""Tail of a message: named numbers appended to the message, in the same all-reduce.

Ranks that sum a long message can agree on a few numbers without a further message: the control
flags of rank 0, the loss of each rank, the arrival time of each rank. A tail consists of *fields*,
for N ranks:

    summed   w numbers that all ranks add to: a count, or a flag that any rank raises
    each     w numbers of every rank                                                     N·w numbers
    times    a time of every rank, in seconds, as whole seconds and the fraction         2N numbers

In a field with separate numbers for each rank, a rank writes to its own positions and leaves the
others zero. The sum over the ranks is then exactly the written number, in any order of additions. A
time takes two numbers because float32 has 24 bits: an hour would have a precision of 0.2 ms. Whole
seconds are exact up to 2^24, half a year, and the fraction is precise to 0.1 µs.
"""

from __future__ import annotations

import operator
import time
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from torch import Tensor

from dure.collectives.group import Group

Number = float | Tensor
"""A number of a trailer; a tensor of one element if it is in the memory of an accelerator."""

Numbers = Mapping[str, Sequence[Number]]
"""Numbers of each field, by the field's name."""


class TrailerField(NamedTuple):
    """Part of a tail.

    width: numbers of a rank. own: whether every rank has separate numbers. is_time: whether they
    are a time, in two parts.
    """

    name: str
    width: int
    own: bool
    is_time: bool = False


def summed_field(name: str, width: int = 1) -> TrailerField:
    """Return a field of numbers that are added over the ranks."""
    return TrailerField(name, width, own=False)


def per_rank_field(name: str, width: int = 1) -> TrailerField:
    """Return a field with separate numbers for every rank."""
    return TrailerField(name, width, own=True)


def time_field(name: str) -> TrailerField:
    """Return a field with a time of every rank, in seconds since `common_start`."""
    return TrailerField(name, 2, own=True, is_time=True)


class _Place(NamedTuple):
    """Slice of a field in the tail, and the slice that this rank writes."""

    field: TrailerField
    whole: slice
    mine: slice


class Trailer:
    """Tail of `fields`, in this order, on rank `rank` of `ranks`.

    length: its numbers. Raises ValueError for two fields with the same name.
    """

    def __init__(self, fields: Sequence[TrailerField], rank: int, ranks: int) -> None:
        self._places: dict[str, _Place] = {}
        self.length = 0
        for field in fields:
            if field.name in self._places:
                raise ValueError(f"a tail has two fields named {field.name}")
            start = self.length
            self.length += field.width * ranks if field.own else field.width
            first = start + rank * field.width if field.own else start
            mine = slice(first, first + field.width)
            self._places[field.name] = _Place(field, slice(start, self.length), mine)

    def encode(self, said: Numbers) -> list[Number]:
        """Return the numbers to send, from this rank's values by field.

        A missing field is zeros: this rank adds nothing. Raises ValueError for another width than
        the field's, KeyError for an unknown field.
        """
        numbers: list[Number] = [0.0] * self.length
        for name, values in said.items():
            field, _, mine = self._places[name]
            # A time is given as a single number and travels as two numbers, see above.
            parts = divmod(float(values[0]), 1.0) if field.is_time else values
            # A slice assignment accepts any length and would shift the following fields.
            if len(parts) != field.width:
                raise ValueError(f"{name} has {field.width} numbers, not {len(parts)}")
            numbers[mine] = parts
        return numbers

    def decode(self, numbers: Sequence[float]) -> dict[str, list[float]]:
        """Return the fields of a sum over all ranks, by name.

        A summed field has its w numbers; a field with separate numbers N·w, in order of rank; a
        field of times N, in seconds, in order of rank.
        """
        heard = {}
        for name, (field, whole, _) in self._places.items():
            found = list(numbers[whole])
            if field.is_time:
                found = list(map(operator.add, found[::2], found[1::2]))
            heard[name] = found
        return heard


def common_start(group: Group, clock_offset: float) -> float:
    """Return a time that is the same on all ranks, in seconds of `time.perf_counter` here.

    clock_offset: seconds to add to this machine's clock to get rank 0's. All ranks call it.
    """
    # Rank 0's clock now, sent to all ranks, and converted to each rank's own clock.
    now = time.perf_counter() + clock_offset
    return group.all_gather_values([now])[0][0] - clock_offset
