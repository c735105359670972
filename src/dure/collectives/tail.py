"""The tail of a message: numbers with names that ride at its end, in the same all-reduce.

Ranks that sum a long message can agree on a few numbers at no extra message: what rank 0 wishes,
the loss of each rank, when each rank arrived. A tail consists of *fields*, for N ranks:

    summed   w numbers that all ranks add to: a count, or a flag that one rank raises
    each     w numbers of every rank's own                                               N·w numbers
    times    a moment of every rank's own, in seconds, as whole seconds and the rest     2N numbers

In a field of the ranks' own numbers a rank writes to its own places and leaves the others zero. The
sum over the ranks is then exactly what each of them wrote, in whatever order an all-reduce adds.

A moment takes two numbers because float32 has 24 bits: an hour would be told to 0.2 ms. Whole
seconds are exact up to 2^24, half a year, and the rest is told to 0.1 µs.
"""

from __future__ import annotations

import operator
import time
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from dure.collectives.group import Group

Numbers = Mapping[str, Sequence[float]]
"""The numbers of each field, by its name."""


class Field(NamedTuple):
    """A part of a tail.

    width: numbers of a rank. own: whether every rank has numbers of its own. is_time: whether they
    are one moment, in two parts.
    """

    name: str
    width: int
    own: bool
    is_time: bool = False


def summed(name: str, width: int = 1) -> Field:
    """Numbers that are added over the ranks."""
    return Field(name, width, own=False)


def each(name: str, width: int = 1) -> Field:
    """Numbers of every rank's own."""
    return Field(name, width, own=True)


def times(name: str) -> Field:
    """A moment of every rank's own, in seconds since `common_start`."""
    return Field(name, 2, own=True, is_time=True)


class _Place(NamedTuple):
    """Where a field lies in the tail, and where in it this rank writes."""

    field: Field
    whole: slice
    mine: slice


class Tail:
    """A tail of `fields`, in this order, on rank `rank` of `ranks`.

    length: its numbers. Raises ValueError for two fields of one name.
    """

    def __init__(self, fields: Sequence[Field], rank: int, ranks: int) -> None:
        self._places: dict[str, _Place] = {}
        self.length = 0
        for field in fields:
            if field.name in self._places:
                raise ValueError(f"a tail has two fields that are called {field.name}")
            start = self.length
            self.length += field.width * ranks if field.own else field.width
            first = start + rank * field.width if field.own else start
            mine = slice(first, first + field.width)
            self._places[field.name] = _Place(field, slice(start, self.length), mine)

    def encode(self, said: Numbers) -> list[float]:
        """The numbers that travel, of what this rank says.

        A field that it leaves out is zeros: this rank has nothing to add. Raises ValueError for
        another width than the field's, KeyError for a field that the tail does not have.
        """
        numbers = [0.0] * self.length
        for name, values in said.items():
            field, _, mine = self._places[name]
            # Moments come as one number and travel as two, see above.
            parts = divmod(values[0], 1.0) if field.is_time else values
            # a slice takes any length, and would move all that follows
            if len(parts) != field.width:
                raise ValueError(f"{name} has {field.width} numbers, not {len(parts)}")
            numbers[mine] = parts
        return numbers

    def decode(self, numbers: Sequence[float]) -> dict[str, list[float]]:
        """The fields of a sum over all ranks, by name.

        Of a summed field its w numbers; of one of the ranks' own N·w, in order of rank; of moments
        N, one a rank, in seconds.
        """
        heard = {}
        for name, (field, whole, _) in self._places.items():
            found = list(numbers[whole])
            if field.is_time:
                found = list(map(operator.add, found[::2], found[1::2]))
            heard[name] = found
        return heard


def common_start(group: Group, clock_offset: float) -> float:
    """A moment that is the same on all ranks, in seconds of this process's `time.perf_counter`.

    clock_offset: seconds to add to this machine's clock to get rank 0's. All ranks call it.
    """
    # Rank 0's clock at this moment, told to all, and turned back into each rank's own time.
    now = time.perf_counter() + clock_offset
    return group.all_gather_values([now])[0][0] - clock_offset
