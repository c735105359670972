"""Keys: assignment of the weights to servers.

The trained parameters of a model, one after another in its own order, form vectors, one a dtype. A
key is the index of an element in its vector. The keys are divided into contiguous ranges, so that
every server owns the same number of bytes, to within an element:

    server i of S has the bytes from total·i/S to total·(i+1)/S

A range is within a single vector, so a server that owns the end of a vector and the beginning of
the next has two ranges. A range with its values is a *shard*.

Source: Li et al. 2014, "Scaling Distributed Machine Learning with the Parameter Server", section
4.3.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec


class KeyRange(msgspec.Struct, frozen=True, order=True):
    """Keys start … stop-1 of a vector."""

    vector: int
    start: int
    stop: int

    def __len__(self) -> int:
        return self.stop - self.start


class VectorSize(msgspec.Struct, frozen=True):
    """Size of a vector: number of elements, and bytes of each."""

    elements: int
    itemsize: int


def divide(vectors: Sequence[VectorSize], servers: int) -> list[list[KeyRange]]:
    """Return the ranges of each server, in order of keys.

    A server may have none if keys are few.
    """
    total = sum(vector.elements * vector.itemsize for vector in vectors)
    found: list[list[KeyRange]] = [[] for _ in range(servers)]
    before = 0
    for number, vector in enumerate(vectors):
        for server, ranges in enumerate(found):
            # The end of a server and the beginning of the next round to the same key.
            start = _key_at(total * server, servers, before, vector)
            stop = _key_at(total * (server + 1), servers, before, vector)
            if stop > start:
                ranges.append(KeyRange(number, start, stop))
        before += vector.elements * vector.itemsize
    return found


def _key_at(numerator: int, denominator: int, before: int, vector: VectorSize) -> int:
    """Return the first key of a vector at or after a position in bytes, given as a fraction."""
    # Integer arithmetic: float fractions of a total beyond 2**53 would not be exact.
    behind = numerator - before * denominator
    key = -(-behind // (denominator * vector.itemsize))
    return min(max(key, 0), vector.elements)
